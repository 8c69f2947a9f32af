"""Decode steps captured once and replayed: one launch where there are some ten a layer.

A graph repeats the very launches it was captured from, on the very memory, so a graph exists for
each number of rows of a ladder, and a step takes the smallest that holds its rows; the rows that
are missing are padding. Its inputs are tensors of its own, which a step's are copied into on the
device; its output is the logits of all its rows. What is asked of the logits differs from step to
step, so it is queued behind the graph, not in it.

    step of 5 rows   token_ids │ a b c d e 0 0 0 │ ──copy──▶ │ graph of 8 rows │ ──▶ logits [8, V]
                     tables    │ 8 × 3 blocks    │ ──copy──▶ │ tables [8, M]   │
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from compute_plane.cuda.batch_layout import StepTensors
from compute_plane.cuda.operations import PADDING_SLOT
from compute_plane.errors import GraphCaptureError, GraphReplayError

if TYPE_CHECKING:
    from compute_plane.cuda.drivers import Driver, Graph
    from compute_plane.cuda.model import LlamaModel
    from compute_plane.model.spec import ModelSpec

LADDER: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of rows that graphs are captured for: from 16 on at most a third is padding."""


FLOAT_BYTES: Final = 4
SHARED_BYTES: Final = 256 << 20


def batch_sizes(max_rows: int) -> list[int]:
    """Return the rungs that a plane of so many rows a step can use, the smallest first.

    The last one holds all rows, if the ladder goes so far.
    """
    sizes = [size for size in LADDER if size < max_rows]
    if len(sizes) < len(LADDER):
        sizes.append(LADDER[len(sizes)])
    return sizes


def bytes_of_graphs(spec: ModelSpec, sizes: Sequence[int], block_size: int) -> int:
    """Return what graphs of some numbers of rows take together, at most.

    Each keeps its logits and its block tables; the tensors of the layers they share, and those are
    small beside `SHARED_BYTES`, as is what the driver keeps of a graph.
    """
    row = FLOAT_BYTES * (spec.vocab_size + -(-spec.context_length // block_size))
    return SHARED_BYTES + row * sum(sizes)


@dataclass(slots=True)
class _DecodeGraph:
    """A graph and the memory it works on. `logits` is set when it is captured."""

    inputs: StepTensors
    logits: Tensor | None = None
    graph: Graph | None = None


class DecodeGraphs:
    """The captured decode steps of a model.

    `table_width` M: blocks of the longest sequence there can be. Of a driver without graphs nothing
    is ever captured.
    """

    def __init__(
        self, driver: Driver, model: LlamaModel, *, table_width: int, longest: int
    ) -> None:
        self._driver = driver
        self._model = model
        self._table_width = table_width
        self._longest = longest
        self._graphs: dict[int, _DecodeGraph] = {}

    @property
    def captured(self) -> tuple[int, ...]:
        """The numbers of rows there are graphs for, the smallest first."""
        return tuple(sorted(self._graphs))

    def rung(self, num_rows: int) -> int | None:
        """Return the smallest captured number of rows that holds `num_rows`; None if none does."""
        return next((size for size in self.captured if size >= num_rows), None)

    def capture(self, num_rows: int) -> None:
        """Capture a step of `num_rows`, unless that was done. Raises GraphCaptureError."""
        if num_rows in self._graphs or not self._driver.has_graphs:
            return
        made = _DecodeGraph(self._padding(num_rows))

        def work() -> None:
            made.logits = self._model.logits(self._model.run(made.inputs), None)

        try:
            made.graph = self._driver.capture(work)
        except RuntimeError as error:  # torch's, out of memory among them
            raise GraphCaptureError(
                f"the decode step of {num_rows} rows could not be captured "
                f"(--no-cuda-graph does without): {_one_line(error)}"
            ) from error
        self._graphs[num_rows] = made

    def capture_ladder(self, max_rows: int, max_bytes: int) -> list[int]:
        """Capture the rungs up to `max_rows` that fit into `max_bytes`; return those left out.

        The largest first, since the smaller ones then find room in its memory; one that takes more
        and goes beyond is released, though its memory may stay for those that find room in it.
        Raises GraphCaptureError.
        """
        left_out = []
        held = before = self._held_bytes()
        for size in reversed(batch_sizes(max_rows)):
            self.capture(size)
            after = self._held_bytes()
            if size in self._graphs and after > held and after - before > max_bytes:
                self._release(size)
                left_out.append(size)
            held = self._held_bytes()
        return left_out

    def _held_bytes(self) -> int:
        """Return how much of the device's memory is held, by whomever."""
        self._driver.release_unused()
        return self._driver.total_bytes() - (self._driver.free_bytes() or 0)

    def replay(self, step: StepTensors) -> Tensor:
        """Queue a step that was padded to a rung; return the logits of its rows, float32 [R, V].

        They stay until a graph is replayed again. Raises GraphReplayError.
        """
        made = self._graphs[step.num_decode]
        inputs = made.inputs
        inputs.token_ids.copy_(step.token_ids)
        inputs.positions.copy_(step.positions)
        inputs.kv_slots.copy_(step.kv_slots)
        inputs.decode_lens.copy_(step.decode_lens)
        # What lies right of a row's own blocks is never read.
        inputs.decode_tables[:, : step.decode_tables.shape[1]].copy_(step.decode_tables)
        if made.graph is None or made.logits is None:
            raise GraphReplayError(f"the graph of {step.num_decode} rows was never captured")
        try:
            made.graph.replay()
        except RuntimeError as error:
            raise GraphReplayError(
                f"the graph of {step.num_decode} rows failed: {_one_line(error)}"
            ) from error
        return made.logits

    def _release(self, num_rows: int) -> None:
        made = self._graphs.pop(num_rows)
        made.logits = None
        if made.graph is not None:
            made.graph.release()

    def _padding(self, num_rows: int) -> StepTensors:
        """Return the inputs of a graph: rows of padding, so that capturing writes no block."""

        def column(value: int, dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=self._driver.device)

        with self._driver.computing():
            return StepTensors(
                token_ids=column(0, torch.int32, num_rows),
                positions=column(0, torch.int32, num_rows),
                kv_slots=column(PADDING_SLOT, torch.int64, num_rows),
                num_decode=num_rows,
                decode_tables=column(0, torch.int32, num_rows, self._table_width),
                decode_lens=column(0, torch.int32, num_rows),
                longest=self._longest,
                prefill=None,
            )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
