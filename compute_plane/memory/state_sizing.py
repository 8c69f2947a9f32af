"""How many states of sequences there is room for, and how many of them are slots'.

States take at most a quarter of the memory that is free once the weights are there. Of four, three
are slots' (as many as the plane may have), the others are kept to be found again (ADR 0040).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from compute_plane.memory.sizing import MIB
from planes.errors import ConfigError

SHARE: Final = 4
"""One part of so many of the free memory."""
MOST_KEPT: Final = 256
"""States beside the slots', at most: the beginnings of so many texts."""


@dataclass(frozen=True, slots=True)
class StateRoom:
    """`num_slots` sequences, each with a state; `num_states`: these and those that are kept."""

    num_slots: int
    num_states: int


def size_states(state_bytes: int, max_slots: int, free_bytes: int | None) -> StateRoom:
    """Return how many states of so many bytes there is room for.

    `free_bytes` None: unknown, and as many as may be. Raises ConfigError, naming `model`, where
    not even one fits.
    """
    most = max_slots + min(max_slots, MOST_KEPT)
    if free_bytes is None:
        return StateRoom(max_slots, most)
    fits = min(free_bytes // SHARE // state_bytes, most)
    if not fits:
        raise ConfigError(
            f"model: a sequence of it has a state of {state_bytes // MIB} MiB, which takes at most "
            f"one part in {SHARE} of the memory that is free ({free_bytes // MIB} MiB)",
            field="model",
        )
    return StateRoom(min(max_slots, max(-(-fits * 3 // 4), fits - MOST_KEPT)), fits)
