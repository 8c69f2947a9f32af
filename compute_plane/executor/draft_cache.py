"""What a draft model has computed of which blocks, told by the tokens themselves.

A draft model has a KV pool of its own, whose blocks have the numbers of the engine's. Nobody tells
it what happens to those: they are given to other sequences, copied, swapped, filled in steps in
which it has no part. So each block remembers what was computed into it: the tokens, and a hash of
all tokens before them. Of a sequence that is valid which its blocks remember from the front on, and
the rest is computed when drafts are wanted. A hash of other tokens that is the same by chance costs
drafts that are wrong, and nothing else.

Array letters: N tokens, B blocks, P tokens of a block.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from compute_plane.executor.interface import Int32Array

_SEED: Final = 20260

UInt64Array = npt.NDArray[np.uint64]


class DraftCache:
    """The tokens whose keys and values are in the blocks of a draft model's pool.

    `longest`: most tokens of a sequence.
    """

    def __init__(self, num_blocks: int, block_size: int, longest: int) -> None:
        self._block_size = block_size
        self._tokens = np.zeros((num_blocks, block_size), dtype=np.int32)
        self._num_filled = np.zeros(num_blocks, dtype=np.int64)
        self._hash_before = np.zeros(num_blocks, dtype=np.uint64)
        generator = np.random.default_rng(_SEED)
        # By position: the hash of N tokens is the sum of each one's product, modulo 2^64.
        self._factors: UInt64Array = generator.integers(
            0, 1 << 64, size=longest, dtype=np.uint64, endpoint=False
        )

    def num_computed(self, tokens: Int32Array, table: Int32Array) -> int:
        """Return how many of `tokens` [N], the first ones, are in the blocks of `table` [B]."""
        size = self._block_size
        num_whole = min(tokens.size // size, table.size)
        before = self._hashes_before(tokens)
        blocks = table[:num_whole]
        is_valid = (
            (self._hash_before[blocks] == before[:num_whole])
            & (self._num_filled[blocks] == size)
            & (self._tokens[blocks] == tokens[: num_whole * size].reshape(-1, size)).all(axis=1)
        )
        num_valid = num_whole if is_valid.all() else int(is_valid.argmin())
        if num_valid == table.size:
            return num_valid * size
        block = table[num_valid]
        if self._hash_before[block] != before[num_valid]:
            return num_valid * size
        there = self._tokens[block, : self._num_filled[block]]
        rest = tokens[num_valid * size :][: there.size]
        is_same = there[: rest.size] == rest
        return num_valid * size + (rest.size if is_same.all() else int(is_same.argmin()))

    def note(self, tokens: Int32Array, table: Int32Array, first: int) -> None:
        """Remember that `tokens` [N] from `first` on were computed, those before being valid."""
        size = self._block_size
        for place in range(first // size, -(-tokens.size // size)):
            block, begin = table[place], place * size
            inside = tokens[begin : begin + size]
            self._tokens[block, : inside.size] = inside
            self._num_filled[block] = inside.size
            if begin == 0:
                self._hash_before[block] = 0
            elif begin >= first:  # else it has the hash, as what is before `first` is valid
                terms = self._terms(tokens[begin - size : begin], begin - size)
                # Arrays wrap around in silence, scalars warn.
                before = self._hash_before[table[place - 1 : place]]
                self._hash_before[block] = (before + terms.sum(keepdims=True))[0]

    def _hashes_before(self, tokens: Int32Array) -> UInt64Array:
        """Return the hash of all tokens before each block, [N // P + 1]."""
        sums = np.zeros(tokens.size + 1, dtype=np.uint64)
        np.cumsum(self._terms(tokens, 0), out=sums[1:])
        hashes: UInt64Array = sums[:: self._block_size]
        return hashes

    def _terms(self, tokens: Int32Array, first: int) -> UInt64Array:
        """Return what tokens from position `first` on add to a hash."""
        # No token is 0 times its factor: texts of zeros have hashes, too.
        values = tokens.astype(np.uint64) + np.uint64(1)
        terms: UInt64Array = values * self._factors[first : first + tokens.size]
        return terms
