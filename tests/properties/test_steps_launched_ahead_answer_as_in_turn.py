"""Whatever befalls a batch, its answer is the one it would have had, had batches run in turn.

Controllers that make mistakes send batches to two planes: one runs them in turn, the other launches
each before the answer of the one before is read, as far as it may. Rows fail by what they read, so
both planes fail the same ones.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from compute_plane.errors import InvalidBatch
from compute_plane.executor import work
from compute_plane.executor.interface import ExecutionBatch, ExecutionOutput
from compute_plane.executor.samples_ahead import SampleAwaited
from compute_plane.executor.sessions import SessionLedger
from compute_plane.executor.simulated import SimulatedExecutor
from compute_plane.executor.slots import SlotTable
from compute_plane.executor.step import (
    RowFailureReason,
    SamplingKey,
    SlotPrefix,
    SlotStart,
    StepBatch,
    StepHeader,
    StepReply,
    TableCopy,
)
from compute_plane.executor.step_pipeline import StepPipeline
from compute_plane.executor.steps_in_turn import StepsInTurn
from compute_plane.executor.work import Answer, Work
from tests.compute_plane.executor.pipelined_executors import DelayedExecutor, DelayedStep
from tests.compute_plane.executor.slot_batches import LIMITS as SMALL
from tests.compute_plane.executor.slot_batches import column, start, step

NUM_SLOTS = 5
BLOCKS_A_START = 10
NO_ONES_BLOCK = 0
LIMITS = replace(SMALL, num_blocks=5000)
"""So many that no life of a slot uses the blocks of another: what a dead row leaves in its own ones
is the one thing that differs."""
FAILING = 19
"""One row in so many fails."""


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """Thousands of refusals and failures are meant."""
    with pytest.MonkeyPatch.context() as patch:
        wrapper = structlog.make_filtering_bound_logger(logging.CRITICAL)
        silent = structlog.wrap_logger(structlog.ReturnLogger(), wrapper_class=wrapper)
        patch.setattr(work, "log", silent)
        yield


def failing_rows(executor: SimulatedExecutor, batch: ExecutionBatch) -> dict[int, str]:
    """Rows that fail because of what they read."""
    return {
        row: "not finite"
        for row in range(len(batch.query_lens))
        if int(executor._read(batch, row).astype(np.int64).sum()) % FAILING == 0
    }


class InTurn(SimulatedExecutor):
    """Fails the step that is told, and rows by what they read."""

    fails = False
    has_failed = False

    def execute(self, batch: ExecutionBatch) -> ExecutionOutput:
        self.has_failed = self.fails
        if self.fails:
            raise RuntimeError("the device is ill")
        output = super().execute(batch)
        return replace(output, failed_rows=failing_rows(self, batch))


class Ahead(DelayedExecutor):
    """The same, launched; a step told to fail does so at once or when it is done."""

    fails: str = ""
    num_ahead = 0

    def launch(self, batch: ExecutionBatch) -> DelayedStep:
        if self.fails == "at launch":
            raise RuntimeError("the device is ill")
        launched = super().launch(batch)
        if self.fails == "when done":
            launched.failure = RuntimeError("the device is ill")
        self.num_ahead += batch.input_sources is not None
        return launched

    def failed_rows(self, batch: ExecutionBatch) -> dict[int, str]:
        return failing_rows(self, batch)


class Controller:
    """Sends mixed batches over its slots; thinks of each as if nothing failed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.tokens = [0] * NUM_SLOTS  # known, and all but the last computed; 0: not started
        self.slots: list[int] = []
        self.next_block = NO_ONES_BLOCK + 1
        self.shared: dict[int, tuple[int, int, int]] = {}  # by twin: place in its table, blocks

    def blocks(self) -> list[int]:
        self.next_block += BLOCKS_A_START
        return list(range(self.next_block - BLOCKS_A_START, self.next_block))

    def key(self, slot: int) -> SamplingKey:
        return [
            SamplingKey(0.0, 1.0, slot, 0),
            SamplingKey(0.7, 0.9, slot, 0, presence_penalty=0.5),
            SamplingKey(1.0, 1.0, slot, 0, num_logprobs=2),
        ][slot % 3]

    def next(self) -> StepBatch:
        """The next batch; some will be refused."""
        draw = self.random
        rows: list[tuple[int, int, int]] = []
        starts: list[SlotStart] = []
        released: list[int] = []
        given_tokens: list[list[int]] = []
        if draw.random() < 0.4:  # else the same again, as a run of decode steps
            self.slots = draw.sample(range(NUM_SLOTS), draw.randint(0, NUM_SLOTS))
        for slot in self.slots:
            known = self.tokens[slot]
            given: list[int] = []
            if not known or known > 36 or draw.random() < 0.15:
                length = draw.randint(1, 6)
                prompt = [draw.randint(65, 90) for _ in range(length)]
                starts.append(start(slot, prompt, self.blocks(), self.key(slot)))
                rows.append((slot, 0, length))
                self.tokens[slot] = length + 1
            elif draw.random() < 0.08:
                starts.append(self.corrected(slot))
                self.tokens[slot] = known + 1
                rows.append((slot, known - 1, 1))
            elif draw.random() < 0.08:
                released.append(slot)
                self.tokens[slot] = 0
                continue
            else:
                given = [draw.randint(65, 90)] * (draw.random() < 0.04)
                rows.append((slot, known - 1, 1 + len(given)))
                self.tokens[slot] = known + 1 + len(given)
            given_tokens.append(given)
        asked = [row for row in range(len(rows)) if draw.random() < 0.04]
        batch = step(
            rows,
            starts=starts,
            released=released,
            tokens=given_tokens if any(given_tokens) else (),
            prompt_logprobs=asked,
            digest_blocks=[NO_ONES_BLOCK] * (bool(rows) and draw.random() < 0.03),
        )
        return self.spoilt(self.forked(batch))

    def corrected(self, slot: int) -> SlotStart:
        """Start a slot with all that it has but its newest token, and another one."""
        prefix = SlotPrefix(slot, self.tokens[slot] - 1, BLOCKS_A_START)
        return SlotStart(slot, column([33]), 1, column([]), self.key(slot), prefix)

    def forked(self, batch: StepBatch) -> StepBatch:
        """Let a prompt feed a second slot, whose table is its own from the next block on."""
        idle = [s for s in range(NUM_SLOTS) if s not in [*batch.slots, *batch.released]]
        starts = [item.slot for item in batch.starts]
        if not idle or not starts or self.random.random() < 0.5:
            return batch
        slot, twin = starts[0], idle[0]
        (first,) = (item for item in batch.starts if item.slot == slot)
        num_shared = -(-first.token_ids.size // LIMITS.block_size)
        own = self.blocks()
        table = [*first.block_ids[:num_shared].tolist(), *own[num_shared:]]
        second = start(twin, first.token_ids.tolist(), table, self.key(twin))
        if self.random.random() < 0.5:
            prefix = SlotPrefix(slot, self.random.randint(0, first.num_tokens), num_shared - 1)
            second = replace(
                second,
                token_ids=first.token_ids[prefix.num_tokens :],
                block_ids=second.block_ids[prefix.num_blocks :],
                prefix=prefix,
            )
        row = batch.slots.tolist().index(slot)
        sampled = np.append(batch.sampled_rows, row)
        targets = np.append(batch.slots[batch.sampled_rows], twin)
        self.tokens[twin] = self.tokens[slot]
        self.shared[twin] = (num_shared - 1, table[num_shared - 1], own[0])
        return replace(
            batch, starts=[*batch.starts, second], sampled_rows=sampled, sampled_slots=targets
        )

    def spoilt(self, batch: StepBatch) -> StepBatch:
        """Copy the block that a twin shares, before it writes there; make some mistakes."""
        draw = self.random
        started = {item.slot for item in batch.starts}
        twins = [slot for slot in batch.slots.tolist() if slot in self.shared]
        shared = [(twin, self.shared.pop(twin)) for twin in twins]
        copies = [TableCopy(twin, *places) for twin, places in shared if twin not in started]
        if copies:
            batch = replace(batch, copies=copies)
        if draw.random() < 0.05 and batch.slots.size:
            positions = batch.positions.copy()
            positions[draw.randrange(positions.size)] += draw.choice([-1, 1])
            return replace(batch, positions=positions)
        if draw.random() < 0.05 and batch.sampled_rows.size > 1 and not batch.sampled_slots.size:
            return replace(batch, sampled_rows=batch.sampled_rows[1:])
        return batch


def plain(answer: Answer) -> list[object]:
    """What a controller sees of an answer, but for its timings."""
    assert isinstance(answer, StepReply)
    step_id, refusal, result = answer.header.step_id, answer.refusal, answer.result
    if refusal is not None:
        return [step_id, type(refusal), refusal.field, refusal.message, answer.expected_step]
    assert result is not None
    return [
        step_id,
        [(failure.row, failure.reason) for failure in result.row_failures],
        result.sampled_token_ids.tolist(),
        [
            (item.row, item.first_position, item.logprobs.tolist())
            for item in result.prompt_logprobs
        ],
        [(item.sample, item.logprob) for item in result.sample_logprobs],
        list(result.block_digests),
    ]


def without_meaningless_tokens(batch: StepBatch, seen: list[object]) -> list[object]:
    """Put 0 for the samples of failed rows."""
    if isinstance(seen[1], type):
        return seen
    failed = {row for row, _ in seen[1]}  # type: ignore[attr-defined]
    tokens = [
        0 if row in failed else token
        for row, token in zip(batch.sampled_rows.tolist(), seen[2], strict=True)  # type: ignore[call-overload]
    ]
    return [*seen[:2], tokens, *seen[3:]]


class Sides:
    """Both planes, and what they answered."""

    def __init__(self) -> None:
        size = {"num_blocks": LIMITS.num_blocks, "block_size": LIMITS.block_size}
        self.in_turn, self.ahead = InTurn(**size), Ahead(**size)
        self.ledgers = [SessionLedger(), SessionLedger()]
        self.answers: list[list[Answer]] = [[], []]
        self.runners = [
            StepsInTurn(self.in_turn, SlotTable(LIMITS), self.ledgers[0]),
            StepPipeline(self.ahead, SlotTable(LIMITS), self.ledgers[1], lambda _: None),
        ]
        self.open()

    def open(self) -> None:
        sessions = {ledger.open("test", take_over=True).session for ledger in self.ledgers}
        (self.session,) = sessions  # both count alike

    def send(self, side: int, batch: StepBatch, step_id: int) -> None:
        header = StepHeader(self.session, self.ledgers[side].epoch, step_id, 0)
        self.runners[side].take(Work(header, batch, self.answers[side].append, 0))


def compare(seed: int, num_steps: int) -> Sides:
    draw, controller, sides = random.Random(seed), Controller(seed), Sides()
    pipeline = sides.runners[1]
    assert isinstance(pipeline, StepPipeline)
    batches: list[StepBatch] = []
    step_id = 0
    for _ in range(num_steps):
        if draw.random() < 0.03:
            pipeline.finish_all()  # else a late refusal names the step that the new session expects
            sides.open()
            step_id = 0
        step_id += 1
        known, shared = controller.tokens.copy(), controller.shared.copy()
        batch = controller.next()
        batches.append(batch)
        sides.in_turn.fails = draw.random() < 0.04
        sides.in_turn.has_failed = False
        sides.send(0, batch, step_id)
        answer = sides.answers[0][-1]
        assert isinstance(answer, StepReply)
        if isinstance(answer.refusal, InvalidBatch):  # and nothing has changed
            controller.tokens, controller.shared = known, shared
        # A step of dead rows alone is not run in turn, so it cannot fail there.
        how = draw.choice(["at launch", "when done"])
        sides.ahead.fails = how if sides.in_turn.has_failed else ""
        while pipeline.unanswered() and draw.random() < 0.3:
            pipeline.finish_oldest()
        sides.send(1, batch, step_id)
    pipeline.finish_all()
    seen = [
        [
            without_meaningless_tokens(batch, plain(answer))
            for batch, answer in zip(batches, answers, strict=True)
        ]
        for answers in sides.answers
    ]
    for one, other in zip(*seen, strict=True):
        assert one == other
    return sides


@pytest.mark.wide
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), num_steps=st.integers(2, 30))
def test_every_answer_is_that_of_batches_run_in_turn(seed, num_steps):
    compare(seed, num_steps)


@pytest.mark.slow
@settings(max_examples=20_000, deadline=None)
@given(seed=st.integers(0, 2**32), num_steps=st.integers(2, 60))
def test_every_answer_of_many_is_that_of_batches_run_in_turn(seed, num_steps):
    compare(seed, num_steps)


def test_the_comparison_sees_steps_ahead_waits_refusals_and_rows_that_fail_late(
    monkeypatch: pytest.MonkeyPatch,
):
    waits = []
    check = SampleAwaited.__init__

    def note(self: SampleAwaited, *args: object) -> None:
        waits.append(1)
        check(self, *args)

    monkeypatch.setattr(SampleAwaited, "__init__", note)
    sides = [compare(seed, 30) for seed in range(12)]
    answers = [plain(answer) for side in sides for answer in side.answers[1]]
    refused = [answer for answer in answers if isinstance(answer[1], type)]
    reasons = [
        reason
        for answer in answers
        if answer not in refused
        for _, reason in answer[1]  # type: ignore[attr-defined]
    ]
    assert sum(side.ahead.num_ahead for side in sides) > 30
    assert len({answer[1] for answer in refused}) > 1
    assert set(reasons) == set(RowFailureReason)
    assert waits
