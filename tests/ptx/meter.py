"""What a launch did: how often each instruction ran, and how well its accesses are laid out.

All counts are of warps. A *sector* is 32 bytes of global memory at a multiple of 32: what a warp's
access touches of them is what travels; the least possible is what its different bytes fill. A
*wavefront* is one pass over the 32 banks of shared memory, each four bytes wide: a warp's access
takes as many as its most wanted bank has different words to give; eight bytes a lane go in two
halves of the warp, sixteen in four quarters, rows of tiles eight at a time. The least possible is
one for each part of the warp that takes part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

SECTOR, BANKS, WORD = 32, 32, 4
_NOWHERE = np.int64(-1)


@dataclass(slots=True)
class Traffic:
    """Of one instruction: accesses by warps, bytes asked for, units moved, units at least needed.

    Units are sectors or wavefronts.
    """

    warps: int = 0
    num_bytes: int = 0
    units: int = 0
    least: int = 0


class Meter:
    """Counts of a launch, by the index of the instruction in the program."""

    def __init__(self) -> None:
        self.executed: dict[int, int] = defaultdict(int)
        self.traffic: dict[int, Traffic] = defaultdict(Traffic)

    def note_executed(self, indices: Iterable[int], warps: int) -> None:
        """Count instructions as executed by so many warps."""
        for index in indices:
            self.executed[index] += warps

    def note_global(self, index: int, lanes: Array, address: Array, size: int) -> None:
        """Count an access to global memory: one address a lane, lanes numbered over all warps."""
        warps = _by_warp(lanes, address)
        sectors = _distinct(warps // SECTOR, warps == _NOWHERE)
        needed = -(-_distinct(warps, warps == _NOWHERE) * size // SECTOR)
        self._add(index, len(warps), len(address) * size, sectors.sum(), needed.sum())

    def note_shared(self, index: int, lanes: Array, address: Array, size: int) -> None:
        """Count an access to shared memory."""
        warps = _by_warp(lanes, address)
        words = max(size // WORD, 1)
        parts = warps.reshape(-1, 32 // words)
        parts = parts[(parts != _NOWHERE).any(axis=1)]
        first = np.where(parts == _NOWHERE, _NOWHERE, parts // WORD)
        all_words = np.where(
            first[:, :, None] == _NOWHERE, _NOWHERE, first[:, :, None] + np.arange(words)
        ).reshape(len(parts), -1)
        wavefronts = _most_of_a_bank(all_words)
        self._add(index, len(warps), len(address) * size, wavefronts.sum(), len(parts))

    def _add(self, index: int, warps: int, num_bytes: int, units: Any, least: Any) -> None:
        traffic = self.traffic[index]
        traffic.warps += warps
        traffic.num_bytes += num_bytes
        traffic.units += int(units)
        traffic.least += int(least)


def _by_warp(lanes: Array, address: Array) -> Array:
    """Return addresses [warps, 32]; _NOWHERE where a lane takes no part."""
    warp = lanes // 32
    names, row = np.unique(warp, return_inverse=True)
    table = np.full((len(names), 32), _NOWHERE)
    table[row, lanes % 32] = address
    return table


def _distinct(values: Array, is_absent: Array) -> Array:
    """Return how many different values each row has."""
    ordered = np.sort(np.where(is_absent, _NOWHERE, values), axis=1)
    steps = (ordered[:, 1:] != ordered[:, :-1]).sum(axis=1) + 1
    count: Array = steps - (ordered[:, 0] == _NOWHERE)
    return count


def _most_of_a_bank(words: Array) -> Array:
    """Return for each row how many different words its most wanted bank holds."""
    ordered = np.sort(words, axis=1)
    is_new = np.ones(ordered.shape, np.bool_)
    is_new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    is_new &= ordered != _NOWHERE
    counts = np.zeros((len(words), BANKS), np.int64)
    row, column = np.nonzero(is_new)
    np.add.at(counts, (row, ordered[row, column] % BANKS), 1)
    most: Array = counts.max(axis=1)
    return most
