"""The simulator itself: it computes what a GPU would, and notices what a GPU would not."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda, float32

from kernels.cuda.instructions.early_launch import (
    fetch_ahead,
    let_next_begin,
    wait_for_previous,
)
from tests.simt import (
    Deadlock,
    Divergence,
    Misaligned,
    OutOfBounds,
    Race,
    TooEarly,
    Unsupported,
    launch,
)
from tests.simt.memory import Spread

FULL_WARP = 0xFFFFFFFF
ONE_BLOCK = (1, 1, 1)


def zeros(size: int) -> np.ndarray:
    return np.zeros(size, np.float32)


def reverse_within_block(out, source):
    tile = cuda.shared.array(64, float32)
    thread = cuda.threadIdx.x
    first = cuda.blockIdx.x * cuda.blockDim.x
    tile[thread] = source[first + thread]
    cuda.syncthreads()
    out[first + thread] = tile[63 - thread]


def test_threads_exchange_values_through_shared_memory():
    source = np.arange(128, dtype=np.float32)
    out = zeros(128)

    launch(reverse_within_block, (2, 1, 1), 64, (out, source))

    np.testing.assert_array_equal(out, source.reshape(2, 64)[:, ::-1].ravel())


def sum_of_warp(out, source):
    x = source[cuda.threadIdx.x]
    for step in range(5):
        x += cuda.shfl_xor_sync(FULL_WARP, x, 16 >> step)
    first = cuda.shfl_sync(FULL_WARP, cuda.threadIdx.x, 0)
    out[cuda.threadIdx.x] = x + first


def test_shuffles_exchange_values_within_a_warp():
    source = np.arange(64, dtype=np.float32)
    out = zeros(64)

    launch(sum_of_warp, ONE_BLOCK, 64, (out, source))

    np.testing.assert_array_equal(out, np.repeat([496, 1520 + 32], 32))


def reads_before_the_barrier(out, _source):
    tile = cuda.shared.array(64, float32)
    tile[cuda.threadIdx.x] = float32(1)
    out[cuda.threadIdx.x] = tile[63 - cuda.threadIdx.x]


def overwrites_what_others_read(out, source):
    tile = cuda.shared.array(64, float32)
    tile[cuda.threadIdx.x] = source[cuda.threadIdx.x]
    cuda.syncthreads()
    out[cuda.threadIdx.x] = tile[63 - cuda.threadIdx.x]
    tile[cuda.threadIdx.x] = float32(0)


def passes_to_its_neighbour_in_the_warp(out, _source):
    tile = cuda.shared.array(64, float32)
    tile[cuda.threadIdx.x] = float32(1)
    out[cuda.threadIdx.x] = tile[cuda.threadIdx.x ^ 1]


def all_write_one_element(out, _source):
    out[0] = float32(cuda.threadIdx.x)


@pytest.mark.parametrize(
    "kernel",
    [
        reads_before_the_barrier,
        overwrites_what_others_read,
        passes_to_its_neighbour_in_the_warp,
        all_write_one_element,
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_an_unordered_access_is_a_race(kernel, seed):
    with pytest.raises(Race, match="no barrier since"):
        launch(kernel, ONE_BLOCK, 64, (zeros(64), zeros(64)), seed=seed)


def passes_to_its_neighbour_with_syncwarp(out, source):
    tile = cuda.shared.array(64, float32)
    tile[cuda.threadIdx.x] = source[cuda.threadIdx.x]
    cuda.syncwarp()
    out[cuda.threadIdx.x] = tile[cuda.threadIdx.x ^ 1]


def test_syncwarp_orders_the_lanes_of_a_warp():
    source = np.arange(64, dtype=np.float32)
    out = zeros(64)

    launch(passes_to_its_neighbour_with_syncwarp, ONE_BLOCK, 64, (out, source))

    np.testing.assert_array_equal(out, np.arange(64) ^ 1)


def blocks_write_the_same_elements(out, _source):
    cuda.syncthreads()
    out[cuda.threadIdx.x] = float32(1)


def test_two_blocks_are_never_ordered():
    with pytest.raises(Race, match="block"):
        launch(blocks_write_the_same_elements, (2, 1, 1), 32, (zeros(32), zeros(32)))


def reads_past_the_end(out, source):
    out[cuda.threadIdx.x] = source[cuda.threadIdx.x + 1]


def reads_before_the_start(out, source):
    out[cuda.threadIdx.x] = source[cuda.threadIdx.x - 1]


def writes_past_a_local_array(out, _source):
    scratch = cuda.local.array(4, float32)
    scratch[cuda.threadIdx.x] = float32(0)
    out[cuda.threadIdx.x] = scratch[0]


def reads_past_an_axis_of_shared_memory(out, _source):
    tile = cuda.shared.array((2, 16), float32)
    out[cuda.threadIdx.x] = tile[0, cuda.threadIdx.x]


@pytest.mark.parametrize(
    "kernel",
    [
        reads_past_the_end,
        reads_before_the_start,
        writes_past_a_local_array,
        reads_past_an_axis_of_shared_memory,
    ],
)
def test_an_index_outside_an_array_is_out_of_bounds(kernel):
    with pytest.raises(OutOfBounds, match=r"by thread \d+"):
        launch(kernel, ONE_BLOCK, 32, (zeros(32), zeros(32)))


def half_the_lanes_shuffle(out, _source):
    if cuda.threadIdx.x < 16:
        out[cuda.threadIdx.x] = cuda.shfl_xor_sync(FULL_WARP, float32(1), 1)


def lanes_shuffle_in_two_branches(out, _source):
    if cuda.threadIdx.x < 16:
        x = cuda.shfl_xor_sync(FULL_WARP, float32(1), 1)
    else:
        x = cuda.shfl_xor_sync(FULL_WARP, float32(1), 1)
    out[cuda.threadIdx.x] = x


def half_the_lanes_are_at_the_barrier(out, _source):
    if cuda.threadIdx.x < 16:
        cuda.syncthreads()
    out[cuda.threadIdx.x] = cuda.shfl_xor_sync(FULL_WARP, float32(1), 1)


@pytest.mark.parametrize(
    "kernel",
    [half_the_lanes_shuffle, lanes_shuffle_in_two_branches, half_the_lanes_are_at_the_barrier],
)
def test_a_warp_that_parts_over_a_shuffle_diverges(kernel):
    with pytest.raises(Divergence):
        launch(kernel, ONE_BLOCK, 32, (zeros(32), zeros(32)))


def warps_wait_at_different_barriers(out, _source):
    if cuda.threadIdx.x < 32:
        cuda.syncthreads()
    else:
        cuda.syncthreads()
    out[cuda.threadIdx.x] = float32(1)


def test_threads_at_different_barriers_are_a_deadlock():
    with pytest.raises(Deadlock, match="32 × syncthreads"):
        launch(warps_wait_at_different_barriers, ONE_BLOCK, 64, (zeros(64), zeros(64)))


def uses_what_nobody_wrote(out, _source):
    scratch = cuda.local.array(1, float32)
    tile = cuda.shared.array(32, float32)
    out[cuda.threadIdx.x] = scratch[0] + tile[cuda.threadIdx.x]


def test_memory_starts_poisoned():
    out = zeros(32)

    launch(uses_what_nobody_wrote, ONE_BLOCK, 32, (out, zeros(32)))

    assert np.isnan(out).all()


def writes_its_input(_out, source):
    source[cuda.threadIdx.x] = float32(0)


def shuffles_half_a_warp(out, _source):
    out[cuda.threadIdx.x] = cuda.shfl_xor_sync(0xFFFF, float32(1), 1)


@pytest.mark.parametrize("kernel", [writes_its_input, shuffles_half_a_warp])
def test_what_is_not_modelled_is_refused(kernel):
    with pytest.raises(Unsupported):
        launch(kernel, ONE_BLOCK, 32, (zeros(32), zeros(32)))


def reads_a_far_element(out, source, first):
    out[cuda.threadIdx.x] = source[first + cuda.threadIdx.x]


def test_memory_too_large_to_have_is_read_in_the_pieces_that_there_are():
    pieces = Spread(np.arange(128, dtype=np.float32), (0, 2**40))
    out = zeros(64)

    launch(reads_a_far_element, ONE_BLOCK, 64, (out, pieces, 2**40))

    np.testing.assert_array_equal(out, np.arange(64, 128))
    for outside in (64, 2**40 - 1, 2**40 + 1, -1):
        with pytest.raises(OutOfBounds):
            launch(reads_a_far_element, ONE_BLOCK, 64, (out, pieces, outside))


def waits(out, source):
    let_next_begin()
    fetch_ahead(source, 4, 112)
    wait_for_previous()
    out[cuda.threadIdx.x] = source[cuda.threadIdx.x]


def reads_before_it_waits(out, source):
    value = source[cuda.threadIdx.x]
    wait_for_previous()
    out[cuda.threadIdx.x] = value


def writes_before_it_waits(out, _source):
    out[cuda.threadIdx.x] = float32(1)
    wait_for_previous()


def has_a_thread_that_never_waits(_out, _source):
    if cuda.threadIdx.x < 31:
        wait_for_previous()


def test_a_launch_that_begins_early_touches_nothing_before_it_has_waited():
    source, out = np.arange(32, dtype=np.float32), zeros(32)
    launch(waits, ONE_BLOCK, 32, (out, source), begins_early=True)
    np.testing.assert_array_equal(out, source)

    for kernel, message in (
        (reads_before_it_waits, "argument 1 is touched by thread"),
        (writes_before_it_waits, "argument 0 is touched by thread"),
        (has_a_thread_that_never_waits, "thread 31 .* has ended and never waited"),
    ):
        launch(kernel, ONE_BLOCK, 32, (out, source))
        with pytest.raises(TooEarly, match=message):
            launch(kernel, ONE_BLOCK, 32, (out, source), begins_early=True)


def writes_what_it_may_read(out, source):
    source[cuda.threadIdx.x] = out[cuda.threadIdx.x] + float32(1)
    wait_for_previous()


def test_what_a_step_is_given_may_be_read_before_the_wait_and_nothing_else():
    source, out = np.arange(32, dtype=np.float32), zeros(32)
    early = {"begins_early": True}
    launch(reads_before_it_waits, ONE_BLOCK, 32, (out, source), reads_early=(1,), **early)
    np.testing.assert_array_equal(out, source)

    for kernel in (reads_before_it_waits, writes_before_it_waits):
        with pytest.raises(TooEarly):
            launch(kernel, ONE_BLOCK, 32, (out, source), reads_early=(2,), **early)
    with pytest.raises(Unsupported, match=r"argument 1 .* is written"):
        launch(
            writes_what_it_may_read, ONE_BLOCK, 32, (out, source),
            written=(0, 1), reads_early=(0, 1), **early,
        )  # fmt: skip


def fetches_too_far(_out, source):
    fetch_ahead(source, 4, 128)


def fetches_from_a_bad_place(_out, source):
    fetch_ahead(source, 2, 16)


def fetches_half_a_unit(_out, source):
    fetch_ahead(source, 0, 24)


def test_what_is_fetched_ahead_is_there_and_whole_units():
    for kernel, fault in (
        (fetches_too_far, OutOfBounds),
        (fetches_from_a_bad_place, Misaligned),
        (fetches_half_a_unit, Misaligned),
    ):
        with pytest.raises(fault, match="argument 1"):
            launch(kernel, ONE_BLOCK, 32, (zeros(32), zeros(32)))
