"""The page of `/metrics`: reads the meters when it is asked for, and spells them for Prometheus.

Needs prometheus_client, of the extra `http`; nothing else here does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeAlias

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from control_plane.engine.member import Member
from control_plane.metrics.families import MODEL, PLANE, PREFIX, SERVICE, VLLM_PREFIX, Family
from control_plane.metrics.histogram import Reading
from control_plane.metrics.request_meter import RequestMeter
from control_plane.metrics.visits import VisitMeter

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Value: TypeAlias = int | float | Reading
Labels: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sources:
    """What the page shows. `members`: the compute planes that answered, called at every look."""

    visits: VisitMeter
    requests: RequestMeter
    members: Callable[[], Sequence[Member]]


@dataclass(slots=True)
class _Column:
    """A family and its values, by those of its labels."""

    family: Family
    values: dict[Labels, Value] = field(default_factory=dict)

    def spell(self, prefix: str, names: Labels, constant: Labels = ()) -> Metric:
        """Return it as prometheus_client knows it; `constant`: label values before its own."""
        family, labels = self.family, names
        name = prefix + family.name
        if family.kind == "histogram":
            histogram = HistogramMetricFamily(name, family.help, labels=labels)
            for values, reading in self.values.items():
                if isinstance(reading, Reading):
                    histogram.add_metric((*constant, *values), _buckets(reading), reading.total)
            return histogram
        kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
        metric = kind(name, family.help, labels=labels)
        for values, number in self.values.items():
            if not isinstance(number, Reading):
                metric.add_metric((*constant, *values), number)
        return metric


class MetricsPage:
    """Makes the page of one control plane, in a registry of its own; used on the event loop.

    `repeats_vllm`: what vLLM has too is there twice, once with vLLM's name.
    """

    def __init__(self, sources: Sources, *, repeats_vllm: bool = False) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Meters(sources, repeats_vllm=repeats_vllm))
        ProcessCollector(registry=self._registry)

    def __call__(self) -> tuple[bytes, str]:
        """Return the page and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE


class _Meters(Collector):
    def __init__(self, sources: Sources, *, repeats_vllm: bool) -> None:
        self._sources = sources
        self._repeats_vllm = repeats_vllm

    def collect(self) -> Iterator[Metric]:
        sources = self._sources
        for column in _service_columns(sources.visits):
            yield column.spell(PREFIX, column.family.labels)
        members = sources.members()
        if not members:  # nothing is known of a model, and nothing was asked of one
            return
        model = members[0].connected.plane.model
        names: Labels = ("model_name",)
        of_model = _model_columns(sources.requests)
        for column in of_model:
            yield column.spell(PREFIX, (*names, *column.family.labels), (model,))
        addresses = [member.facts.address for member in members]
        of_planes = _plane_columns(members, addresses)
        for column in of_planes:
            yield column.spell(PREFIX, (*names, "plane"), (model,))
        if not self._repeats_vllm:
            return
        # vLLM's engines have numbers; what is not of one of several belongs to none of them.
        names = ("model_name", "engine")
        for column in of_model:
            if column.family.is_vllms:
                engine = "0" if len(members) == 1 else "all"
                yield column.spell(VLLM_PREFIX, (*names, *column.family.labels), (model, engine))
        for column in _plane_columns(members, [str(index) for index in range(len(members))]):
            if column.family.is_vllms:
                yield column.spell(VLLM_PREFIX, names, (model,))


def _buckets(reading: Reading) -> list[tuple[str, float]]:
    bounds = [*map(floatToGoString, reading.bounds), "+Inf"]
    return list(zip(bounds, accumulate(reading.counts), strict=True))


def _service_columns(visits: VisitMeter) -> list[_Column]:
    values: dict[str, dict[Labels, Value]] = {
        "requests_total": dict(visits.num_requests.items()),
        "errors_total": dict(visits.num_errors.items()),
        "inflight_requests": {(name,): n for name, n in visits.num_in_flight.items()},
        "streaming_requests_total": {(name,): n for name, n in visits.num_streamed.items()},
    }
    return [_Column(family, values[name]) for name, family in SERVICE.items()]


def _model_columns(meter: RequestMeter) -> list[_Column]:
    values: dict[str, dict[Labels, Value]] = {
        "prompt_tokens_total": {(): meter.num_prompt_tokens},
        "generation_tokens_total": {(): meter.num_generation_tokens},
        "request_success_total": {(r.value,): n for r, n in meter.num_successes.items()},
        "requests_cancelled_total": {(): meter.num_cancelled},
        "time_to_first_token_seconds": {(): meter.time_to_first_token.read()},
        "inter_token_latency_seconds": {(): meter.inter_token.read()},
        "e2e_request_latency_seconds": {(): meter.e2e.read()},
        "request_queue_time_seconds": {(): meter.queue.read()},
        "request_prefill_time_seconds": {(): meter.prefill.read()},
        "request_decode_time_seconds": {(): meter.decode.read()},
    }
    return [_Column(family, values[name]) for name, family in MODEL.items()]


def _plane_columns(members: Sequence[Member], names: Sequence[str]) -> list[_Column]:
    columns = {name: _Column(family) for name, family in PLANE.items()}
    for member, plane in zip(members, names, strict=True):
        for name, value in _plane_values(member).items():
            columns[name].values[plane,] = value
    return list(columns.values())


def _plane_values(member: Member) -> dict[str, Value]:
    loop = member.loop
    meter, counts = loop.meter, loop.metrics
    is_caching = member.connected.prefix_cache
    return {
        # Counts as of one turn, and of this moment: they may be a request apart.
        "num_requests_running": max(0, loop.num_open_requests - counts.waiting_requests),
        "num_requests_waiting": counts.waiting_requests,
        "kv_cache_usage_perc": loop.memory_stats.utilization,
        "prefix_cache_queries_total": meter.num_prefix_queries if is_caching else 0,
        "prefix_cache_hits_total": meter.num_prefix_hits if is_caching else 0,
        "num_preemptions_total": counts.num_preemptions,
        "num_swaps_total": counts.num_swaps,
        "states_kept": counts.num_kept_states,
        "state_hits_total": counts.num_state_hits,
        "spec_decode_num_draft_tokens_total": counts.num_drafts,
        "spec_decode_num_accepted_tokens_total": counts.num_kept_drafts,
        "iteration_tokens_total": meter.iteration_tokens.read(),
        "plane_step_seconds": meter.step.read(),
        "plane_rtt_seconds": meter.rtt.read(),
        "scheduler_step_seconds": meter.turn.read(),
        "plane_up": int(member.is_linked),
        "plane_epoch": member.epoch,
        "plane_losses_total": meter.num_losses,
        "plane_stalls_total": counts.num_stalls,
        "plane_last_step_age_seconds": counts.last_step_age_s,
    }
