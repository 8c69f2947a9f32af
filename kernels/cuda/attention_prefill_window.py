"""Which keys of a tile prefill attention reads and sees, with a window and without.

    keys        │    t    │  t + 1  │  t + 2  │  t + 3  │           W = 6, tiles of 4 keys
    token 9         ▪▪▪▪▪▪                                        the first of a tile of tokens
    token 12           ▪▪▪▪▪▪                                     its last
    read            ▪▪▪▪▪▪▪▪▪                                     zeros stand for what is not

The loop begins with the tile of keys in which the window of the first token does: tiles are counted
from the row's first token, so a token meets its keys in the same groups in any company. A tile that
is masked for a token altogether adds exact zeros to its sums, if its peak is a number: with a
window a token may have to pass such tiles before the first of its own, so its peak begins at
`NO_PEAK`, not at -∞.

Without a window nothing is asked but what ends a row, and the kernels are what they would be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from numba import cuda, float32, int32

from kernels.cuda.attention_chunks import NO_PEAK
from kernels.cuda.variant import DeviceFunction, Scalar

MINUS_INFINITY = float32(-math.inf)


@dataclass(frozen=True, slots=True)
class PrefillWindow:
    """What is asked of keys; `no_peak`: the peak of a token that has seen none.

    Device functions; positions and keys are counted in the row, and `window` is the kernel's:

        first_seen(context, first_token, window)     the first key that a tile of tokens sees
        is_read(key, first_seen)                     whether a key is copied, if the row has it
        sees(first_key, first_position, visible_keys, window)
                                                     whether a warp sees any of the keys of a tile
        is_cut(first_key, first_position, visible_keys, window)
                                                     whether some token of the warp does not see all
        is_hidden(key, position, window)             whether a token does not see a key; both may be
                                                     counted from anywhere
    """

    no_peak: Any
    first_seen: DeviceFunction
    is_read: DeviceFunction
    sees: DeviceFunction
    is_cut: DeviceFunction
    is_hidden: DeviceFunction


def make_prefill_window(keys: int, *, has_window: bool) -> PrefillWindow:
    """Return the functions for tiles of so many keys."""

    @cuda.jit(device=True, inline="always")
    def first_seen(context: Scalar, first_token: Scalar, window: Scalar) -> Scalar:
        return int32(max(context + first_token + 1 - window, 0)) if has_window else int32(0)

    @cuda.jit(device=True, inline="always")
    def is_read(key: Scalar, first: Scalar) -> Scalar:
        return key >= first if has_window else True

    @cuda.jit(device=True, inline="always")
    def sees(
        first_key: Scalar, first_position: Scalar, visible_keys: Scalar, window: Scalar
    ) -> Scalar:
        if has_window:
            is_first_seen_before_end = first_key + keys > int32(first_position - window) + 1
            return first_key < visible_keys and is_first_seen_before_end
        return first_key < visible_keys

    @cuda.jit(device=True, inline="always")
    def is_cut(
        first_key: Scalar, first_position: Scalar, visible_keys: Scalar, window: Scalar
    ) -> Scalar:
        is_at_end = int32(first_key + keys - 1) > first_position
        return is_at_end or first_key < int32(visible_keys - window) if has_window else is_at_end

    @cuda.jit(device=True, inline="always")
    def is_hidden(key: Scalar, position: Scalar, window: Scalar) -> Scalar:
        is_behind = key > position
        return is_behind or key <= int32(position - window) if has_window else is_behind

    return PrefillWindow(
        NO_PEAK if has_window else MINUS_INFINITY, first_seen, is_read, sees, is_cut, is_hidden
    )
