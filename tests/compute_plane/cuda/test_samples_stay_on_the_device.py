"""A step may compute tokens that the host has not seen: samples of the step launched before it."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from compute_plane.cuda.executor import CudaExecutor
from compute_plane.cuda.last_samples import LastSamples
from compute_plane.executor.batch_checks import SlotLimits
from compute_plane.executor.interface import (
    GPUExecutor,
    LogitBias,
    Penalties,
    PipelinedExecutor,
)
from compute_plane.executor.sessions import SessionLedger
from compute_plane.executor.slots import SlotTable
from compute_plane.executor.step import SamplingKey, StepBatch, StepHeader, StepReply
from compute_plane.executor.step_pipeline import StepPipeline
from compute_plane.executor.steps_in_turn import StepsInTurn
from compute_plane.executor.work import Answer, Work
from planes.errors import ValidationError
from tests.compute_plane.cuda.torch_executors import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    SPEC,
    RecordingDriver,
    torch_executor,
)
from tests.compute_plane.executor.slot_batches import start, step
from tests.golden.batch_driver import BatchDriver, DrivenSequence, int32

LIMITS = SlotLimits(
    max_slots=8, max_rows=8, max_tokens=64, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS,
    vocab_size=SPEC.vocab_size, context_length=SPEC.context_length,
)  # fmt: skip
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10], [11]]
KEYS = [
    SamplingKey(0.0, 1.0, 1, 0),
    SamplingKey(0.9, 0.9, 2, 0, repetition_penalty=1.8, frequency_penalty=0.5),
    SamplingKey(1.1, 1.0, 3, 0, num_logprobs=2),
    SamplingKey(0.0, 1.0, 4, 0, presence_penalty=2.0, repetition_penalty=1.9),
]


def batches(num_decodes: int) -> list[StepBatch]:
    """Prompts, one of them in two chunks, and then tokens of all of them, in changing orders."""
    starts = [
        start(slot, prompt, range(10 * slot, 10 * slot + 10), key)
        for slot, (prompt, key) in enumerate(zip(PROMPTS, KEYS, strict=True))
    ]
    made = [
        step([(2, 0, 2), (0, 0, 3), (1, 0, 2)], starts=starts, sampled=[2, 1]),
        step([(3, 0, 1), (2, 2, 3), (1, 2, 1), (0, 3, 1)]),
    ]
    for count in range(num_decodes):
        rows = [(slot, len(PROMPTS[slot]) + count + (slot < 2), 1) for slot in range(4)]
        made.append(step(rows[::-1] if count % 4 == 3 else rows))
    return made


def run(runner: StepsInTurn | StepPipeline, sessions: SessionLedger, answers: list[Answer]) -> list:
    """Send everything as fast as it is taken; the tokens and what else was answered."""
    session = sessions.open("test", take_over=False).session
    for step_id, batch in enumerate(batches(12), 1):
        header = StepHeader(session, sessions.epoch, step_id, 0)
        runner.take(Work(header, batch, answers.append, 0))
    runner.finish_all()
    seen = []
    for answer in answers:
        assert isinstance(answer, StepReply)
        assert answer.result is not None
        assert not answer.result.row_failures
        logprobs = {item.sample: item.logprob for item in answer.result.sample_logprobs}
        seen.append((answer.result.sampled_token_ids.tolist(), logprobs))
    return seen


def in_turn(executor: GPUExecutor) -> list:
    sessions, answers = SessionLedger(), list[Answer]()
    return run(StepsInTurn(executor, SlotTable(LIMITS), sessions), sessions, answers)


def ahead(executor: PipelinedExecutor) -> list:
    sessions, answers = SessionLedger(), list[Answer]()
    pipeline = StepPipeline(executor, SlotTable(LIMITS), sessions, lambda _: None)
    return run(pipeline, sessions, answers)


def executor_with_graphs(*sizes: int) -> tuple[CudaExecutor, RecordingDriver]:
    device = RecordingDriver()
    executor = torch_executor(driver=device)
    for size in sizes:
        executor.capture_decode_graph(size)
    device.take_calls()
    return executor, device


@pytest.mark.parametrize("graphs", [(), (8,)], ids=["eager", "graphs"])
def test_two_steps_under_way_give_the_tokens_of_steps_in_turn(graphs: tuple[int, ...]):
    executor, device = executor_with_graphs(*graphs)
    assert isinstance(executor, PipelinedExecutor)
    found = ahead(executor)
    calls = device.take_calls()
    assert calls.count("download") == 14
    assert calls.count("replay") == (12 if graphs else 0)
    expected = in_turn(executor_with_graphs(*graphs)[0])
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, one), (_, other) in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_without_penalties_they_are_the_tokens_that_the_model_gives_alone():
    found = np.concatenate([tokens for tokens, _ in ahead(torch_executor())[2:7]])
    driver = BatchDriver(torch_executor(), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    (greedy,) = driver.generate([DrivenSequence(list(PROMPTS[0]))], 7)
    first_rows = [0, 4, 8, 15, 16]  # of slot 0, whose row is the last one every fourth time
    assert found[first_rows].tolist() == greedy[2:7]


def two_steps(executor: CudaExecutor) -> tuple[BatchDriver, list[DrivenSequence]]:
    driver = BatchDriver(executor, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    return driver, [DrivenSequence(list(prompt)) for prompt in PROMPTS[:2]]


def test_inputs_are_gathered_before_the_host_has_read_anything():
    executor, _ = executor_with_graphs()
    driver, rows = two_steps(executor)
    expected = two_steps(torch_executor())
    tokens = expected[0].generate(expected[1], 2)
    first = executor.launch(driver.batch(rows))
    for row in rows:
        row.num_computed = len(row.tokens)
        row.tokens.append(0)
    batch = driver.batch(rows)
    second = executor.launch(replace(batch, input_sources=int32([0, 1])))
    assert not first.done.is_done()
    found = [first.answer().next_tokens, second.answer().next_tokens]
    assert np.transpose(found).tolist() == tokens


@pytest.mark.parametrize("has_history", [(True, True), (True, False), (False, True)])
def test_a_history_that_awaits_its_last_token_is_completed_on_the_device(
    has_history: tuple[bool, bool],
):
    """Rows without one have a bias, which is adjusted in the same place."""
    answers = []
    bias = LogitBias(int32([5]), np.array([0.5], dtype=np.float32))
    for awaited in (False, True):
        executor, _ = executor_with_graphs()
        driver, rows = two_steps(executor)
        first = executor.launch(driver.batch(rows))
        tokens = [0, 0] if awaited else first.answer().next_tokens.tolist()
        for row, token in zip(rows, tokens, strict=True):
            row.num_computed = len(row.tokens)
            row.tokens.append(token)
        batch = driver.batch(rows)
        # So strong that the token before, seen once, decides what comes.
        sampling = [
            row._replace(penalties=Penalties(1.0, -1e4, 0.0, int32(sequence.tokens), 1))
            if has_penalty
            else row._replace(logit_bias=bias)
            for row, sequence, has_penalty in zip(batch.sampling, rows, has_history, strict=True)
        ]
        sources = int32([0, 1]) if awaited else None
        step = executor.launch(replace(batch, sampling=sampling, input_sources=sources))
        answers.append(step.answer().next_tokens.tolist())
        if awaited:
            first.answer()
    assert answers[0] == answers[1]


def test_a_sample_that_means_nothing_never_becomes_an_address():
    last = LastSamples(vocab_size=10)
    plan = type("Plan", (), {"sample_order": np.array([1, 0, 2])})
    last.keep(torch.tensor([1 << 30, 4, -5], dtype=torch.int32), plan)  # type: ignore[arg-type]
    inputs = {
        "token_ids": torch.tensor([7, 0, 0, 0], dtype=torch.int32),
        "awaited_tokens": torch.tensor([1, 3]),
        "awaited_samples": torch.tensor([0, 2]),
    }
    last.fill_in(inputs)
    assert inputs["token_ids"].tolist() == [7, 9, 0, 0]


@pytest.mark.parametrize("sources", [[0], [0, 2], [-2, 0]])
def test_sources_that_are_no_samples_are_refused(sources: list[int]):
    executor = torch_executor()
    driver, rows = two_steps(executor)
    driver.generate(rows, 1)
    with pytest.raises(ValidationError) as info:
        executor.launch(replace(driver.batch(rows), input_sources=int32(sources)))
    assert info.value.field == "input_sources"
    assert len(driver.generate(rows, 1)) == 2  # no buffer is lost


def test_a_launch_that_fails_takes_nothing_from_the_step_under_way(monkeypatch: pytest.MonkeyPatch):
    executor, _ = executor_with_graphs()
    driver, rows = two_steps(executor)
    expected = two_steps(torch_executor())
    tokens = expected[0].generate(expected[1], 1)
    first = executor.launch(driver.batch(rows))

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the device is ill")

    with monkeypatch.context() as patch:
        patch.setattr(executor._operations, "gate_mul", fail)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="ill"):
                executor.launch(driver.batch(rows))
    assert first.answer().next_tokens[:, None].tolist() == tokens


def test_a_step_can_be_waited_for_by_another_thread_when_its_buffers_are_used_again():
    executor, _ = executor_with_graphs()
    driver, rows = two_steps(executor)
    first = executor.launch(driver.batch(rows))
    first.answer()
    again = executor.launch(driver.batch(rows))
    waiter = threading.Thread(target=first.wait)
    waiter.start()
    waiter.join()
    assert not again.done.is_done()
    assert again.answer().next_tokens.size == 2
