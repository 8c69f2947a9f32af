"""All that observes one control plane, in one place, for the composition root."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from control_plane.engine.watch import WatchMaker
from control_plane.metrics.request_meter import RequestMeter
from control_plane.metrics.visits import VisitMeter
from control_plane.tracing.provider import Tracing
from planes.errors import ConfigError
from planes.extras import the_extra

if TYPE_CHECKING:
    from control_plane.engine.member import Member
    from control_plane.metrics.page import MetricsPage

NEEDED = "prometheus_client"
EXTRA = "http"


class Instruments:
    """The meters of one control plane; nothing of them is global.

    `tracing`: None: nobody wants spans. `repeats_vllm`: the page has vLLM's names too.
    """

    def __init__(self, tracing: Tracing | None, *, repeats_vllm: bool = False) -> None:
        self.visits = VisitMeter()
        self.requests = RequestMeter()
        self._tracing = tracing
        self._repeats_vllm = repeats_vllm

    def watch(self, *models: str) -> WatchMaker:
        """Return what makes the watches of requests for a model and its adapters, by name."""
        if self._tracing is None:
            return self.requests.watch
        return self._tracing.watch(models, self.requests.watch)

    def page(self, members: Callable[[], Sequence[Member]]) -> Callable[[], MetricsPage] | None:
        """Return what loads the page of `/metrics`, in some tens of milliseconds, on any thread.

        None without prometheus_client; ConfigError if vLLM's names are wanted without it.
        """
        if importlib.util.find_spec(NEEDED) is None:
            if self._repeats_vllm:
                raise ConfigError(
                    f"metrics_compat: the metrics page needs {NEEDED}, of {the_extra(EXTRA)}",
                    field="metrics_compat",
                )
            return None

        def load() -> MetricsPage:
            from control_plane.metrics.page import MetricsPage, Sources

            sources = Sources(self.visits, self.requests, members)
            return MetricsPage(sources, repeats_vllm=self._repeats_vllm)

        return load

    def close(self) -> None:
        """Send the last spans; may wait for their collector."""
        if self._tracing is not None:
            self._tracing.close()
