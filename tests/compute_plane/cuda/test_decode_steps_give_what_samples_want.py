"""Penalties, biases and log-probabilities of decode steps: sent once a run, the same answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from compute_plane.cuda.decode_wants import ROOM
from compute_plane.cuda.operands import DrawNeeds
from compute_plane.executor.interface import BlockCopy, LogitBias, Penalties, SamplingRow
from compute_plane.executor.step import SamplingKey, StepBatch, StepResult
from tests.compute_plane.cuda.drawn_steps import (
    BIAS,
    RUNGS,
    Counted,
    decode_batch,
    drawn_batches,
    is_refused,
    pipelined,
    with_graphs,
)
from tests.compute_plane.cuda.played_cuda import played_cuda, played_device
from tests.compute_plane.cuda.torch_executors import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    RecordingDriver,
    torch_executor,
)
from tests.compute_plane.executor.slot_batches import start, step
from tests.golden.batch_driver import BatchDriver, DrivenSequence, int32

PENALISED = SamplingKey(0.0, 1.0, 1, 0, repetition_penalty=1.8)
BIASED = SamplingKey(0.0, 1.0, 1, 0, logit_bias=BIAS)


def assert_same(found: Sequence[StepResult], expected: Sequence[StepResult]) -> None:
    """Tokens of rows that did not fail, failures, log-probabilities but for rounding."""
    for one, other in zip(found, expected, strict=True):
        assert tokens_and_failures(one) == tokens_and_failures(other)
        pairs = zip(one.sample_logprobs, other.sample_logprobs, strict=True)
        for item, wanted in pairs:
            assert item.sample == wanted.sample
            assert item.logprob == pytest.approx(wanted.logprob, abs=1e-4)
            np.testing.assert_array_equal(item.top.token_ids, wanted.top.token_ids)
            np.testing.assert_allclose(item.top.logprobs, wanted.top.logprobs, atol=1e-4)


def tokens_and_failures(result: StepResult) -> tuple[list[int], set[object]]:
    tokens = result.sampled_token_ids.tolist()
    failed = {(failure.row, failure.reason) for failure in result.row_failures}
    if len(failed) and len(tokens) <= 2:  # two samples of one row
        return [], failed  # type: ignore[return-value]
    for row, _ in failed:
        tokens[row] = -1
    return tokens, failed  # type: ignore[return-value]


SEEDS = [(3, 9)]
MORE_SEEDS = [(0, 0), (1, 0), (2, 0), (4, 4), (5, 2)]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("seed", "waits_every"),
    [*SEEDS, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE_SEEDS)],
)
def test_drawn_steps_give_what_they_give_when_launched_eagerly(seed: int, waits_every: int) -> None:
    batches = drawn_batches(seed, 90, asks=True)
    found = []
    for may in (True, False):
        executor = with_graphs()
        counted = Counted(executor, may=may)
        found.append(pipelined(executor, batches, waits_every=waits_every))
        assert (counted.num_short > 50) == may
    assert_same(*found)


@pytest.mark.wide
def test_what_is_drawn_has_all_that_may_happen() -> None:
    batches = drawn_batches(2, 150, asks=True)
    results = pipelined(torch_executor(num_host_blocks=4), batches)
    assert any(batch.sampled_slots.size for batch in batches)
    assert any(batch.copies for batch in batches)
    assert any(batch.swap_in for batch in batches)
    assert any(is_refused(batch) for batch in batches)
    assert sum(bool(result.row_failures) for result in results) > 3
    assert sum(bool(result.sample_logprobs) for result in results) > 9


@pytest.mark.wide
@pytest.mark.parametrize("seed", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_accesses_to_histories_and_results_are_in_order(seed: int) -> None:
    batches = drawn_batches(seed, 50, asks=True)
    with played_cuda() as world:
        driver, operations = played_device(world)
        with driver.computing():
            executor = torch_executor(driver=driver, operations=operations, num_host_blocks=4)
        for rung in RUNGS:
            executor.capture_decode_graph(rung)
        counted = Counted(executor)
        found = pipelined(executor, batches)
    assert world.races == []
    assert counted.num_short > 10
    assert_same(found, pipelined(torch_executor(num_host_blocks=4), batches))


def run_of(keys: Sequence[SamplingKey], num_steps: int, *, first: int = 0) -> list[StepBatch]:
    """Prompts of five tokens, and steps in which they go on together."""
    starts = [
        start(slot, [slot + 1, 2, 3, 4, 5], [40 * slot, 40 * slot + 1], key)
        for slot, key in enumerate(keys, first)
    ]
    slots = [one.slot for one in starts]
    prompts = step([(slot, 0, 5) for slot in slots], starts=starts)
    return [prompts, *(one_further(slots, 5 + count) for count in range(num_steps))]


def one_further(slots: Sequence[int], position: int) -> StepBatch:
    enters = position % BLOCK_SIZE == 0
    blocks = [[40 * slot + position // BLOCK_SIZE] for slot in slots] if enters else []
    return step([(slot, position, 1) for slot in slots], new_blocks=blocks)


def num_copies(batches: Sequence[StepBatch]) -> tuple[list[int], list[StepResult]]:
    """Run steps; how many copies each takes, and what they give."""
    device = RecordingDriver()
    executor = with_graphs(device)
    device.take_calls()
    results = pipelined(executor, batches)
    of_steps, count = [], 0
    for call in device.take_calls():
        count += call == "copy"
        if call == "download":
            of_steps.append(count)
            count = 0
    return of_steps, results


@pytest.mark.parametrize("key", [PENALISED, replace(BIASED, num_logprobs=0)])
def test_a_run_sends_its_histories_and_biases_once(key: SamplingKey) -> None:
    batches = run_of([key, replace(key, seed=2)], 12)
    copies, results = num_copies(batches)
    assert copies == [1, 2, *[1] * 11]
    assert_same(results, pipelined(torch_executor(), batches))


@pytest.mark.wide
def test_histories_that_have_no_room_left_are_sent_again() -> None:
    batches = run_of([PENALISED, replace(PENALISED, seed=2)], ROOM + 5)
    copies, results = num_copies(batches)
    again = [1] * (ROOM + 6)
    again[1] = again[ROOM + 2] = 2
    assert copies == again
    assert_same(results, pipelined(torch_executor(), batches))


def test_the_host_keeps_no_history_that_it_has_sent() -> None:
    executor = with_graphs()
    pipelined(executor, run_of([PENALISED, replace(PENALISED, seed=2)], 3))
    ragged = executor._decode._ragged
    assert ragged is not None
    assert len(ragged.lengths) == 2
    assert not ragged.arrays


def test_biases_are_sent_again_behind_a_step_that_used_their_memory() -> None:
    device = RecordingDriver()
    executor = with_graphs(device)
    executor._pools.device.zero_()
    row = SamplingRow(0.0, 1.0, 0, 0, 6, logit_bias=BIAS)
    asking = replace(decode_batch(), sampling=[row, row])
    driver = BatchDriver(executor, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    prompt = driver.batch([DrivenSequence([1, 2, 3, 4, 5])])
    calls, tokens = [], []
    for batch in (asking, asking, prompt, asking):
        device.take_calls()
        tokens.append(executor.execute(batch).next_tokens.tolist())
        calls.append(device.take_calls().count("copy"))
    assert calls == [2, 1, 1, 2]
    assert tokens[0] == tokens[1] == tokens[3]


@pytest.mark.parametrize(("bias", "of_first"), [(BIAS, 2), (None, 1)])
def test_a_step_with_nothing_else_to_send_copies_its_blocks_all_the_same(
    bias: LogitBias | None, of_first: int
) -> None:
    """One that has copied before finds its biases as well."""
    device = RecordingDriver()
    executor = with_graphs(device)
    pool = executor._pools.device
    pool.zero_()
    pool[20] = 1.0
    row = SamplingRow(0.0, 1.0, 0, 0, 6, logit_bias=bias)
    batch = replace(decode_batch(), sampling=[row, row])
    calls = []
    for copies in ([], [BlockCopy(20, 21)], []):
        device.take_calls()
        executor.execute(replace(batch, copies=copies))
        calls.append(device.take_calls().count("copy"))
    assert calls == [of_first, 2, 1]
    assert (pool[21] == 1.0).all()


@pytest.mark.parametrize("is_kept", [False, True])
def test_rows_that_can_still_be_written_are_no_run(is_kept: bool) -> None:
    """Their array may name other rows the next time."""
    device = RecordingDriver()
    executor = with_graphs(device)
    executor._pools.device.zero_()
    penalties = Penalties(1.5, 0.0, 0.0, int32([5]), 1)
    row = SamplingRow(0.0, 1.0, 0, 0, 6, penalties=penalties)
    batch = replace(decode_batch(), sampling=[row, row])
    batch.sampled_rows.flags.writeable = not is_kept
    calls = []
    for _ in range(2):
        device.take_calls()
        executor.execute(batch)
        calls.append(device.take_calls().count("copy"))
    assert calls == [2, 1 if is_kept else 2]


@pytest.mark.parametrize("sources", [[0, -1], [-1, 1], [1, 0]])
def test_a_history_whose_last_token_is_known_is_taken_as_it_is(sources: list[int]) -> None:
    """Also where it is none that slots would give; and the awaited ones are completed."""
    found = []
    for may in (True, False):
        executor = with_graphs()
        Counted(executor, may=may)
        executor._pools.device.zero_()
        penalties = Penalties(1.0, 0.0, 0.0, int32([5, 0]), 1)
        for token in range(20):  # so strong that what is penalised never comes
            first = executor.launch(decode_batch())
            strong = penalties._replace(presence=-1e4, history=int32([5, 30 + token]))
            batch = decode_batch(6)
            batch = replace(
                batch,
                sampling=[row._replace(penalties=strong) for row in batch.sampling],
                input_sources=int32(sources),
            )
            second = executor.launch(batch)
            first.answer()
            found.append(second.answer().next_tokens.tolist())
    assert found[:20] == found[20:]


def test_a_slot_that_begins_anew_with_the_same_parameters_has_a_history_of_its_own() -> None:
    """The new prompt has one token, so that the step is one of decoding rows as well."""
    batches = run_of([PENALISED], 4)
    anew = start(0, [9], [30], PENALISED)
    batches += [step([(0, 0, 1)], starts=[anew]), *(one_further([0], 1 + n) for n in range(4))]
    copies, results = num_copies(batches)
    assert copies == [1, 2, 1, 1, 1, 2, 2, 1, 1, 1]
    assert_same(results, pipelined(torch_executor(), batches))


def test_a_step_that_fails_leaves_nothing_to_rely_on() -> None:
    """What it put behind the histories is put there again."""
    device = RecordingDriver()
    executor = with_graphs(device)
    executor._pools.device.zero_()
    launched = []
    take = executor._decode.take

    def failing_once(batch: object) -> object:
        launched.append(batch)
        return take(batch)  # type: ignore[arg-type]

    executor._decode.take = failing_once  # type: ignore[method-assign,assignment]
    pipelined(executor, run_of([PENALISED], 3))
    device.replay_failure = "an illegal memory access"
    with pytest.raises(Exception, match="illegal"):
        executor.launch(replace(launched[-1], input_sources=None))  # type: ignore[type-var]
    device.replay_failure = None
    device.take_calls()
    executor.execute(replace(launched[-1], input_sources=None))  # type: ignore[type-var]
    assert device.take_calls() == ["copy", "copy", "replay", "download"]


def test_one_row_that_asks_adds_no_launch_for_the_others() -> None:
    """The plain ones are drawn together, as they lie."""
    batches = run_of([replace(PENALISED, repetition_penalty=1.0), BIASED], 3)
    executor = with_graphs()
    shapes = []
    sample = executor._operations.sample
    executor._operations.sample = lambda out, *rest: (  # type: ignore[method-assign]
        shapes.append(len(out)), sample(out, *rest)
    )[1]  # fmt: skip
    pipelined(executor, batches)
    assert shapes == [1, 1] * 4
    assert np.all(np.array(shapes) == 1)


def test_as_many_samples_that_are_drawn_or_listed_in_other_ways_share_no_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels leave out what no sample needs; the reference would not notice."""
    executor = with_graphs()
    executor._pools.device.zero_()
    needs: list[DrawNeeds] = []
    sample = executor._operations.sample

    def noting(*arguments: Any) -> None:
        needs.append(arguments[3].needs)
        sample(*arguments)

    monkeypatch.setattr(executor._operations, "sample", noting)
    for bias in (None, BIAS):
        greedy = SamplingRow(0.0, 1.0, 0, 0, 6, logit_bias=bias)
        drawn = greedy._replace(temperature=1.0)
        for row in (greedy, drawn, drawn._replace(top_k=3), drawn._replace(num_logprobs=1)):
            batch = replace(decode_batch(), sampling=[row, row])
            listed = executor.execute(batch).sample_logprobs
            assert len(listed) == (0 if row.num_logprobs is None else 2)
    of_ways = [(False, False), (True, False), (True, True), (True, False)]
    assert needs == [DrawNeeds(*of_way) for of_way in of_ways * 2]
