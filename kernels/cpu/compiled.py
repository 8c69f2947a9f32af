"""How the kernels of this package are compiled: one decorator, one place for the flags."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numba

Function = TypeVar("Function", bound=Callable[..., object])

EXACT_ORDER = {"contract"}
"""Fused multiply-add allowed (fewer roundings); every sum runs in the order that is written."""

FREE_ORDER = {"contract", "reassoc"}
"""A sum may be split into vector lanes. Only for loops whose length the row alone decides."""


def compiled(signature: str, *, free_order: bool = False) -> Callable[[Function], Function]:
    """Compile a function for `signature` at once, or load it from the cache.

    An explicit signature leaves nothing to compile while a batch runs, and makes a call with
    another type or memory layout an error, not a second compilation. The GIL is released. Division
    follows IEEE 754 (`numpy`) since a check for zero in every iteration would prevent vector code.
    """
    decorate: Callable[[Function], Function] = numba.njit(
        signature,
        cache=True,
        nogil=True,
        error_model="numpy",
        fastmath=FREE_ORDER if free_order else EXACT_ORDER,
    )
    return decorate
