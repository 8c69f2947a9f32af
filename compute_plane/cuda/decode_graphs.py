"""Decode steps captured once and replayed: one launch where there are some ten a layer.

A graph repeats the very launches it was captured from, on the very memory, so a graph exists for
each number of rows of a ladder, and a step takes the smallest that holds its rows; the rows that
are missing are padding. Its inputs lie at places of its own, where every step is written
(`decode_steps`); its output is the logits of all its rows. What is asked of the logits differs from
step to step, so it is queued behind the graph, not in it.

    step of 5 rows   token_ids │ a b c d e 0 0 0 │ ──copy──▶ │ graph of 8 rows │ ──▶ logits [8, V]
                     tables    │ 5 × 3 blocks    │ ──copy──▶ │ tables [8, M]   │

Graphs share the memory of their inputs (`decode_inputs`): no two of them run at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from torch import Tensor

from compute_plane.cuda.decode_inputs import GraphInputs, InputMemory, bytes_of_inputs
from compute_plane.errors import GraphCaptureError, GraphReplayError

if TYPE_CHECKING:
    from compute_plane.cuda.drivers import Driver, Graph
    from compute_plane.cuda.model import DecoderModel
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


def bytes_of_graphs(
    spec: ModelSpec, sizes: Sequence[int], block_size: int, scratch_bytes: int = 0
) -> int:
    """Return what graphs of some numbers of rows take together, at most.

    Each keeps its logits. They share their inputs, the scratch memory of attention,
    `scratch_bytes`, and the tensors of the layers, which are small beside `SHARED_BYTES`, as is
    what the driver keeps of a graph.
    """
    width = -(-spec.context_length // block_size)
    inputs = bytes_of_inputs(max(sizes), width, has_states=spec.recurrence is not None)
    logits = FLOAT_BYTES * spec.vocab_size * sum(sizes)
    return SHARED_BYTES + scratch_bytes + logits + inputs


@dataclass(slots=True)
class _DecodeGraph:
    """A graph and the memory it works on. `logits` is set when it is captured."""

    inputs: GraphInputs
    logits: Tensor | None = None
    graph: Graph | None = None


class DecodeGraphs:
    """The captured decode steps of a model.

    `table_width` M: blocks of the longest sequence there can be. Of a driver without graphs nothing
    is ever captured.
    """

    def __init__(
        self, driver: Driver, model: DecoderModel, *, table_width: int, longest: int
    ) -> None:
        self._driver = driver
        self._model = model
        self._table_width = table_width
        self.longest = longest
        """Tokens of a sequence, at most."""
        self._graphs: dict[int, _DecodeGraph] = {}
        self._captured: tuple[int, ...] = ()
        self._memory: InputMemory | None = None

    @property
    def captured(self) -> tuple[int, ...]:
        """The numbers of rows there are graphs for, the smallest first."""
        return self._captured

    def rung(self, num_rows: int) -> int | None:
        """Return the smallest captured number of rows that holds `num_rows`; None if none does."""
        return next((size for size in self._captured if size >= num_rows), None)

    def capture(self, num_rows: int) -> None:
        """Capture a step of `num_rows`, unless that was done. Raises GraphCaptureError."""
        if num_rows in self._graphs or not self._driver.has_graphs:
            return
        step = (inputs := self._padding(num_rows)).step
        made = _DecodeGraph(inputs)

        def work() -> None:
            made.logits = self._model.logits(self._model.run(step), None)

        try:
            made.graph = self._driver.capture(work)
        except RuntimeError as error:  # torch's, out of memory among them
            raise GraphCaptureError(
                f"the decode step of {num_rows} rows could not be captured "
                f"(--no-cuda-graph does without): {_one_line(error)}"
            ) from error
        self._graphs[num_rows] = made
        self._captured = tuple(sorted(self._graphs))

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
            if after > held and after - before > max_bytes:
                self._release(size)
                left_out.append(size)
            held = self._held_bytes()
        return left_out

    def _held_bytes(self) -> int:
        """Return what is held. Not what others hold: planes alike would capture other graphs."""
        self._driver.release_unused()
        return self._driver.held_bytes()

    def inputs(self, num_rows: int) -> GraphInputs:
        """Return where the graph of a rung reads its inputs. Raises GraphReplayError."""
        return self._graph(num_rows).inputs

    def run(self, num_rows: int) -> Tensor:
        """Queue the graph of a rung whose inputs are there; return its logits, float32 [R, V].

        They stay until a graph is replayed again. Raises GraphReplayError.
        """
        made = self._graph(num_rows)
        if made.graph is None or made.logits is None:
            raise GraphReplayError(f"the graph of {num_rows} rows was never captured")
        try:
            made.graph.replay()
        except RuntimeError as error:
            raise GraphReplayError(
                f"the graph of {num_rows} rows failed: {_one_line(error)}"
            ) from error
        return made.logits

    def _graph(self, num_rows: int) -> _DecodeGraph:
        made = self._graphs.get(num_rows)
        if made is None:
            raise GraphReplayError(f"there is no graph of {num_rows} rows")
        return made

    def _release(self, num_rows: int) -> None:
        made = self._graphs.pop(num_rows)
        self._captured = tuple(sorted(self._graphs))
        made.logits = None
        if made.graph is not None:
            made.graph.release()

    def _padding(self, num_rows: int) -> GraphInputs:
        """Return the inputs of a graph: rows of padding, so that capturing writes no block."""
        with self._driver.computing():
            if self._memory is None or self._memory.num_rows < num_rows:
                self._memory = InputMemory(
                    self._driver, num_rows, self._table_width, has_states=self._model.has_states
                )
            return GraphInputs(self._memory, num_rows, self.longest)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
