from __future__ import annotations

import pytest

from kernels.cpu.operation import inlined


def make(closed_over: object):
    @inlined()
    def function() -> int:
        return closed_over  # type: ignore[return-value]

    return function


def name_of(closed_over: object) -> str:
    return make(closed_over).py_func.__qualname__


def test_functions_of_one_factory_have_names_of_their_own_that_every_process_gives_them() -> None:
    """Machine code of different processes is linked by name when it comes from the cache."""
    assert name_of(1) == name_of(1)
    assert len({name_of(value) for value in (1, 2, True, "1", make(1), make(2))}) == 6


def test_what_has_no_lasting_name_cannot_be_closed_over() -> None:
    with pytest.raises(TypeError, match="cannot hold a list"):
        make([1])
