"""A draft model guesses what it would say, whatever has become of its blocks, and harms nobody."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from compute_plane.errors import DeviceLostError
from compute_plane.executor.draft_model import (
    FEW_TOKENS,
    FIRST_REST,
    MOST_ROWS,
    DraftLimits,
    DraftModel,
    KnownText,
)
from compute_plane.executor.interface import (
    ExecutionBatch,
    ExecutionOutput,
    SampleLogprobs,
    SamplingRow,
    TopLogprobs,
)
from compute_plane.executor.simulated import VOCAB_SIZE, SimulatedExecutor, draw
from compute_plane.executor.token_layout import PoolShape, lay_out_tokens
from planes.errors import ExecutionError

BLOCK_SIZE, NUM_BLOCKS = 4, 24
LIMITS = DraftLimits(
    vocab_size=VOCAB_SIZE,
    context_length=60,
    block_size=BLOCK_SIZE,
    num_blocks=NUM_BLOCKS,
    max_tokens=64,
    least_chance=0.0,
)
POOL = PoolShape(NUM_BLOCKS + MOST_ROWS, BLOCK_SIZE, VOCAB_SIZE)
NO_OTHERS = TopLogprobs(np.zeros((1, 0), np.int32), np.zeros((1, 0), np.float32))
GREEDY = SamplingRow(0.0, 1.0, 0, 0, 0)


class WatchedExecutor(SimulatedExecutor):
    """Keeps the batches it ran; all its tokens are as likely as `likelihood` says."""

    def __init__(self) -> None:
        super().__init__(num_blocks=NUM_BLOCKS + MOST_ROWS, block_size=BLOCK_SIZE)
        self.batches: list[ExecutionBatch] = []
        self.likelihood = 1.0
        self.fault: Exception | None = None
        self.failed_rows: dict[int, str] = {}

    def execute(self, batch: ExecutionBatch) -> ExecutionOutput:
        if self.fault is not None:
            raise self.fault
        self.batches.append(batch)
        lay_out_tokens(batch, POOL)  # what executors with a device refuse
        output = super().execute(batch)
        logprob = math.log(self.likelihood)
        logprobs = [SampleLogprobs(k, logprob, NO_OTHERS) for k in range(len(batch.sampling))]
        return replace(output, sample_logprobs=logprobs, failed_rows=self.failed_rows)


def model(limits: DraftLimits = LIMITS) -> tuple[WatchedExecutor, DraftModel]:
    executor = WatchedExecutor()
    return executor, DraftModel(executor, limits)


def text(
    tokens: Sequence[int], table: Sequence[int], most: int = 3, slot: int = 0, greedy: bool = True
) -> KnownText:
    return KnownText(
        slot, np.array(tokens, np.int32), np.array(table, np.int32), is_greedy=greedy, most=most
    )


def said(tokens: Sequence[int], count: int) -> list[int]:
    """What the simulated model says behind some tokens."""
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(draw(np.array(tokens, np.int32), GREEDY))
    return tokens[len(tokens) - count :]


def num_computed(executor: WatchedExecutor) -> list[int]:
    """How many tokens each step computed so far, which are forgotten."""
    counts = [len(batch.input_tokens) for batch in executor.batches]
    executor.batches.clear()
    return counts


def test_it_guesses_what_it_would_say_as_far_as_the_block_goes() -> None:
    _, drafter = model()
    for length in range(1, 14):
        tokens = list(range(65, 65 + length))
        [guesses] = drafter.guess([text(tokens, range(4), most=9)])
        assert guesses == said(tokens, -length % BLOCK_SIZE)


def test_no_more_is_guessed_than_wanted() -> None:
    _, drafter = model()
    assert drafter.guess([text([65], [0], most=2)]) == [said([65], 2)]
    assert drafter.guess([text([65], [0], most=0)]) == [[]]


def test_what_was_computed_is_not_computed_again_and_right_guesses_were() -> None:
    executor, drafter = model()
    tokens = list(range(65, 74))  # nine: one in the third block
    [guesses] = drafter.guess([text(tokens, [5, 6, 7])])
    assert num_computed(executor) == [9, 1, 1]
    # All were right, and the token behind them fills the block: nothing to guess in it.
    tokens += [*guesses, 80, 81]  # the second of these is in a block of its own
    [more] = drafter.guess([text(tokens, [5, 6, 7, 8])])
    assert more == said(tokens, 2)
    assert num_computed(executor) == [3, 1]  # the last guess, and the two behind it


def test_wrong_guesses_are_written_over() -> None:
    executor, drafter = model()
    tokens = list(range(65, 70))
    [guesses] = drafter.guess([text(tokens, [0, 1])])
    num_computed(executor)
    tokens += [guesses[0], 99]
    assert drafter.guess([text(tokens, [0, 1])]) == [said(tokens, 1)]
    assert num_computed(executor) == [1]


def test_a_block_that_another_text_had_meanwhile_is_computed_anew() -> None:
    executor, drafter = model()
    tokens = list(range(65, 74))
    drafter.guess([text(tokens, [0, 1, 2])])
    drafter.guess([text(range(80, 86), [3, 1], slot=1)])
    num_computed(executor)
    assert drafter.guess([text(tokens, [0, 1, 2])]) == [said(tokens, 3)]
    assert num_computed(executor)[0] == 5  # the block in the middle, and what comes behind it


def test_a_block_that_was_copied_is_computed_anew() -> None:
    executor, drafter = model()
    tokens = list(range(65, 75))
    drafter.guess([text(tokens, [0, 1, 2])])
    num_computed(executor)
    assert drafter.guess([text(tokens, [0, 1, 9])]) == [said(tokens, 2)]
    assert num_computed(executor)[0] == 2


def test_a_sample_that_begins_a_block_is_guessed_behind_before_it_has_the_block() -> None:
    executor, drafter = model()
    tokens, others = list(range(65, 74)), list(range(75, 80))
    found = drafter.guess([text(tokens, [0, 1]), text(others, [2], slot=1)])
    assert found == [said(tokens, 3), said(others, 3)]
    num_computed(executor)
    # The block that it gets is another one.
    tokens += found[0]
    tokens.append(80)
    assert drafter.guess([text(tokens, [0, 1, 7])]) == [said(tokens, 3)]
    assert num_computed(executor)[0] == 5


def test_a_long_text_is_read_a_part_at_a_time_and_does_not_keep_others_from_their_guesses() -> None:
    executor, drafter = model(replace(LIMITS, max_tokens=20))
    long, short = [65 + i % 50 for i in range(45)], [66, 67]
    texts = [text(long, range(12)), text(short, [20], slot=1)]
    assert drafter.guess(texts) == [[], said(short, 2)]
    assert num_computed(executor) == [20, 1]
    assert drafter.guess(texts[:1]) == [[]]
    assert num_computed(executor) == [20]
    assert drafter.guess(texts[:1]) == [said(long, 3)]
    assert num_computed(executor) == [7, 1, 1]


def test_many_tokens_are_computed_as_a_prompt_and_few_as_generated_ones() -> None:
    executor, drafter = model()
    tokens = list(range(65, 65 + FEW_TOKENS + 2))
    drafter.guess([text(tokens, range(4)), text([70], [9], slot=1)])
    first, *others = executor.batches
    by_length = dict(
        zip(first.query_lens.tolist(), zip(first.is_prefill, first.prompt_lens, strict=True),
            strict=True)
    )  # fmt: skip
    assert by_length == {len(tokens): (True, len(tokens)), 1: (False, 0)}
    assert not any(batch.is_prefill.any() or batch.prompt_lens.any() for batch in others)


def test_more_texts_than_it_has_spare_blocks_for_get_no_guesses() -> None:
    _, drafter = model(replace(LIMITS, max_tokens=999))
    texts = [text([65 + i], [], slot=i) for i in range(MOST_ROWS + 2)]
    found = drafter.guess(texts)
    assert found == [*(said([65 + i], 3) for i in range(MOST_ROWS)), [], []]


def test_texts_that_are_none_for_it_are_left_alone() -> None:
    executor, drafter = model(replace(LIMITS, context_length=10, vocab_size=100))
    strange, long = text([65, 100], [0]), text([65] * 10, [1, 2, 3], slot=1)
    longer, gone = text([65] * 13, range(4), slot=2), text([65] * 9, [4], slot=3)
    assert drafter.guess([strange, long, longer, gone]) == [[], [], [], []]
    assert executor.batches == []
    nearly = text([65] * 9, [1, 2, 3], slot=1)
    assert [len(guesses) for guesses in drafter.guess([nearly])] == [1]


def test_tokens_that_the_engine_has_not_are_no_guesses() -> None:
    tokens = [65]
    first, second = said(tokens, 2)
    assert first != second
    _, drafter = model(replace(LIMITS, vocab_size=max(first, second)))
    expected = [first] if first < second else []
    assert drafter.guess([text(tokens, [0])]) == [expected]


def test_it_stops_where_all_guesses_together_are_not_likely_enough() -> None:
    counts = {}
    for least in (0.9, 0.5, 0.1):
        executor, drafter = model(replace(LIMITS, least_chance=least))
        executor.likelihood = 0.65  # 0.42 for two of them, 0.27 for three
        counts[least] = [len(found) for found in drafter.guess([text([65], [0])])]
    assert counts == {0.9: [0], 0.5: [1], 0.1: [3]}


@pytest.mark.parametrize("greedy", [True, False])
def test_what_became_of_guesses_decides_how_many_follow(greedy: bool) -> None:
    """Of a likelihood of 0.65 two are guessed; of those that are always right, all; of those that
    never are, one now and then."""
    for is_right in (True, False):
        executor, drafter = model(replace(LIMITS, least_chance=0.4))
        executor.likelihood = 0.65
        counts = []
        for number in range(40):
            begun = [65 + number % 20]
            [guesses] = drafter.guess([text(begun, [0], greedy=greedy)])
            counts.append(len(guesses))
            behind = guesses if is_right else [200] * len(guesses)
            drafter.guess([text([*begun, *behind], [0], most=0, greedy=greedy)])
        assert counts[0] == 2
        if is_right:
            assert counts[-1] == 3
        else:
            assert set(counts[-20:]) == {0, 1}
            assert sum(counts[-20:]) < 10
        # Of texts sampled otherwise nothing is known.
        assert len(drafter.guess([text([65], [0], greedy=not greedy)])[0]) == 2


def test_what_a_slot_says_of_another_text_counts_for_nothing() -> None:
    executor, drafter = model(replace(LIMITS, least_chance=0.4))
    executor.likelihood = 0.65
    for number in range(40):
        drafter.guess([text([65 + number % 20], [0])])
        drafter.guess([text([99, 200, 200, 200], [1], most=0)])
    assert len(drafter.guess([text([65], [0])])[0]) == 2


def test_a_row_that_comes_to_no_number_has_no_guesses_and_the_others_have() -> None:
    executor, drafter = model()
    executor.failed_rows = {0: "not finite"}
    texts = [text([65], [0]), text([66, 67], [1], slot=1)]
    first, second = drafter.guess(texts)
    assert first == []
    assert second == said([66, 67], 1)  # the step behind it fails, too


def test_texts_that_share_blocks_are_read_one_after_the_other_and_shared_blocks_once() -> None:
    executor, drafter = model()
    prompt = list(range(65, 77))  # three blocks
    texts = [
        text([*prompt, 90 + slot, *[80] * slot], [0, 1, 2, 3 + slot], slot=slot)
        for slot in range(3)
    ]
    found = drafter.guess(texts)
    expected = [said(each.tokens.tolist(), 3 - slot) for slot, each in enumerate(texts)]
    assert found == expected
    assert num_computed(executor)[:2] == [13, 2 + 3]


def test_of_texts_in_the_same_block_one_is_guessed_on_and_nothing_breaks() -> None:
    """The engine gives each a copy of its own before it is written."""
    _, drafter = model()
    first, second = drafter.guess([text([65, 66], [0]), text([65, 66], [0], slot=1)])
    assert first == said([65, 66], 2)
    assert second == first[: len(second)]
    assert drafter.guess([text([67], [1])]) == [said([67], 3)]


def test_a_draft_model_that_fails_rests_twice_as_long_each_time_in_a_row() -> None:
    executor, drafter = model()

    def num_silent(most: int) -> int:
        return next(i for i in range(most) if drafter.guess([text([65], [0])]) != [[]])

    for rest in (FIRST_REST, 2 * FIRST_REST):
        executor.fault = ExecutionError("no more")
        assert drafter.guess([text([65], [0])]) == [[]]
        for _ in range(rest):
            assert drafter.guess([text([65], [0])]) == [[]]
    executor.fault = None
    assert num_silent(9) == 0
    assert executor.batches
    executor.fault = ExecutionError("once more")
    assert drafter.guess([text([66], [0])]) == [[]]
    executor.fault = None
    assert num_silent(99) == FIRST_REST  # what went well was the end of the row


def test_a_lost_device_is_the_planes_matter() -> None:
    executor, drafter = model()
    executor.fault = DeviceLostError("gone")
    with pytest.raises(DeviceLostError):
        drafter.guess([text([65], [0])])


@pytest.mark.spread(14)
@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_to_blocks_guesses_are_what_the_model_says(seed: int) -> None:
    """Texts grow, end, share blocks, move to others; blocks go from one to the next."""
    draws = Random(seed)
    _, drafter = model(replace(LIMITS, max_tokens=draws.choice([8, 64])))
    texts: dict[int, tuple[list[int], list[int]]] = {}

    def free() -> list[int]:
        held = {block for _, table in texts.values() for block in table}
        return [block for block in range(NUM_BLOCKS) if block not in held]

    num_right = 0
    for _ in range(120):
        slot = draws.randrange(4)
        tokens, table = texts.pop(slot, ([], []))
        what = draws.random()
        if what < 0.1 or not tokens or len(tokens) > 40:
            tokens, table = [draws.randrange(65, 69) for _ in range(draws.randint(1, 9))], []
        elif what < 0.2:
            table = []  # preempted
        elif what < 0.3 and texts:
            others, their_table = draws.choice(list(texts.values()))
            num_shared = len(others) // BLOCK_SIZE
            tokens, table = [*others], their_table[:num_shared]
        else:
            right = said(tokens, 5)
            tokens = [*tokens, *right[: draws.randint(0, 4)], draws.randrange(65, 69)]
        num_blocks = -(-(len(tokens) - draws.randint(0, 1)) // BLOCK_SIZE)
        rest = [block for block in free() if block not in table]
        draws.shuffle(rest)
        table = [*table, *rest][:num_blocks]
        if len(table) < num_blocks:
            continue
        texts[slot] = (tokens, table)
        asked = draws.sample(sorted(texts), draws.randint(1, len(texts)))
        most = draws.randint(0, 4)
        found = drafter.guess([text(*texts[number], most=most, slot=number) for number in asked])
        for number, guesses in zip(asked, found, strict=True):
            known = texts[number][0]
            expected = said(known, min(most, -len(known) % BLOCK_SIZE))
            assert guesses == expected[: len(guesses)]
            num_right += len(guesses)
    assert num_right > 100
