"""Steps in which every row decodes take a short way through the CPU executor; nobody can tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from compute_plane.cpu.executor import CpuExecutor
from compute_plane.executor.batch_checks import SlotLimits
from compute_plane.executor.interface import ExecutionBatch, ExecutionOutput, LogitBias
from compute_plane.executor.slots import SlotTable
from compute_plane.executor.step import RowConstraint, SamplingKey, SlotStart, StepBatch
from planes.errors import ValidationError
from tests.compute_plane.executor.slot_batches import column, step
from tests.compute_plane.executor.tiny_adapters import tiny_adapter
from tests.compute_plane.executor.tiny_llama import pool_for, tiny_executor, tiny_spec
from tests.compute_plane.executor.tiny_weights import tiny_weights

SPEC = replace(tiny_spec(), context_length=2048)
WEIGHTS = tiny_weights(SPEC)
NUM_BLOCKS, BLOCK_SIZE = 400, 4
LIMITS = SlotLimits(
    max_slots=8,
    max_rows=8,
    max_tokens=2048,
    block_size=BLOCK_SIZE,
    num_blocks=NUM_BLOCKS,
    vocab_size=SPEC.vocab_size,
    context_length=SPEC.context_length,
    num_adapters=2,
)
ADAPTERS = [tiny_adapter(SPEC, 1), tiny_adapter(SPEC, 2)]
DRAWN = SamplingKey(temperature=0.8, top_p=0.9, seed=7, sample_index=0, top_k=20)
GREEDY = SamplingKey(temperature=0.0, top_p=1.0, seed=0, sample_index=0)


class Side:
    """An executor behind a slot table; `taken`: of each step, whether it went the short way."""

    def __init__(self, executor: CpuExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
        self.executor = executor
        self.table = SlotTable(LIMITS)
        self.taken: list[bool] = []
        self.last: ExecutionBatch | None = None
        take = executor._decode.take

        def watched(batch: ExecutionBatch) -> object:
            answers = take(batch)
            self.taken.append(answers is not None)
            return answers

        monkeypatch.setattr(executor._decode, "take", watched)

    def run(self, batch: StepBatch) -> ExecutionOutput:
        prepared = self.table.prepare(batch)
        assert prepared.batch is not None
        self.last = prepared.batch
        output = self.executor.execute(prepared.batch)
        self.table.complete(prepared, output)
        return output


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Side, Side]]:
    """One that knows the short way, and one that does not."""
    pools = [pool_for(SPEC, NUM_BLOCKS, BLOCK_SIZE) for _ in range(2)]
    with (
        tiny_executor(SPEC, WEIGHTS, pools[0], adapters=ADAPTERS) as short,
        tiny_executor(SPEC, WEIGHTS, pools[1], adapters=ADAPTERS) as ordinary,
    ):
        monkeypatch.setattr(ordinary._decode, "take", lambda _: None)
        yield Side(short, monkeypatch), Side(ordinary, monkeypatch)


class Rows:
    """Sequences that decode together, and the blocks they take."""

    def __init__(self) -> None:
        self.lengths: dict[int, int] = {}
        self._blocks = iter(range(NUM_BLOCKS))

    def joins(self, slot: int, length: int, sampling: SamplingKey = GREEDY) -> SlotStart:
        """A sequence's start; drawn tokens, other ones in every slot."""
        tokens = np.random.default_rng(slot).integers(0, SPEC.vocab_size, length)
        blocks = [next(self._blocks) for _ in range(-(-length // BLOCK_SIZE))]
        self.lengths[slot] = length
        return SlotStart(slot, column(tokens.tolist()), length, column(blocks), sampling)

    def joins_behind(self, other: SlotStart, common: int, slot: int, own: int) -> SlotStart:
        """The same of one that begins with tokens of another, in its blocks: whole blocks."""
        start = self.joins(slot, own)
        self.lengths[slot] = common + own
        return replace(
            start,
            token_ids=np.concatenate([other.token_ids[:common], start.token_ids]),
            num_prompt_tokens=common + own,
            block_ids=np.concatenate([other.block_ids[: common // BLOCK_SIZE], start.block_ids]),
        )

    def begin(self, starts: Sequence[SlotStart]) -> StepBatch:
        """All of the prompts of those that join."""
        return step([(s.slot, 0, len(s.token_ids)) for s in starts], starts=starts)

    def decode(self) -> StepBatch:
        """One token more of each."""
        rows = [(slot, length, 1) for slot, length in self.lengths.items()]
        blocks = [
            [next(self._blocks)] if length % BLOCK_SIZE == 0 else []
            for length in self.lengths.values()
        ]
        for slot in self.lengths:
            self.lengths[slot] += 1
        return step(rows, new_blocks=blocks if any(blocks) else ())


def tokens_of(side: Side, batches: Sequence[StepBatch]) -> list[list[int]]:
    return [side.run(batch).next_tokens.tolist() for batch in batches]


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_a_run_of_steps_gives_the_tokens_of_the_ordinary_way(sides, num_rows, sampling):
    rows = Rows()
    starts = [rows.joins(slot, 3 + slot, replace(sampling, seed=slot)) for slot in range(num_rows)]
    batches = [rows.begin(starts), *(rows.decode() for _ in range(30))]
    short, ordinary = (tokens_of(side, batches) for side in sides)
    assert short == ordinary
    assert sides[0].taken == [False, *[True] * 30]


def test_rows_that_join_and_leave_begin_another_run(sides):
    rows = Rows()
    batches = [rows.begin([rows.joins(0, 6, DRAWN)]), *(rows.decode() for _ in range(5))]
    batches += [rows.begin([rows.joins(1, 9)]), *(rows.decode() for _ in range(6))]
    del rows.lengths[0]
    batches += [replace(rows.decode(), released=column([0])), *(rows.decode() for _ in range(6))]
    short, ordinary = (tokens_of(side, batches) for side in sides)
    assert short == ordinary
    assert sides[0].taken == [False, *[True] * 5, False, *[True] * 13]


def test_rows_with_adapters_take_it_too_and_runs_with_others_begin_anew(sides):
    rows = Rows()
    starts = [replace(rows.joins(slot, 5), adapter=slot % 3) for slot in range(5)]
    batches = [rows.begin(starts), *(rows.decode() for _ in range(9))]
    again = [replace(starts[0], adapter=2), replace(rows.joins(6, 4), adapter=0)]
    rows.lengths[0] = 5
    batches += [rows.begin(again)]
    batches += [rows.decode() for _ in range(5)]
    short, ordinary = (tokens_of(side, batches) for side in sides)
    assert short == ordinary
    assert sides[0].taken == [False, *[True] * 9, False, *[True] * 5]
    assert sides[0].last is not None
    assert sides[0].last.adapters.tolist() == [2, 1, 2, 0, 1, 0]


def test_long_contexts_are_shared_among_threads_as_on_the_ordinary_way(sides, monkeypatch):
    rows = Rows()
    batches = [rows.begin([rows.joins(0, 250)]), *(rows.decode() for _ in range(12))]
    items: list[int] = []
    headers = sides[0].executor._decode._headers
    describe = headers.describe_tokens

    def described(index, first_token, piece, num_kv_heads):
        items.append(len(piece.attention.items))
        describe(index, first_token, piece, num_kv_heads)

    monkeypatch.setattr(headers, "describe_tokens", described)
    short, ordinary = (tokens_of(side, batches) for side in sides)
    assert short == ordinary
    assert {1, 2} == set(items)  # it went from one segment to two


def test_a_prefix_in_common_is_computed_together_as_on_the_ordinary_way(sides, monkeypatch):
    rows = Rows()
    first = rows.joins(0, 530)
    others = [
        rows.joins_behind(first, common, slot, own)
        for slot, common, own in ((1, 512, 3), (2, 256, 250), (3, 256, 9))
    ]
    behind = [
        (start.slot, rows.lengths[start.slot] - own, own)
        for start, own in zip(others, (3, 250, 9), strict=True)
    ]
    batches = [
        rows.begin([first]),
        step(behind, starts=others),
        *(rows.decode() for _ in range(12)),
    ]
    shared: list[list[int]] = []
    plans: list[object] = []
    headers = sides[0].executor._decode._headers
    describe = headers.describe_tokens

    def described(index, first_token, piece, num_kv_heads):
        plans.append(piece.attention)
        shared.append([count for count in piece.attention.items[:, 1].tolist() if count > 1])
        describe(index, first_token, piece, num_kv_heads)

    monkeypatch.setattr(headers, "describe_tokens", described)
    short, ordinary = (tokens_of(side, batches) for side in sides)
    assert short == ordinary
    assert sides[0].taken == [False, False, *[True] * 12]
    assert shared
    assert all(counts == [4, 2] for counts in shared)
    # Rows take blocks all the time; one ends a segment and begins the next.
    assert len({id(plan) for plan in plans}) == len(plans) == 3


@pytest.mark.parametrize(
    "sampling",
    [
        replace(DRAWN, repetition_penalty=1.3),
        replace(GREEDY, num_logprobs=2),
        replace(GREEDY, logit_bias=LogitBias(column([5]).astype(np.int32), np.float32([3.0]))),
    ],
    ids=["penalty", "log-probabilities", "bias"],
)
def test_samples_that_ask_for_more_are_answered_as_on_the_ordinary_way(sides, sampling):
    rows = Rows()
    starts = [rows.joins(0, 6, sampling), rows.joins(1, 3, DRAWN)]
    batches = [rows.begin(starts), *(rows.decode() for _ in range(12))]
    for batch in batches:
        short, ordinary = (side.run(batch) for side in sides)
        assert short.next_tokens.tolist() == ordinary.next_tokens.tolist()
        assert len(short.sample_logprobs) == (sampling.num_logprobs is not None)
        for mine, theirs in zip(short.sample_logprobs, ordinary.sample_logprobs, strict=True):
            assert (mine.sample, mine.logprob) == (theirs.sample, theirs.logprob)
            assert mine.top.token_ids.tolist() == theirs.top.token_ids.tolist()
    assert sides[0].taken == [False, *[True] * 12]


def test_rows_of_which_some_are_not_sampled_go_the_ordinary_way(sides):
    rows = Rows()
    batches = [rows.begin([rows.joins(0, 6), rows.joins(1, 7)]), rows.decode()]
    batches += [replace(rows.decode(), sampled_rows=column([1, 0]))]
    short, ordinary = (tokens_of(side, batches) for side in sides)
    assert short == ordinary
    assert sides[0].taken == [False, True, False]


def test_a_row_that_may_only_be_some_tokens_is_one_of_them_and_the_run_goes_on(sides):
    rows = Rows()
    only_nine = np.zeros(-(-SPEC.vocab_size // 8), dtype=np.uint8)
    only_nine[1] = 1 << 1
    batches = [rows.begin([rows.joins(0, 6)]), rows.decode(), rows.decode()]
    batches += [replace(rows.decode(), constraints=[RowConstraint(0, only_nine)])]
    batches += [rows.decode(), rows.decode()]
    short, ordinary = (tokens_of(side, batches) for side in sides)
    assert short == ordinary
    assert short[3] == [9]
    assert sides[0].taken == [False, *[True] * 5]


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("input_tokens", lambda b: {"input_tokens": b.input_tokens + SPEC.vocab_size}),
        ("positions", lambda b: {"positions": b.positions + 1}),
        ("block_tables", lambda b: {"block_tables": b.block_tables + NUM_BLOCKS}),
        ("adapters", lambda b: {"adapters": column([3] * len(b.query_lens)).astype(np.int32)}),
        ("seq_lens", lambda b: {"seq_lens": b.seq_lens + 64 * BLOCK_SIZE}),
        ("query_lens", lambda b: {"query_lens": b.query_lens * 0}),
        ("sampled_rows", lambda b: {"sampled_rows": b.sampled_rows + 5}),
    ],
)
def test_a_wrong_step_in_a_run_is_refused_by_field_and_the_run_goes_on(
    sides, field: str, change: Callable[[ExecutionBatch], dict[str, np.ndarray]]
):
    rows = Rows()
    batches = [rows.begin([rows.joins(0, 5), rows.joins(1, 6)]), rows.decode()]
    short, ordinary = sides
    assert tokens_of(short, batches) == tokens_of(ordinary, batches)
    assert short.last is not None
    with pytest.raises(ValidationError) as refusal:
        short.executor.execute(replace(short.last, **change(short.last)))
    assert refusal.value.field == field
    more = [rows.decode() for _ in range(3)]
    assert tokens_of(short, more) == tokens_of(ordinary, more)


def test_a_row_whose_logits_are_not_finite_fails_alone(sides):
    rows = Rows()
    batches = [rows.begin([rows.joins(0, 5), rows.joins(1, 6)]), rows.decode(), rows.decode()]
    short, ordinary = sides
    assert tokens_of(short, batches) == tokens_of(ordinary, batches)
    for side in sides:
        side.executor._pool.data[0] = 0xFF  # NaN, in the first block of the first row
    after = rows.decode()
    answers = [side.run(after) for side in sides]
    assert [list(answer.failed_rows) for answer in answers] == [[0], [0]]
    assert answers[0].next_tokens[1] == answers[1].next_tokens[1]
    assert short.taken[-1]


@pytest.mark.parametrize("tells_apart", [False, True])
def test_a_prompt_of_one_token_is_no_decoded_one_where_they_are_computed_otherwise(
    sides, tells_apart, monkeypatch
):
    monkeypatch.setattr(sides[0].executor._decode, "_tells_prompts_apart", tells_apart)
    rows = Rows()
    batches = [rows.begin([rows.joins(0, 1)]), rows.decode(), rows.decode()]
    short, ordinary = (tokens_of(side, batches) for side in sides)
    assert short == ordinary
    assert sides[0].taken == [not tells_apart, True, True]
