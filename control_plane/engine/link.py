"""What the engine loop asks of its connection to a compute plane."""

from __future__ import annotations

from typing import Protocol

from control_plane.core.batch import StepBatch, StepResult


class ComputeLink(Protocol):
    """One controller's session with one compute plane.

    Everything is called by the engine thread, except `interrupt`. A connection that breaks while
    the session lives is the link's own affair. LinkError: the session is gone and what was in
    flight is lost; `open` again. FencedError and PlaneMismatchError are final.
    """

    def open(self) -> int | None:
        """Take the plane over with nothing in flight; the session's last step.

        Tries for a moment only: None if the plane is not there or not free yet. Raises FencedError
        if another controller took the plane from this one, PlaneMismatchError if it is not the
        plane it was.
        """
        ...

    def send(self, batch: StepBatch) -> None:
        """Send a step; does not wait."""
        ...

    def receive(self, timeout_s: float | None) -> StepResult | None:
        """Wait for the next result; None after `timeout_s` or an `interrupt`.

        Works without a session too: then only the timeout and `interrupt` end it.
        """
        ...

    def interrupt(self) -> None:
        """Make a `receive` under way, or else the next one, return at once. Any thread."""
        ...

    def close(self) -> None:
        """End the session and forget what is in flight; `open` may follow."""
        ...
