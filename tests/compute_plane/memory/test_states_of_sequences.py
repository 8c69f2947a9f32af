"""How many states there is room for, and how one is copied."""

from __future__ import annotations

import numpy as np
import pytest

from compute_plane.memory.state_pool import StatePool
from compute_plane.memory.state_sizing import MOST_KEPT, StateRoom, size_states
from planes.errors import ConfigError

MIB = 1 << 20


def test_states_take_a_quarter_of_what_is_free_and_most_of_them_are_slots() -> None:
    assert size_states(MIB, 1024, 400 * MIB) == StateRoom(75, 100)
    assert size_states(MIB, 1024, 4 * MIB) == StateRoom(1, 1)


def test_there_are_no_more_states_than_slots_and_as_many_that_are_kept() -> None:
    assert size_states(MIB, 8, 1 << 40) == StateRoom(8, 16)
    assert size_states(MIB, 1024, 1 << 40) == StateRoom(1024, 1024 + MOST_KEPT)
    assert size_states(MIB, 8, None) == StateRoom(8, 16)
    assert size_states(MIB, 8, 48 * MIB) == StateRoom(8, 12)  # slots before states that are kept


def test_a_model_whose_states_do_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a state of 48 MiB.* one part in 4 .*free .100 MiB"):
        size_states(48 * MIB, 8, 100 * MIB)


def test_a_state_is_copied_with_all_its_layers_and_nothing_else_is() -> None:
    pool = StatePool(3, 2, 64)
    pool.data[:] = np.arange(3)[:, None]
    pool.copy(2, 0)
    assert (pool.data == np.array([2, 1, 2])[:, None]).all()
    assert pool.layer_address(1) - pool.layer_address(0) == 64
    assert (pool.state_bytes, pool.num_states, pool.num_bytes) == (128, 3, 384)
