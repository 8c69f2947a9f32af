from __future__ import annotations

import copy
import random

import numpy as np
import pytest

from compute_plane.errors import InvalidBatch
from compute_plane.executor.interface import ExecutionOutput
from compute_plane.executor.step import RowFailureReason, SamplingKey, TableCopy
from planes.errors import ExecutionError
from tests.compute_plane.executor.slot_batches import LIMITS, Plane, alone, start, step


def test_a_decode_row_continues_from_the_token_the_plane_sampled():
    plane = Plane()
    tokens = plane.tokens(step([(3, 0, 5)], starts=[start(3, b"hello", [7, 2])]))
    tokens += plane.tokens(step([(3, 5, 1)]))
    tokens += plane.tokens(step([(3, 6, 1)]))
    assert tokens == alone(b"hello", 3)
    assert plane.batches[1].input_tokens.tolist() == tokens[:1]


def test_new_blocks_are_appended_to_the_table():
    plane = Plane()
    tokens = plane.tokens(step([(0, 0, 4)], starts=[start(0, b"four", [9])]))
    tokens += plane.tokens(step([(0, 4, 1)], new_blocks=[[5]]))
    tokens += plane.tokens(step([(0, 5, 1)]))
    assert tokens == alone(b"four", 3)
    assert plane.batches[-1].block_tables[:, :2].tolist() == [[9, 5]]
    assert plane.batches[-1].seq_lens.tolist() == [6]


def test_a_prompt_may_be_computed_in_chunks_beside_decode_rows():
    plane = Plane()
    long_prompt = bytes(range(65, 65 + 20))
    tokens = plane.tokens(step([(0, 0, 3)], starts=[start(0, b"one", [0, 1, 2])]))
    tokens += plane.tokens(
        step(
            [(0, 3, 1), (1, 0, 9)],
            sampled=[0],
            starts=[start(1, long_prompt, [10, 11, 12, 13, 14, 15])],
        )
    )
    tokens += plane.tokens(step([(1, 9, 10), (0, 4, 1)], sampled=[1]))
    last = plane.tokens(step([(0, 5, 1), (1, 19, 1)]))
    assert tokens + last[:1] == alone(b"one", 4)
    assert last[1:] == alone(long_prompt, 1)
    assert plane.batches[2].is_prefill.tolist() == [True, False]


def test_a_started_slot_may_begin_after_a_cached_prefix():
    plane = Plane()
    plane.tokens(step([(0, 0, 6)], starts=[start(0, b"shared", [0, 1])]))
    tokens = plane.tokens(step([(1, 4, 3)], starts=[start(1, b"share+x", [0, 5])]))
    assert tokens == alone(b"share+x", 1)


def test_a_row_may_read_a_block_that_another_row_of_the_batch_fills():
    plane = Plane()
    starts = [start(0, b"prefixA", [0, 1]), start(1, b"prefixB", [0, 2])]
    tokens = plane.tokens(step([(0, 0, 7), (1, 4, 3)], starts=starts))
    assert tokens == alone(b"prefixA", 1) + alone(b"prefixB", 1)


def test_a_block_that_is_written_may_not_be_another_part_of_another_rows_sequence():
    plane = Plane()
    plane.tokens(step([(0, 0, 5)], starts=[start(0, b"first", [0, 1])]))
    with pytest.raises(InvalidBatch, match="block 0 is entry 0 of the table of row 0"):
        plane.run(step([(0, 5, 1), (1, 4, 2)], starts=[start(1, b"second", [9, 0])]))


def test_tokens_may_travel_with_a_row():
    plane = Plane()
    plane.tokens(step([(0, 0, 2)], sampled=[], starts=[start(0, b"ab", [0, 1])]))
    tokens = plane.tokens(step([(0, 2, 3)], tokens=[b"cde"]))
    assert tokens == alone(b"abcde", 1)


def test_a_restarted_slot_forgets_what_it_held():
    plane = Plane()
    plane.tokens(step([(0, 0, 3)], starts=[start(0, b"old", [0, 1])]))
    assert plane.tokens(step([(0, 0, 4)], starts=[start(0, b"news", [2, 3])])) == alone(b"news", 1)


def test_a_released_slot_is_unknown_and_may_be_released_again():
    plane = Plane()
    plane.tokens(step([(0, 0, 3)], starts=[start(0, b"abc", [0])]))
    plane.tokens(step(released=[0, 0, 5]))
    with pytest.raises(InvalidBatch, match=r"slots\[0\] 0 is not started"):
        plane.run(step([(0, 3, 1)]))


def test_slots_can_be_started_and_released_for_ever():
    plane = Plane()
    for round_number in range(50):
        prompt = f"text {round_number}".encode()
        starts = [start(slot, prompt, range(slot * 2, slot * 2 + 2)) for slot in range(8)]
        rows = [(slot, 0, len(prompt)) for slot in range(8)]
        assert plane.tokens(step(rows, starts=starts)) == alone(prompt, 1) * 8
        plane.tokens(step(released=range(round_number % 8)))


def test_one_prefill_row_feeds_several_samples_that_part_by_copy_on_write():
    plane = Plane()
    keys = [SamplingKey(1.0, 1.0, 7, index) for index in range(2)]
    starts = [start(slot, b"twins!", [0, 1], key) for slot, key in enumerate(keys)]
    batch = step([(0, 0, 6)], sampled=[0, 0], sampled_slots=[0, 1], starts=starts)
    first = plane.tokens(batch)
    with pytest.raises(InvalidBatch, match="written by rows 0 and 1"):
        plane.run(step([(0, 6, 1), (1, 6, 1)]))
    second = plane.tokens(step([(0, 6, 1), (1, 6, 1)], copies=[TableCopy(1, 1, 1, 9)]))
    third = plane.tokens(step([(1, 7, 1), (0, 7, 1)]))
    texts = list(zip(first, second, reversed(third), strict=True))
    assert texts == [tuple(alone(b"twins!", 3, key)) for key in keys]
    assert texts[0] != texts[1]


def test_copies_of_a_step_without_rows_are_made_before_the_next():
    plane = Plane()
    expected = alone(b"text", 2)
    plane.tokens(step([(0, 0, 4)], starts=[start(0, b"text", [0, 1])]))
    plane.tokens(step(copies=[TableCopy(0, 0, 0, 8)]))
    assert plane.tokens(step([(0, 4, 1)])) == expected[1:]
    assert plane.batches[-1].block_tables[:, :2].tolist() == [[8, 1]]


def test_a_waiting_copy_is_not_trusted_when_the_step_that_makes_it_fails():
    plane = Plane()
    plane.tokens(step([(0, 0, 4)], starts=[start(0, b"text", [0, 1])]))
    plane.tokens(step(copies=[TableCopy(0, 0, 0, 8)]))
    plane.slots.poison(plane.slots.prepare(step([(1, 0, 1)], starts=[start(1, b"x", [2])])))
    result = plane.run(step([(0, 4, 1)]))
    assert [f.reason for f in result.row_failures] == [RowFailureReason.POISONED]


def test_prompt_log_probabilities_are_those_of_the_known_next_tokens():
    plane = Plane()
    whole = plane.run(step([(0, 0, 6)], starts=[start(0, b"prompt", [0, 1])], prompt_logprobs=[0]))
    (entry,) = whole.prompt_logprobs
    assert (entry.row, entry.first_position, len(entry.logprobs)) == (0, 1, 5)
    plane.run(
        step([(1, 0, 3)], sampled=[], starts=[start(1, b"prompt", [2, 3])], prompt_logprobs=[0])
    )
    second = plane.run(step([(0, 6, 1), (1, 3, 3)], prompt_logprobs=[1]))
    (rest,) = second.prompt_logprobs
    assert (rest.row, rest.first_position) == (1, 4)
    np.testing.assert_array_equal(rest.logprobs, entry.logprobs[3:])


def test_a_failed_row_poisons_its_slot_and_nobody_elses():
    plane = Plane()
    starts = [start(slot, b"same", [slot * 2, slot * 2 + 1]) for slot in range(3)]
    rows = [(0, 0, 4), (1, 0, 4), (2, 0, 4)]
    result = plane.run(step(rows, starts=starts), failed_rows={1: "not finite"})
    assert [(f.row, f.reason, f.message) for f in result.row_failures] == [
        (1, RowFailureReason.NOT_FINITE, "not finite")
    ]
    assert result.sampled_token_ids[[0, 2]].tolist() == alone(b"same", 1) * 2
    # The next batch was sent before the failure was known: the poisoned row is left out.
    again = plane.run(step([(1, 4, 1), (0, 4, 1), (2, 4, 1)], prompt_logprobs=[1]))
    assert [(f.row, f.reason) for f in again.row_failures] == [(0, RowFailureReason.POISONED)]
    assert again.sampled_token_ids[1:].tolist() == alone(b"same", 2)[1:] * 2
    assert plane.batches[-1].query_lens.tolist() == [1, 1]
    assert [entry.row for entry in again.prompt_logprobs] == [1]
    # A start makes the slot sound.
    assert plane.tokens(step([(1, 0, 4)], starts=[starts[1]])) == alone(b"same", 1)


def test_a_step_of_poisoned_rows_only_runs_nothing():
    plane = Plane()
    plane.run(step([(0, 0, 2)], starts=[start(0, b"ab", [0])]), failed_rows={0: "not finite"})
    executed = len(plane.batches)
    result = plane.run(step([(0, 2, 1)], new_blocks=[[1]]))
    assert [f.reason for f in result.row_failures] == [RowFailureReason.POISONED]
    assert len(plane.batches) == executed


def test_a_slot_that_misses_a_sample_of_a_failed_row_is_poisoned_too():
    plane = Plane()
    starts = [start(slot, b"twin", [0, 1]) for slot in range(2)]
    batch = step([(0, 0, 4)], sampled=[0, 0], sampled_slots=[0, 1], starts=starts)
    plane.run(batch, failed_rows={0: "not finite"})
    result = plane.run(step([(1, 4, 1)], copies=[TableCopy(1, 0, 0, 5)]))
    assert [f.reason for f in result.row_failures] == [RowFailureReason.POISONED]


def test_a_slot_that_misses_a_sample_of_a_poisoned_row_is_poisoned_too():
    plane = Plane()
    plane.run(step([(0, 0, 4)], starts=[start(0, b"lead", [0])]), failed_rows={0: "not finite"})
    twin = start(1, b"twin", [0, 1])
    plane.run(step([(0, 4, 1)], sampled=[0, 0], sampled_slots=[0, 1], starts=[twin]))
    result = plane.run(step([(1, 4, 1)]))
    assert [f.reason for f in result.row_failures] == [RowFailureReason.POISONED]


def test_a_poisoned_step_poisons_all_its_slots_until_they_are_started():
    plane = Plane()
    plane.tokens(step([(2, 0, 3)], starts=[start(2, b"out", [8, 9])]))
    starts = [start(0, b"abcd", [0, 1])]
    plane.slots.poison(plane.slots.prepare(step([(0, 0, 4)], starts=starts)))
    result = plane.run(step([(0, 4, 1), (2, 3, 1)]))
    assert [f.row for f in result.row_failures] == [0]
    assert plane.tokens(step([(0, 0, 4)], starts=starts)) == alone(b"abcd", 1)


def test_a_refused_batch_leaves_no_trace():
    plane = Plane()
    plane.tokens(step([(0, 0, 4)], starts=[start(0, b"here", [0, 1])]))
    before = copy.deepcopy(vars(plane.slots))
    starts = [start(1, b"xyz", [6]), start(2, b"xyz", [6])]
    copies = [TableCopy(0, 0, 0, 20)]
    for rows, released, new_blocks, message in (
        ([(1, 0, 3), (5, 0, 1)], [0], [], "not started"),
        ([(1, 0, 3), (2, 0, 3)], [0], [], "block 6 would be written by rows 0 and 1"),
        ([(0, 3, 1), (1, 0, 3)], [], [], "number of tokens computed"),
        ([(0, 4, 2), (1, 0, 3)], [], [[7], [8]], "slot 0 knows 5"),
    ):
        refused = step(rows, starts=starts, copies=copies, released=released, new_blocks=new_blocks)
        with pytest.raises(InvalidBatch, match=message):
            plane.run(refused)
    after = vars(plane.slots)
    memory, numbers = after["_memory"], after["_numbers"]
    for name in ("num_tokens", "num_computed", "num_blocks", "is_known", "is_fresh", "line"):
        was = getattr(before["_numbers"], name)
        np.testing.assert_array_equal(getattr(numbers, name), was, err_msg=name)
    line = numbers.line[0]
    held = slice(0, numbers.num_blocks[0])  # what lies behind is not counted, so not there
    was = before["_memory"].tables[line, held]
    np.testing.assert_array_equal(memory.tables[line, held], was)
    assert sorted(memory.free_lines) == sorted(before["_memory"].free_lines)
    assert plane.tokens(step([(0, 4, 1)])) == alone(b"here", 2)[1:]


def test_the_longest_sequence_can_be_computed_and_not_one_token_more():
    plane = Plane()
    prompt = bytes([65]) * (LIMITS.context_length - 1)
    blocks = list(range(10))
    plane.tokens(step([(0, 0, 39)], starts=[start(0, prompt, blocks)]))
    assert plane.tokens(step([(0, 39, 1)])) == alone(prompt, 2)[1:]
    with pytest.raises(InvalidBatch, match=r"positions\[0\] must be below 40, got 40"):
        plane.run(step([(0, 40, 1)]))


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (ExecutionOutput(np.zeros(2, dtype=np.int32)), "1 tokens"),
        (ExecutionOutput(np.array([259], dtype=np.int32)), "below 259"),
        (ExecutionOutput(np.array([-1], dtype=np.int32)), "below 259"),
        (ExecutionOutput(np.array([1], dtype=np.int32), {1: "?"}), "row 1 of 1"),
        (
            ExecutionOutput(
                np.array([1], dtype=np.int32), prompt_logprobs=[np.zeros(1, dtype=np.float32)]
            ),
            "log-probabilities",
        ),
    ],
)
def test_an_answer_that_does_not_fit_the_batch_is_an_execution_error(
    output: ExecutionOutput, message: str
):
    plane = Plane()
    prepared = plane.slots.prepare(step([(0, 0, 2)], starts=[start(0, b"ab", [0])]))
    with pytest.raises(ExecutionError, match=message):
        plane.slots.complete(prepared, output)


def test_any_mix_of_sequences_gives_each_the_tokens_it_has_alone():
    """Chunks, interleaving, shuffled blocks, releases and restarts, drawn at random."""
    choose = random.Random(5)
    plane = Plane()
    free_blocks = list(range(LIMITS.num_blocks))
    running: dict[int, dict] = {}
    finished = 0
    for _ in range(300):
        released = [slot for slot, seq in running.items() if seq["wanted"] == 0]
        for slot in released:
            seq = running.pop(slot)
            free_blocks += seq["blocks"]
            finished += 1
        choose.shuffle(free_blocks)
        starts, rows, sampled, new_blocks = [], [], [], []
        if len(running) < 5:
            slot = choose.choice([s for s in range(8) if s not in running])
            prompt = bytes(choose.randrange(256) for _ in range(choose.randrange(1, 16)))
            key = SamplingKey(choose.choice([0.0, 0.8]), 0.9, choose.randrange(9), 0)
            expected = alone(prompt, choose.randrange(1, 12), key)
            running[slot] = {
                "known": list(prompt),
                "expected": expected,
                "wanted": len(expected),
                "computed": 0,
                "blocks": [],
            }
            starts.append(start(slot, prompt, [], key))
        for slot, seq in choose.sample(sorted(running.items()), choose.randrange(len(running) + 1)):
            missing = len(seq["known"]) - seq["computed"]
            num_tokens = choose.randrange(1, missing + 1)
            end = seq["computed"] + num_tokens
            grown = [free_blocks.pop() for _ in range(-(-end // 4) - len(seq["blocks"]))]
            seq["blocks"] += grown
            new_blocks.append(grown)
            if num_tokens == missing:
                sampled.append(len(rows))
            rows.append((slot, seq["computed"], num_tokens))
            seq["computed"] = end
        batch = step(rows, starts=starts, sampled=sampled, released=released, new_blocks=new_blocks)
        for row, token in zip(sampled, plane.tokens(batch), strict=True):
            seq = running[rows[row][0]]
            assert token == seq["expected"][-seq["wanted"]]
            seq["known"].append(token)
            seq["wanted"] -= 1
    assert finished > 20
