"""Which decode steps are measured, and the ways in which an executor computes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal
from unittest.mock import patch

from bench.gpu import step_answers
from compute_plane.cuda import dense_kernels, launchers
from compute_plane.cuda.dense_kernels import MOST_ROWS
from kernels.cuda import fetched_weights

GRAPH_BATCHES: Final = (1, 2, 4, 8)
"""Rows for which graphs are compared with launching every kernel."""
BLOCK_SIZE: Final = 16


@dataclass(frozen=True, slots=True)
class Workload:
    """Decode steps: of each number of rows so many in a row, `repeats` times.

    `context`: tokens of every row in the first step; it grows by one a step. `warm_up`: steps
    before the clock starts. `eager_batches`: which of them are also taken without graphs;
    `profiled_batches`: of which it is noted where the time of a step with graphs goes.
    `has_extra`: there is time for ways that are extra.
    """

    batches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    context: int = 1024
    steps: int = 64
    warm_up: int = 8
    repeats: int = 5
    eager_batches: Sequence[int] = GRAPH_BATCHES
    profiled_batches: Sequence[int] = (1, 32)
    has_extra: bool = False

    @property
    def blocks_of_row(self) -> int:
        """Blocks of the longest row there is."""
        return -(-max(self.context + self.steps, step_answers.num_tokens()) // BLOCK_SIZE)

    @property
    def num_blocks(self) -> int:
        """Blocks of all rows of the largest step."""
        return max(self.batches) * self.blocks_of_row


@dataclass(frozen=True, slots=True)
class Way:
    """How steps are computed. `key`: of its times in the report.

    `sizes`: of steps, "few" rows, as many as our products take, "many" or "all". `begin_early`:
    kernels whose names begin so are launched early, but for those that `waits` names.
    `fetched_bytes`: of the weights of each of the library's products, ahead of it. `is_extra`: only
    where a workload has time for it.
    """

    name: str
    key: str
    uses_graphs: bool = True
    uses_own_products: bool = True
    sizes: Literal["few", "many", "all"] = "all"
    begin_early: tuple[str, ...] = launchers.BEGINS_EARLY
    waits: tuple[str, ...] = launchers.WAITS
    fetched_bytes: int = fetched_weights.FETCHED_BYTES
    is_extra: bool = False

    def batches_of(self, work: Workload) -> list[int]:
        """Return the sizes of steps that are taken this way."""
        if self.is_extra and not work.has_extra:
            return []
        if not self.uses_graphs:
            return [n for n in work.batches if n in work.eager_batches]
        return [
            n
            for n in work.batches
            if self.sizes == "all" or (n <= MOST_ROWS) == (self.sizes == "few")
        ]

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Have executors that are built meanwhile, and their steps, go this way."""
        most_rows = MOST_ROWS if self.uses_own_products else 0
        with (
            patch.object(dense_kernels, "MOST_ROWS", most_rows),
            patch.object(launchers, "BEGINS_EARLY", self.begin_early),
            patch.object(launchers, "WAITS", self.waits),
            patch.object(fetched_weights, "FETCHED_BYTES", self.fetched_bytes),
        ):
            yield


OWN: Final = Way("with graphs", "graphs")
LATE: Final = Way("whose launches wait for the one ahead to end", "late", begin_early=())
LIBRARY: Final = Way("with the library's products", "library", uses_own_products=False, sizes="few")
EAGER: Final = Way("without graphs", "eager", uses_graphs=False)
# Those too that wait because an H200 lost by them (`launchers.WAITS`).
EARLY: Final = Way("whose launches all begin early", "early", sizes="few", waits=(), is_extra=True)
UNFETCHED: Final = Way(
    "with nothing fetched ahead of the library's products", "unfetched", sizes="many",
    fetched_bytes=0,
)  # fmt: skip
MORE_FETCHED: Final = Way(
    "with twice as much fetched ahead of them", "more_fetched", sizes="many",
    fetched_bytes=2 * fetched_weights.FETCHED_BYTES, is_extra=True,
)  # fmt: skip
WAYS: Final = (OWN, EAGER, LATE, LIBRARY, EARLY, UNFETCHED, MORE_FETCHED)
