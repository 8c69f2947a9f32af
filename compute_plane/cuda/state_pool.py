"""The states on the device: what layers without keys and values hold of each sequence.

One array of float32 [N, floats]: in a state the parts of its layers follow each other, as
`kernels.cuda.recurrent_states` draws them. A row goes on from its state; one at position 0 begins
with an empty one, whatever lies there. Copies of a step are made one after the other, before any
row runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.cuda.recurrent_states import ROW_NUMBERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compute_plane.cuda.drivers import Driver
    from compute_plane.executor.interface import ExecutionBatch, StateCopy
    from compute_plane.model.spec import ModelSpec

Array = npt.NDArray[Any]

FLOAT_BYTES: Final = 4


class StatePool:
    """The states of one device. `device`: float32 [N, floats], empty states at first."""

    def __init__(self, spec: ModelSpec, driver: Driver, num_states: int) -> None:
        self._driver = driver
        self._state_bytes = state_bytes(spec)
        with driver.computing():
            self.device: Tensor = torch.zeros(
                (num_states, state_floats(spec)), dtype=torch.float32, device=driver.device
            )

    @property
    def num_states(self) -> int:
        """How many there are."""
        return len(self.device)

    @property
    def num_bytes(self) -> int:
        """Bytes of all."""
        return int(self.device.nbytes)

    def run(self, copies: Sequence[StateCopy]) -> None:
        """Queue the copies of a step."""
        device, size = self.device, self._state_bytes
        for source, destination in copies:
            if source != destination:
                self._driver.copy_part(device, size * destination, device, size * source, size)


def state_floats(spec: ModelSpec) -> int:
    """Return the elements of a state; 0: the model has none."""
    if spec.recurrence is None:
        return 0
    return len(spec.layers_with_state()) * spec.recurrence.state_floats


def state_bytes(spec: ModelSpec) -> int:
    """Return the bytes of a state; 0: the model has none."""
    return FLOAT_BYTES * state_floats(spec)


def fill_rows(
    rows: Array, firsts: Array, query_lens: Array | int, states: Array, positions: Array
) -> None:
    """Fill in the rows of `StateRows`, int32 [R, 4].

    [R] each: `firsts`, a row's first token; `positions`, where in its sequence that is.
    `query_lens`: tokens of each row, or of all.
    """
    rows[:, 0] = firsts
    rows[:, 1] = query_lens
    rows[:, 2] = states
    rows[:, 3] = positions == 0


def empty_rows(num_rows: int) -> Array:
    """Return rows without tokens."""
    return np.zeros((num_rows, ROW_NUMBERS), dtype=np.int32)


class OwnStates:
    """Whether every row of decode steps has a state of its own, of `num_states`.

    It says no more: what is wrong is said by the ordinary way's checks (`token_layout`). What
    nobody can write is looked at once a run.
    """

    def __init__(self, num_states: int) -> None:
        self._num_states = num_states
        self._sound: Array | None = None

    def has(self, batch: ExecutionBatch) -> bool:
        """Whether that is so, and copies are between states that there are."""
        if not self._num_states:
            return True
        states, num_rows = batch.states, len(batch.query_lens)
        if batch.state_copies and not self._are_states(np.array(batch.state_copies)):
            return False
        if states is self._sound and len(states) == num_rows:
            return True
        if not (
            states.shape == (num_rows,)
            and self._are_states(states)
            and len(set(states.tolist())) == num_rows
        ):
            return False
        self._sound = None if states.flags.writeable else states
        return True

    def _are_states(self, numbers: Array) -> bool:
        return bool(numbers.min() >= 0 and numbers.max() < self._num_states)
