"""A counter-based random generator: Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers").

The number depends on key and counter only: no state, no order, no neighbours.
"""

from __future__ import annotations

from typing import Final

MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)
ROUNDS: Final = 10
WORD_MASK: Final = 0xFFFFFFFF

Words4 = tuple[int, int, int, int]


def philox_4x32(counter: Words4, key: tuple[int, int]) -> Words4:
    """Return the four 32-bit words that `counter` gives under `key`."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product0, product1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & WORD_MASK,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & WORD_MASK,
        )
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD_MASK, (k1 + KEY_STEPS[1]) & WORD_MASK
    return c0, c1, c2, c3


def uniform(seed: int, sample_index: int, position: int) -> float:
    """Return the number in [0, 1) that belongs to a sample of a request at a position.

    Key: the low and the high word of `seed` (0 to 2^64 − 1). Counter: the low and the high word of
    `position`, `sample_index`, 0. The first two words of the result give 53 bits.
    """
    counter = (position & WORD_MASK, position >> 32, sample_index & WORD_MASK, 0)
    high, low, _, _ = philox_4x32(counter, (seed & WORD_MASK, seed >> 32))
    return ((high >> 5) * 2.0**26 + (low >> 6)) / 2.0**53
