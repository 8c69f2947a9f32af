"""A step in which every row decodes: as it goes the short way, and once it is queued."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from compute_plane.cuda.answers import answer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compute_plane.cuda.decode_wants import DecodeWants, Ragged
    from compute_plane.cuda.drivers import Event
    from compute_plane.cuda.staging import Berth
    from compute_plane.cuda.step_times import TimedStep
    from compute_plane.executor.interface import ExecutionBatch, ExecutionOutput

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class DecodeUnderWay:
    """Such a step that is queued; a `LaunchedStep`. `done`: when its results are in the berth."""

    batch: ExecutionBatch
    wants: DecodeWants
    berth: Berth
    vocab_size: int
    block_digests: Sequence[int]
    done: Event
    timed: TimedStep

    @property
    def begun_ns(self) -> int | None:
        """Since when the device has had its graph, beside which the rest is little."""
        return self.timed.begun_ns

    @property
    def ended_ns(self) -> int | None:
        """When it was over, once it has been waited for."""
        return self.timed.ended_ns

    def wait(self) -> None:
        """Wait for the step; from any thread, also once the berth is another step's."""
        self.done.wait()

    def answer(self) -> ExecutionOutput:
        """Wait for the step and return what it produced; once only. Raises DeviceLostError."""
        results = self.berth.collect()
        return answer(self.batch, self.wants.plan, results, self.vocab_size, self.block_digests)


@dataclass(frozen=True, slots=True)
class TakenStep:
    """A batch that goes this way: the graph's rows, the slot of the pool that each row writes.

    `ragged`: what is sent beside its columns; None: all of that is there.
    """

    batch: ExecutionBatch
    num_graph_rows: int
    kv_slots: Array
    wants: DecodeWants
    ragged: Ragged | None
