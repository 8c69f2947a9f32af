"""Inputs go to the device in one copy from memory that is kept; results come when waited for."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from compute_plane.cuda.columns import ALIGNMENT, Layout
from compute_plane.cuda.host_layers import HostLayersExecutor
from compute_plane.cuda.staging import FIRST_BYTES, StagingRing
from compute_plane.errors import DeviceLostError
from planes.errors import ExecutionError
from tests.compute_plane.cuda.cut_executors import cut_executor
from tests.compute_plane.cuda.torch_executors import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    RecordingDriver,
    torch_executor,
)
from tests.golden.batch_driver import BatchDriver, DrivenSequence

DTYPES = st.sampled_from([np.int32, np.int64, np.float32, np.float64])


def any_array() -> st.SearchStrategy[np.ndarray]:
    shapes = arrays_of.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=5)
    return DTYPES.flatmap(lambda dtype: arrays_of.arrays(dtype, shapes))


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.sampled_from("abcdef"), any_array()))
def test_columns_of_a_buffer_are_apart_aligned_and_come_back_the_same(columns):
    layout = Layout.of(columns)
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    layout.fill(buffer, columns)
    assert all(field.offset % ALIGNMENT == 0 for field in layout.fields.values())
    copies, tensors = layout.arrays(buffer), layout.tensors(buffer)
    for name, column in columns.items():
        assert copies[name].dtype == column.dtype
        np.testing.assert_array_equal(copies[name], column)
        np.testing.assert_array_equal(tensors[name].numpy(), column)


def test_a_column_of_another_shape_is_refused():
    layout = Layout({"a": (np.int32, (3,))})
    with pytest.raises(ValueError, match=r"a must be \(3,\), got \(1,\)"):
        layout.fill(torch.zeros(16, dtype=torch.uint8), {"a": np.zeros(1, np.int32)})


def columns_of(value: int, count: int = 4) -> dict[str, np.ndarray]:
    return {"numbers": np.full(count, value, dtype=np.int64)}


def test_a_step_keeps_its_inputs_and_results_until_it_is_collected():
    device = RecordingDriver()
    ring = StagingRing(device, 2)
    berths = []
    for value in (7, 8):
        berth = ring.take()
        columns = columns_of(value)
        layout = Layout.of(columns)
        inputs = ring.upload(berth, layout, columns)
        buffer = device.device_buffer(layout.num_bytes)
        layout.tensors(buffer)["numbers"].copy_(inputs["numbers"] * 10)
        berth.fetch(layout, buffer)
        berths.append(berth)
    with pytest.raises(ExecutionError, match="at most 2 steps may be under way"):
        ring.take()
    assert berths[0].collect()["numbers"].tolist() == [70] * 4
    assert ring.take() is berths[0]
    assert berths[1].collect()["numbers"].tolist() == [80] * 4
    assert device.take_calls() == ["copy", "download"] * 2


def test_results_are_not_read_before_the_device_is_done():
    device = RecordingDriver()
    berth = StagingRing(device, 1).take()
    layout = Layout.of(columns_of(0))
    buffer = device.device_buffer(layout.num_bytes)
    layout.tensors(buffer)["numbers"].fill_(5)
    berth.fetch(layout, buffer)
    assert berth._results[: layout.num_bytes].tolist() != buffer.tolist()
    assert berth.collect()["numbers"].tolist() == [5] * 4


def test_buffers_grow_for_a_large_step_and_stay_for_the_ones_after_it():
    device = RecordingDriver()
    ring = StagingRing(device, 1)
    assert device.host_buffers == [FIRST_BYTES] * 2
    for count in (FIRST_BYTES // 8, FIRST_BYTES // 8 + 1, FIRST_BYTES // 4, 1):
        berth = ring.take()
        columns = columns_of(count, count)
        assert (
            ring.upload(berth, Layout.of(columns), columns)["numbers"].tolist() == [count] * count
        )
        berth.free()
    assert device.host_buffers == [FIRST_BYTES, FIRST_BYTES, 2 * FIRST_BYTES]


def test_what_a_step_fills_in_piece_by_piece_stays_until_its_berth_is_free():
    """The device may not have copied the first piece yet when the buffer is too small for more."""
    berth = StagingRing(RecordingDriver(), 1).take()
    first_buffer = weakref.ref(berth._inputs)
    pieces = [np.full(count, count % 251, np.uint8) for count in (10, 20, FIRST_BYTES * 3, 5)]
    filled = [berth.fill_bytes([piece]) for piece in pieces]
    for piece, (buffer, begin, num_bytes) in zip(pieces, filled, strict=True):
        np.testing.assert_array_equal(buffer.numpy()[begin : begin + num_bytes], piece)
    assert filled[1][1] - filled[0][1] == ALIGNMENT
    del filled, buffer
    assert first_buffer() is not None
    berth.free()
    assert first_buffer() is None


def test_memory_for_results_is_replaced_only_if_it_is_too_little():
    berth = StagingRing(RecordingDriver(), 1).take()
    first, larger, smaller = (berth.device_results(count) for count in (16, 48, 32))
    assert (len(first), len(larger)) == (16, 48)
    assert smaller is larger


def test_the_next_step_is_queued_before_the_step_before_it_is_read():
    device = RecordingDriver()
    executor = torch_executor(driver=device)
    driver = BatchDriver(executor, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    batches = [driver.batch([DrivenSequence([1, 2, 3 + row])]) for row in range(2)]
    expected = [executor.execute(batch).next_tokens.tolist() for batch in batches]
    device.take_calls()
    first, second = (executor.launch(batch) for batch in batches)
    assert device.take_calls() == ["copy", "download", "copy", "download"]
    assert [first.answer().next_tokens.tolist(), second.answer().next_tokens.tolist()] == expected


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "layers on the host"])
def test_a_fault_of_the_device_that_outlives_a_step_is_a_lost_device(is_cut: bool):
    device = RecordingDriver()
    executor = cut_executor(driver=device) if is_cut else torch_executor(driver=device)
    batch = BatchDriver(executor, num_blocks=10, block_size=BLOCK_SIZE).batch(
        [DrivenSequence([1, 2, 3])]
    )
    device.fault = "CUDA error: an illegal memory access\nwas encountered"
    with pytest.raises(DeviceLostError, match="illegal memory access was encountered"):
        executor.execute(batch)  # found when its results are waited for
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor._operations, "gate_mul", fail)
        with pytest.raises(DeviceLostError, match="illegal memory access was encountered") as info:
            executor.execute(batch)
    assert "out of memory" in str(info.value.__context__.__context__)
    device.fault = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor._operations, "gate_mul", fail)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="out of memory"):
                executor.execute(batch)
    assert executor.execute(batch).next_tokens.size == 1
    if isinstance(executor, HostLayersExecutor):
        executor.close()


def fail(*_: object, **__: object) -> None:
    raise RuntimeError("out of memory")


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("rungs", [(), (2,)], ids=["eager", "graphs"])
def test_steps_that_are_broken_off_leave_their_buffers_free(rungs: tuple[int, ...]):
    executor = torch_executor(driver=RecordingDriver())
    driver = BatchDriver(executor, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    for rung in rungs:
        executor.capture_decode_graph(rung)
    batch = driver.batch([DrivenSequence([1]), DrivenSequence([2])])
    expected = executor.execute(batch).next_tokens.tolist()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("keep", "keep_in_order"):
            patch.setattr(executor._last, name, interrupt)
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                executor.launch(batch)
    assert executor.execute(batch).next_tokens.tolist() == expected
