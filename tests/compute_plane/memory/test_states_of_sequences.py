"""How many states there is room for, and how one is copied."""

from __future__ import annotations

import numpy as np
import pytest

from compute_plane.memory.sizing import Memory
from compute_plane.memory.state_pool import StatePool
from compute_plane.memory.state_sizing import MOST_KEPT, StateRoom, size_states
from planes.errors import ConfigError

MIB = 1 << 20


def test_states_take_an_eighth_of_all_memory_and_most_of_them_are_slots() -> None:
    assert size_states(MIB, 1024, Memory(800 * MIB, 200 * MIB)) == StateRoom(75, 100)
    assert size_states(MIB, 1024, Memory(8 * MIB, 2 * MIB)) == StateRoom(1, 1)


def test_what_else_is_free_does_not_matter_while_there_is_enough() -> None:
    """So a plane that is started again has as many, and its control plane goes on."""
    rooms = {size_states(MIB, 1024, Memory(800 * MIB, free * MIB)) for free in (200, 500, 800)}
    assert rooms == {StateRoom(75, 100)}
    rooms = {size_states(MIB, 1024, Memory(800 * MIB, free * MIB)) for free in (80, 81, 82, 83)}
    assert rooms == {StateRoom(30, 40)}


def test_there_are_no_more_states_than_slots_and_as_many_that_are_kept() -> None:
    huge = Memory(1 << 40, 1 << 40)
    assert size_states(MIB, 8, huge) == StateRoom(8, 16)
    assert size_states(MIB, 1024, huge) == StateRoom(1024, 1024 + MOST_KEPT)
    assert size_states(MIB, 8, None) == StateRoom(8, 16)
    # Slots come before states that are kept.
    assert size_states(MIB, 8, Memory(96 * MIB, 96 * MIB)) == StateRoom(8, 12)


def test_a_model_whose_states_do_not_fit_is_refused() -> None:
    words = r"a state of 48 MiB; .* are 25 MiB, .* all memory \(200 MiB\) .* free \(160 MiB\)"
    with pytest.raises(ConfigError, match=words):
        size_states(48 * MIB, 8, Memory(200 * MIB, 160 * MIB))


def test_a_state_is_copied_with_all_its_layers_and_nothing_else_is() -> None:
    pool = StatePool(3, 2, 64)
    pool.data[:] = np.arange(3)[:, None]
    pool.copy(2, 0)
    assert (pool.data == np.array([2, 1, 2])[:, None]).all()
    assert pool.layer_address(1) - pool.layer_address(0) == 64
    assert (pool.state_bytes, pool.num_states, pool.num_bytes) == (128, 3, 384)
