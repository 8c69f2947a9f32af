"""Copies of whole blocks: copy-on-write within a pool, and swaps between a pool and staging memory.

    target[pairs[p, 1]] = source[pairs[p, 0]]      for all pairs at once, bit for bit

A block is `block_words` · 4 contiguous bytes, whatever its dtype (DESIGN: one block of the pool is
contiguous, all layers of it). `source` and `target` may be the same pool if no block is both read
and written; the pairs of one launch happen in no order. The grid is (pairs, pieces of a block); a
thread copies WORDS_A_THREAD words in vectors of 16 bytes, all reads before the writes, so that
several are in flight. A negative source is padding of a fixed-size list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from numba import cuda, int64, uint32

from kernels.cuda.instructions.vectors import load_vector, store_vector
from kernels.cuda.variant import Expectation, Pointer, Scalar, require_multiple

VECTORS = 4  # of a thread
WORDS_A_THREAD = 4 * VECTORS


@dataclass(frozen=True, slots=True)
class CopyBlocksVariant:
    """There is one: blocks are copied as words, and their size is an argument."""

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        return "copy_blocks"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        return ("uint32*", "uint32*", "int32*", "int64")

    @property
    def expectation(self) -> Expectation:
        """Four vectors and their addresses."""
        return Expectation(48, ("LDG.128", "STG.128"))

    def grid(self, num_pairs: int, block_words: int) -> tuple[int, int, int]:
        """Return the launch grid; `block_words` must be a multiple of four."""
        require_multiple("block_words", 4, block_words)
        return (num_pairs, -(-block_words // (WORDS_A_THREAD * self.threads)), 1)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        return make_copy_blocks(self)


def variants(*, every: bool) -> list[CopyBlocksVariant]:  # noqa: ARG001 - there are no more
    """Return the one variant there is."""
    return [CopyBlocksVariant()]


def make_copy_blocks(variant: CopyBlocksVariant) -> Callable[..., None]:
    """Return the kernel with its compile-time parameters bound."""
    threads = variant.threads

    def copy_blocks(target: Pointer, source: Pointer, pairs: Pointer, block_words: Scalar) -> None:
        """Copy a piece of the block of pair blockIdx.x.

        `target`, `source`: blocks of `block_words` words. `pairs`: [P, 2] of source and target
        block.
        """
        pair = int64(cuda.blockIdx.x) * 2
        source_block, target_block = int64(pairs[pair]), int64(pairs[pair + 1])
        if source_block >= 0:
            # Neighbouring threads copy neighbouring vectors.
            first = int64(cuda.blockIdx.y) * (threads * WORDS_A_THREAD) + cuda.threadIdx.x * 4
            words = cuda.local.array((VECTORS, 4), uint32)
            for i in range(VECTORS):
                word = first + i * (threads * 4)
                if word < block_words:
                    load_vector(words, i, source, source_block * block_words + word)
            for i in range(VECTORS):
                word = first + i * (threads * 4)
                if word < block_words:
                    store_vector(target, target_block * block_words + word, words, i)

    return copy_blocks
