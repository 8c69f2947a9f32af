"""The states of the CPU engine: what layers with a state of fixed size hold of each sequence."""

from __future__ import annotations

from typing import Final

from compute_plane.memory.huge_pages import UInt8Array, huge_page_array
from compute_plane.memory.sizing import Memory
from compute_plane.memory.state_sizing import StateRoom, size_states
from compute_plane.model.spec import ModelSpec

FLOAT_BYTES: Final = 4
PURPOSE: Final = "the states of sequences"


class StatePool:
    """States of sequences, each one run of memory: a layer's part behind the other's.

    `data`: uint8 [num_states, state_bytes]. The memory is reserved at once but comes from the
    operating system zeroed and lazily: a state never written costs nothing. Only the executor's
    thread may write. `layer_bytes`: of a layer's part of a state.
    """

    def __init__(self, num_states: int, num_layers: int, layer_bytes: int) -> None:
        self.layer_bytes = layer_bytes
        memory = huge_page_array(num_states * num_layers * layer_bytes, purpose=PURPOSE)
        self.data: UInt8Array = memory.reshape(num_states, num_layers * layer_bytes)

    @property
    def num_states(self) -> int:
        """How many there are."""
        return len(self.data)

    @property
    def state_bytes(self) -> int:
        """Bytes of a state, and from one to the next."""
        return int(self.data.shape[1])

    @property
    def num_bytes(self) -> int:
        """Bytes reserved for all."""
        return int(self.data.nbytes)

    def layer_address(self, layer: int) -> int:
        """Return the address of a layer's part of state 0; `layer`: among those with states."""
        return int(self.data.ctypes.data) + layer * self.layer_bytes

    def copy(self, source: int, destination: int) -> None:
        """Make state `destination` what state `source` is, all layers."""
        self.data[destination] = self.data[source]


def room_for_states(
    spec: ModelSpec, max_slots: int, memory: Memory | None, first_layer: int = 0
) -> StateRoom | None:
    """Return the room for states of a model's layers from one on; None: they have none.

    Raises ConfigError as `size_states` does. `memory` None: unknown.
    """
    num_layers = len(spec.layers_with_state(first_layer))
    if spec.recurrence is None or not num_layers:
        return None
    layer_bytes = FLOAT_BYTES * spec.recurrence.state_floats
    return size_states(num_layers * layer_bytes, max_slots, memory)


def make_states(spec: ModelSpec, num_states: int, first_layer: int = 0) -> StatePool | None:
    """Return states for a model's layers from one on, maybe of no bytes; None: a model has none."""
    num_layers = len(spec.layers_with_state(first_layer))
    if spec.recurrence is None:
        return None
    return StatePool(num_states, num_layers, FLOAT_BYTES * spec.recurrence.state_floats)
