"""The link to one of several compute planes, which may do without it."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from control_plane.core.batch import StepBatch, StepResult
from control_plane.engine.link import ComputeLink
from control_plane.errors import FencedError, LinkError, PlaneMismatchError

UNFIT_PAUSE_S = 1.0
"""Before a plane that is not to be used is asked again what it is."""

_log = structlog.get_logger(__name__)


class OneOfSeveral:
    """A `ComputeLink` whose plane is left alone as long as it is another one, or another's.

    What ends a control plane with one compute plane must not end the requests of its siblings.
    `others_serve`: whether any does; asked on the engine thread. `address`: for the log.
    """

    def __init__(
        self,
        link: ComputeLink,
        *,
        address: str,
        others_serve: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._address = address
        self._others_serve = others_serve
        self._clock = clock
        self._not_before = clock()
        self._complaint: str | None = None
        self.send: Callable[[StepBatch], None] = link.send
        self.interrupt = link.interrupt
        self.close = link.close

    def open(self) -> int | None:
        """Open the link; None also where the plane is not to be used now."""
        if self._clock() < self._not_before:
            return None
        try:
            last_step = self._link.open()
        except (FencedError, PlaneMismatchError) as error:
            if not self._others_serve():
                raise
            self._leave_alone(error.message)
            return None
        if last_step is not None:
            self._complaint = None
        return last_step

    def receive(self, timeout_s: float | None) -> StepResult | None:
        """Wait for the next result; a plane that another controller takes is lost, no more."""
        try:
            return self._link.receive(timeout_s)
        except FencedError as error:
            if not self._others_serve():
                raise
            raise LinkError(error.message) from None

    def _leave_alone(self, why: str) -> None:
        """Wait before the next attempt, and say why, once until it changes."""
        self._not_before = self._clock() + UNFIT_PAUSE_S
        if why != self._complaint:
            self._complaint = why
            _log.error("compute plane left alone, others serve", address=self._address, error=why)
