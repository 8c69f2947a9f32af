"""Arrays of one thread: as a kernel finds them, and every index that is none of theirs."""

from __future__ import annotations

import numpy as np
import pytest

from tests.simt import OutOfBounds, Unsupported
from tests.simt.local_arrays import LocalArray


def local(shape, dtype=np.float32) -> LocalArray:
    return LocalArray("local array of line 7", shape, np.dtype(dtype), lambda: "thread 3")


def test_what_was_written_is_read_and_has_the_type_of_the_array():
    array, line = local((2, 3)), local(4, np.uint32)
    array[1, np.int32(2)] = 0.1
    line[np.int64(3)] = np.int64(-1)

    assert array[1, 2] == np.float32(0.1)
    assert type(array[1, 2]) is np.float32
    assert line[3] == 2**32 - 1
    assert type(line[3]) is np.uint32


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_nothing_is_there_at_first(dtype):
    assert np.isnan([local(2, dtype)[1], local((2, 2), dtype)[1, 0]]).all()


def test_rows_are_read_and_written_from_their_beginning():
    array = local((2, 4), np.uint16)
    array.write_row(1, [1, 2, 3, 4])
    array.write_row(1, np.array([7, 8], np.uint32))

    read = array.read_row(1, 3)
    read[0] = 99
    assert read.dtype == np.uint16
    assert array.read_row(1, 4).tolist() == [7, 8, 3, 4]


@pytest.mark.parametrize("index", [-1, 4, np.int32(-1), np.int64(4), (0, 3), (2, 0), (-1, 0)])
def test_an_index_outside_is_out_of_bounds(index):
    array = local((2, 3) if isinstance(index, tuple) else 4)

    with pytest.raises(OutOfBounds, match=r"local array of line 7\[.* by thread 3"):
        array[index]
    with pytest.raises(OutOfBounds):
        array[index] = np.float32(0)


@pytest.mark.parametrize("index", [1.0, np.float32(1), (0, 1.0), (0, 0, 0), (0,)])
def test_an_index_of_another_form_is_refused(index):
    array = local((2, 3) if isinstance(index, tuple) else 4)

    with pytest.raises(Unsupported):
        array[index]
    with pytest.raises(Unsupported):
        array[index] = np.float32(0)


@pytest.mark.parametrize(("row", "length"), [(2, 1), (-1, 1), (0, 4)])
def test_a_row_that_is_not_there_is_out_of_bounds(row, length):
    array = local((2, 3))

    with pytest.raises(OutOfBounds):
        array.read_row(row, length)
    with pytest.raises(OutOfBounds):
        array.write_row(row, np.zeros(length, np.float32))
