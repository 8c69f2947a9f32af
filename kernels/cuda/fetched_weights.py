"""Beginnings of weights that the next launch multiplies with, fetched while this one runs.

A library's product begins with an empty pipeline: its launch, and the way of its first reads, leave
the memory idle for some microseconds, and so does the short kernel of few rows ahead of it. That
kernel has blocks of threads beside those of its rows, which ask for what the product's blocks read
first to be brought into the second cache. Each of them has a panel of outputs and walks along its
inputs, so that is the beginning of every row of the matrix, or of every part of a row where the
inputs are split (`kernels.cuda.rms_norm.PARTS`):

    W [N, K], 2 parts    row 0      │▓▓▓░░░░░░░░░│▓▓▓░░░░░░░░░│      ▓ a chunk: what is fetched
                         row 1      │▓▓▓░░░░░░░░░│▓▓▓░░░░░░░░░│
                         …           chunk_pitch →

    grid                 rows of the short kernel, its pieces │ blocks that fetch
                         blockIdx.y   0 … pieces - 1          │ pieces …

Nothing is computed with it, and what was asked for is not waited for; that all of it is asked for
is, as for any block of a launch. Weights are written by no kernel, so nothing has to have ended
before they are (`instructions.early_launch`). Devices before capability 9.0 have no such
instruction. It is carried out for one lane of a warp after the other, so the chunks of neighbouring
blocks lie side by side, and not those of neighbouring lanes: all blocks have equally many.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from numba import cuda, int64, uint32

from kernels.cuda.instructions.early_launch import fetch_ahead
from kernels.cuda.variant import Pointer, Scalar

LINE_BYTES: Final = 128
"""What the second cache holds together."""
UNIT_BYTES: Final = 16
FETCHED_BYTES: Final = 8 << 20
"""Of a matrix: what an H200 reads in 2 µs, a sixth of its second cache."""
FETCHING_BLOCKS: Final = 128
"""About one a multiprocessor: 28 672 chunks are 224 for each."""
BLOCK_CHUNKS: Final = 32
"""Fewer are no work for a block."""

ARGUMENTS: Final = ("int64", "int64", "int64")
"""Types of the parameters that say what is fetched, behind the pointer to the weights."""


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """What is fetched of a matrix: `num_bytes` at the beginning of each of `num_chunks` chunks.

    `chunk_pitch`: from one to the next, in elements.
    """

    num_chunks: int
    chunk_pitch: int
    num_bytes: int

    @property
    def arguments(self) -> tuple[int, int, int]:
        """The kernel's, behind the pointer to the weights."""
        return self.num_chunks, self.chunk_pitch, self.num_bytes

    def num_columns(self, num_rows: int) -> int:
        """Return how many blocks the grid has for that beside each of its rows."""
        blocks = min(FETCHING_BLOCKS, -(-self.num_chunks // BLOCK_CHUNKS))
        return -(-blocks // max(num_rows, 1))


NOTHING: Final = FetchPlan(0, 0, 0)


def plan_fetch(num_chunks: int, chunk_length: int, element_bytes: int) -> FetchPlan:
    """Return what is fetched of chunks that lie one behind the other, a matrix's rows or parts.

    As many bytes of each as some lines have, `FETCHED_BYTES` of all or less: of the first ones
    where a line of each is more. Nothing of chunks that begin where no fetch does.
    """
    chunk_bytes = chunk_length * element_bytes
    if chunk_bytes % UNIT_BYTES or not num_chunks or not FETCHED_BYTES:
        return NOTHING
    lines = FETCHED_BYTES // num_chunks // LINE_BYTES
    num_bytes = min(max(lines, 1) * LINE_BYTES, chunk_bytes)
    return FetchPlan(min(num_chunks, FETCHED_BYTES // num_bytes), chunk_length, num_bytes)


@cuda.jit(device=True, inline="always")
def fetch_chunks(
    weights: Pointer,
    num_chunks: Scalar,
    chunk_pitch: Scalar,
    chunk_bytes: Scalar,
    block: Scalar,
    num_blocks: Scalar,
) -> None:
    """Fetch what this thread's share is of `weights`, for one of some blocks that share them."""
    chunk = int64(cuda.threadIdx.x) * num_blocks + block
    while chunk < num_chunks:
        fetch_ahead(weights, chunk * chunk_pitch, uint32(chunk_bytes))
        chunk += int64(num_blocks) * cuda.blockDim.x
