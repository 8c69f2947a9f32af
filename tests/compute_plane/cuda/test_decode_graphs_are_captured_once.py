"""Which decode steps become graphs, how often they are captured, and what a replay is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from compute_plane.cuda.build import build_on, capture_graphs, planned_weights
from compute_plane.cuda.columns import ALIGNMENT
from compute_plane.cuda.decode_graphs import LADDER, batch_sizes, bytes_of_graphs
from compute_plane.cuda.decode_inputs import InputMemory, bytes_of_inputs
from compute_plane.cuda.drivers import Graph
from compute_plane.cuda.executor import CudaExecutor
from compute_plane.cuda.reference_operations import ReferenceOperations
from compute_plane.errors import GraphCaptureError, GraphReplayError
from compute_plane.executor.interface import LogitBias, Penalties, SamplingRow
from compute_plane.executor.registry import ExecutorContext
from kernels.cuda.errors import DriverError
from tests.compute_plane.cuda.torch_executors import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    SPEC,
    RecordingDriver,
    tiny_model,
    torch_executor,
)
from tests.golden.batch_driver import BatchDriver, DrivenSequence, int32

COPY_REPLAY_DOWNLOAD = ["copy", "replay", "download"]
COPY_DOWNLOAD = ["copy", "download"]


def captured(*sizes: int) -> tuple[RecordingDriver, CudaExecutor, BatchDriver]:
    """Return an executor with graphs of these sizes, its device, and what drives it."""
    device = RecordingDriver()
    executor = torch_executor(driver=device, keep_logits=True)
    for size in sizes:
        executor.capture_decode_graph(size)
    device.take_calls()
    return device, executor, BatchDriver(executor, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)


def decoding(driver: BatchDriver, count: int) -> list[DrivenSequence]:
    """Return sequences of different lengths that have only their last token to compute."""
    rows = [DrivenSequence([1 + row, 2, 3, 4, 5, 6][: 2 + row % 4]) for row in range(count)]
    driver.generate(rows, 1)
    return rows


def test_rungs_double_and_then_leave_at_most_a_third_of_padding():
    assert batch_sizes(1) == [1]
    assert batch_sizes(5) == [1, 2, 4, 8]
    assert batch_sizes(33)[-2:] == [32, 48]
    assert batch_sizes(10_000) == list(LADDER)
    for rows in range(9, 257):
        rung = next(size for size in LADDER if size >= rows)
        assert rung - rows <= max(rung / 3, 7)


def test_a_graph_is_captured_once_and_replayed_for_every_step_that_it_holds():
    device, executor, driver = captured(2, 4)
    executor.capture_decode_graph(4)
    assert (device.take_calls(), executor.graphs.captured) == ([], (2, 4))
    rows = decoding(driver, 3)
    device.take_calls()
    device.watched.clear()
    driver.generate(rows, 3)
    assert device.take_calls() == 3 * COPY_REPLAY_DOWNLOAD
    assert device.watched == [True] * 3  # who waits for a graph's step knows how long it takes


def test_padded_steps_give_the_tokens_and_log_probabilities_of_eager_ones():
    _, _, driver = captured(1, 2, 4, 8)
    _, _, eager = captured()
    outputs = []
    for one in (driver, eager):
        rows = decoding(one, 5)
        tokens = one.generate(rows, 3)
        batch = one.batch(rows)
        bias = LogitBias(int32([7]), np.array([3], dtype=np.float32))
        history = int32(rows[4].tokens)
        sampling = [
            SamplingRow(0.0, 1.0, 0, 0, 9, num_logprobs=3),
            SamplingRow(0.9, 0.8, 5, 0, 9, penalties=Penalties(1.2, 0.5, 0.1, history, 2)),
            SamplingRow(1.0, 1.0, 6, 1, 9, top_k=5, min_p=0.01),
            SamplingRow(0.0, 1.0, 0, 0, 9, logit_bias=bias, num_logprobs=0),
            SamplingRow(1.1, 0.9, 7, 0, 9),
        ]
        # Not every row is sampled, one is twice.
        output = one.executor.execute(
            replace(batch, sampling=sampling, sampled_rows=int32([4, 4, 0, 3, 1]))
        )
        outputs.append((tokens, output))
    (tokens, found), (expected_tokens, expected) = outputs
    assert tokens == expected_tokens
    assert found.next_tokens.tolist() == expected.next_tokens.tolist()
    assert [one.sample for one in found.sample_logprobs] == [0, 3]
    for one, other in zip(found.sample_logprobs, expected.sample_logprobs, strict=True):
        np.testing.assert_array_equal(one.top.token_ids, other.top.token_ids)
        np.testing.assert_allclose(one.top.logprobs, other.top.logprobs, atol=1e-5)
    np.testing.assert_allclose(found.logits, expected.logits, atol=1e-4)


def test_steps_that_no_graph_holds_are_launched_eagerly():
    device, executor, driver = captured(1, 2)
    three = decoding(driver, 3)
    device.take_calls()
    executor.execute(driver.batch(three))  # too many rows
    prompt = DrivenSequence([1, 2, 3])
    executor.execute(driver.batch([three[0], prompt]))  # a prefill among them
    batch = driver.batch(three[:1])
    executor.execute(replace(batch, prompt_logprob_rows=[0], prompt_logprob_targets=[int32([3])]))
    assert device.take_calls() == 3 * COPY_DOWNLOAD
    executor.execute_graph(batch)
    assert device.take_calls() == COPY_REPLAY_DOWNLOAD


def test_padding_rows_and_capturing_write_no_block():
    device, executor, driver = captured(8)
    pool = executor._pools.device
    assert pool.isnan().all()  # the graph has run once, to be captured
    rows = decoding(driver, 5)
    device.take_calls()
    executor.execute(driver.batch(rows))
    assert device.take_calls() == COPY_REPLAY_DOWNLOAD
    written = {block for block in range(NUM_BLOCKS) if not pool[block].isnan().all()}
    assert written == {block for row in rows for block in row.blocks}


def test_a_shorter_step_reads_nothing_of_the_step_before_it():
    """A graph's tables keep what a longer step left there, and its rows go back to padding."""
    _, _, driver = captured(4)
    long = [DrivenSequence(list(range(1, 60))) for _ in range(4)]
    driver.generate(long, 2)
    short = decoding(driver, 3)
    expected = driver.generate([DrivenSequence(list(short[1].tokens))], 2)
    assert driver.generate(short, 2)[1] == expected[0]


def test_the_ladder_stops_at_the_memory_bound_and_keeps_the_smaller_rungs():
    device = RecordingDriver(bytes_of_capture=[60, 50, 30, 10])
    executor = torch_executor(driver=device)
    assert executor.graphs.capture_ladder(8, 45) == [8, 4]
    assert executor.graphs.captured == (1, 2)
    assert device.graph_bytes == 40
    assert device.take_calls().count("release") == 2


def test_a_rung_that_finds_room_in_the_memory_of_one_left_out_is_kept():
    device = RecordingDriver(bytes_of_capture=[60, 50, 20, 10], keeps_released=True)
    executor = torch_executor(driver=device)
    assert executor.graphs.capture_ladder(8, 45) == [8, 2]
    assert executor.graphs.captured == (1, 4)
    assert device.graph_bytes == 70


def test_a_ladder_of_which_nothing_fits_leaves_steps_to_be_launched_eagerly():
    device = RecordingDriver(bytes_of_capture=[60, 50])
    executor = torch_executor(driver=device)
    assert executor.graphs.capture_ladder(2, 45) == [2, 1]
    assert (executor.graphs.captured, device.graph_bytes) == ((), 0)
    assert executor.graphs.rung(1) is None


def test_memory_that_a_capture_leaves_unused_is_not_counted_for_its_graph():
    class Warming(RecordingDriver):
        def capture(self, work: Callable[[], None]) -> Graph:
            self.graph_bytes += 100
            return super().capture(work)

        def release_unused(self) -> None:
            self.graph_bytes %= 100

    executor = torch_executor(driver=Warming(bytes_of_capture=[20, 20]))
    assert executor.graphs.capture_ladder(2, 45) == []


def test_what_others_on_the_device_take_meanwhile_leaves_no_graph_out():
    """The numerics id names the graphs: a request goes on on a plane that has the same."""

    class Shared(RecordingDriver):
        def capture(self, work: Callable[[], None]) -> Graph:
            assert self.memory is not None
            self.memory -= 1000
            return super().capture(work)

    device = Shared(bytes_of_capture=[20, 20], memory=5000)
    assert torch_executor(driver=device).graphs.capture_ladder(2, 45) == []
    assert (device.total_bytes(), device.free_bytes()) == (3000, 2960)


def test_graphs_are_given_room_for_the_inputs_that_they_share():
    memory = InputMemory(RecordingDriver(), num_rows=4, table_width=3)
    held = memory.columns.nbytes + memory.tables.nbytes
    assert 0 <= bytes_of_inputs(4, 3) - held <= ALIGNMENT
    partly_filled, filled = (replace(SPEC, context_length=length) for length in (33, 48))
    assert bytes_of_graphs(partly_filled, [4], 16) == bytes_of_graphs(filled, [4], 16)


@pytest.mark.parametrize(("context_length", "num_blocks", "width"), [(30, 99, 8), (512, 3, 3)])
def test_tables_of_graphs_are_as_wide_as_the_longest_sequence_there_can_be(
    context_length: int, num_blocks: int, width: int
):
    spec = replace(SPEC, context_length=context_length)
    executor = torch_executor(spec, RecordingDriver(), num_blocks=num_blocks, block_size=4)
    executor.capture_decode_graph(2)
    assert executor.graphs.inputs(2).step.decode_tables.shape == (2, width)


def test_graphs_are_given_room_for_the_logits_of_every_rung():
    sizes = batch_sizes(4)
    with_logits = bytes_of_graphs(SPEC, sizes, block_size=16)
    wider = bytes_of_graphs(replace(SPEC, vocab_size=SPEC.vocab_size + 10), sizes, block_size=16)
    assert wider - with_logits == (1 + 2 + 4) * 10 * 4


def test_a_plane_captures_up_to_its_most_rows(capsys: pytest.CaptureFixture[str]):
    device = RecordingDriver()
    executor = torch_executor(driver=device)
    capture_graphs(executor, 3, 1 << 30)
    assert executor.graphs.captured == (1, 2, 4)
    assert "decode graphs" in capsys.readouterr().out


def test_a_failing_capture_is_typed_in_one_line_and_leaves_no_graph():
    device = RecordingDriver(capture_failure="CUDA out of memory.\nTried to allocate")
    executor = torch_executor(driver=device)
    with pytest.raises(GraphCaptureError, match=r"4 rows .*--no-cuda-graph.* memory\. Tried"):
        executor.capture_decode_graph(4)
    assert executor.graphs.captured == ()


def test_a_kernel_that_cannot_be_launched_is_a_failing_capture_too(monkeypatch: pytest.MonkeyPatch):
    executor = torch_executor(driver=RecordingDriver())

    def refuse(*_: object, **__: object) -> None:
        raise DriverError("cuLaunchKernel", "CUDA_ERROR_INVALID_VALUE")

    monkeypatch.setattr(executor._operations, "gate_mul", refuse)
    with pytest.raises(GraphCaptureError, match="cuLaunchKernel failed: CUDA_ERROR_INVALID_VALUE"):
        executor.capture_decode_graph(4)


def test_a_failing_replay_is_typed_and_the_next_step_finds_its_buffers_free():
    device, executor, driver = captured(2)
    rows = decoding(driver, 2)
    device.replay_failure = "an illegal memory access"
    for _ in range(3):
        with pytest.raises(GraphReplayError, match="2 rows failed: an illegal"):
            executor.execute(driver.batch(rows))
    device.replay_failure = None
    assert len(executor.execute(driver.batch(rows)).next_tokens) == 2


def test_an_executor_that_is_built_to_keep_logits_keeps_those_of_its_graphs(tmp_path):
    model, device = tiny_model(SPEC), RecordingDriver(memory=1 << 30)
    context = ExecutorContext(
        spec=SPEC, model=model, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, dtype="float32",
        kv_cache_dtype="auto", instruction_set="auto", device="cuda", max_tokens=64,
        num_threads=1, kernel_cache=tmp_path, max_rows=4, keep_logits=True,
    )  # fmt: skip
    plan = planned_weights(context, model, device.device)
    executor = build_on(context, model, plan, device, ReferenceOperations()).executor
    driver = BatchDriver(executor, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    rows = decoding(driver, 2)
    device.take_calls()

    output = executor.execute(driver.batch(rows))

    assert "replay" in device.take_calls()
    assert output.logits is not None
    assert output.logits.argmax(1).tolist() == output.next_tokens.tolist()
