"""How many states of sequences there is room for, and how many of them are slots'.

States take an eighth of all memory, and half of what is free once the weights are there if that is
less: the memory there is stays what it is, so a plane that is started again finds room for as many,
and its control plane goes on. Of four states three are slots' (as many as the plane may have), the
others are kept to be found again (ADR 0040).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from compute_plane.memory.sizing import MIB, Memory
from planes.errors import ConfigError

SHARE_OF_ALL: Final = 8
SHARE_OF_FREE: Final = 2
"""One part in so many of all memory, and of what is free."""
FREE_BITS: Final = 4
"""Leading bits of a number that what is free decides: a little more or less changes it rarely."""
MOST_KEPT: Final = 256
"""States beside the slots', at most: the beginnings of so many texts."""


@dataclass(frozen=True, slots=True)
class StateRoom:
    """`num_slots` sequences, each with a state; `num_states`: these and those that are kept."""

    num_slots: int
    num_states: int


def smaller(one: StateRoom | None, other: StateRoom | None) -> StateRoom | None:
    """Return the room of two where there are fewer states; None stands for room without end."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other, key=lambda room: room.num_states)


def size_states(
    state_bytes: int, max_slots: int, memory: Memory | None, *, is_limited: bool = False
) -> StateRoom:
    """Return how many states of so many bytes there is room for.

    `memory` None: unknown, and as many as may be. `is_limited`: it is what `gpu_memory_limit` says.
    Raises ConfigError, naming that or `model`, where not even one fits.
    """
    most = max_slots + min(max_slots, MOST_KEPT)
    if memory is None:
        return StateRoom(max_slots, most)
    room = min(memory.total_bytes // SHARE_OF_ALL, memory.free_bytes // SHARE_OF_FREE)
    fits = room // state_bytes
    if room < memory.total_bytes // SHARE_OF_ALL:
        fits -= fits % (1 << max(0, fits.bit_length() - FREE_BITS))
    fits = min(fits, most)
    if not fits and is_limited:
        raise ConfigError(
            f"gpu_memory_limit: a sequence of the model has a state of {state_bytes / MIB:.3g} "
            f"MiB, and states take one part in {SHARE_OF_ALL} of the limit and one in "
            f"{SHARE_OF_FREE} of what is free of it: at least "
            f"{-(-state_bytes * SHARE_OF_ALL // MIB)} MiB are needed for one, got "
            f"{memory.total_bytes / MIB:.3g} MiB, of which {memory.free_bytes / MIB:.3g} are free",
            field="gpu_memory_limit",
        )
    if not fits:
        raise ConfigError(
            f"model: a sequence of it has a state of {state_bytes // MIB} MiB; for states there "
            f"are {room // MIB} MiB, one part in {SHARE_OF_ALL} of all memory "
            f"({memory.total_bytes // MIB} MiB) and one in {SHARE_OF_FREE} of what is free "
            f"({memory.free_bytes // MIB} MiB) at most",
            field="model",
        )
    return StateRoom(min(max_slots, max(-(-fits * 3 // 4), fits - MOST_KEPT)), fits)
