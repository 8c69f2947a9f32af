from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from compute_plane.executor.interface import (
    BlockCopy,
    ExecutionBatch,
    GPUExecutor,
    SamplingRow,
    StateCopy,
)
from compute_plane.executor.simulated import (
    ALPHABET,
    EOS_TOKEN_ID,
    VOCAB_SIZE,
    SimulatedExecutor,
    draw,
)

GREEDY = SamplingRow(0.0, 1.0, 0, 0, 6)


def prompt_batch(table: list[int], sampling: SamplingRow = GREEDY) -> ExecutionBatch:
    return ExecutionBatch(
        input_tokens=np.frombuffer(b"prompt", dtype=np.uint8).astype(np.int32),
        positions=np.arange(6, dtype=np.int32),
        seq_lens=np.array([6], dtype=np.int32),
        block_tables=np.array([table], dtype=np.int32),
        is_prefill=np.array([True]),
        prompt_lens=np.array([6], dtype=np.int32),
        query_lens=np.array([6], dtype=np.int32),
        sampled_rows=np.array([0], dtype=np.int32),
        sampling=[sampling],
    )


def decode_batch(table: list[int], token: int, copies: list[BlockCopy]) -> ExecutionBatch:
    return ExecutionBatch(
        input_tokens=np.array([token], dtype=np.int32),
        positions=np.array([6], dtype=np.int32),
        seq_lens=np.array([7], dtype=np.int32),
        block_tables=np.array([table], dtype=np.int32),
        is_prefill=np.array([False]),
        prompt_lens=np.array([6], dtype=np.int32),
        query_lens=np.array([1], dtype=np.int32),
        sampled_rows=np.array([0], dtype=np.int32),
        sampling=[GREEDY._replace(position=7)],
        copies=copies,
    )


def executor() -> SimulatedExecutor:
    return SimulatedExecutor(num_blocks=8, block_size=4)


def test_it_is_an_executor():
    assert isinstance(executor(), GPUExecutor)


def test_where_the_blocks_lie_does_not_matter():
    tokens = {
        int(executor().execute(prompt_batch(table)).next_tokens[0])
        for table in ([0, 1], [7, 2], [5, 0])
    }
    assert len(tokens) == 1


@pytest.mark.parametrize("table", [[0, 2], [1, 0], [3, 1]])
def test_one_wrong_block_changes_the_text(table: list[int]):
    right, wrong = executor(), executor()
    for one in (right, wrong):
        one.execute(prompt_batch([0, 1]))
    expected = right.execute(decode_batch([0, 1], 65, [])).next_tokens
    assert wrong.execute(decode_batch(table, 65, [])).next_tokens != expected


def test_a_copied_block_serves_as_well_and_a_missing_copy_shows():
    right, copied, forgotten = executor(), executor(), executor()
    for one in (right, copied, forgotten):
        one.execute(prompt_batch([0, 1]))
    expected = right.execute(decode_batch([0, 1], 65, [])).next_tokens
    assert copied.execute(decode_batch([0, 4], 65, [BlockCopy(1, 4)])).next_tokens == expected
    assert forgotten.execute(decode_batch([0, 4], 65, [])).next_tokens != expected


def test_a_greedy_token_depends_on_the_tokens_alone():
    one = executor().execute(prompt_batch([0, 1]))
    other_key = GREEDY._replace(seed=9, sample_index=3, top_p=0.5)
    other = executor().execute(prompt_batch([0, 1], other_key))
    assert one.next_tokens == other.next_tokens


@pytest.mark.parametrize("change", [{"seed": 2}, {"sample_index": 1}, {"position": 8}])
def test_a_drawn_token_depends_on_its_key(change: dict):
    tokens = np.arange(20, dtype=np.int32)
    keys = [SamplingRow(1.0, 1.0, 1, 0, 7), SamplingRow(**{
        "temperature": 1.0, "top_p": 1.0, "seed": 1, "sample_index": 0, "position": 7, **change
    })]  # fmt: skip
    texts = [[draw(tokens[:n], key) for n in range(1, 20)] for key in keys]
    assert texts[0] != texts[1]


def test_texts_are_of_the_alphabet_and_end_now_and_then():
    drawn = [draw(np.array([n], dtype=np.int32), GREEDY) for n in range(4096)]
    assert set(drawn) == {*ALPHABET, EOS_TOKEN_ID}
    assert max(drawn) < VOCAB_SIZE
    assert 4 <= drawn.count(EOS_TOKEN_ID) <= 40


def with_state(batch: ExecutionBatch, state: int, *copies: StateCopy) -> ExecutionBatch:
    return replace(batch, states=np.array([state], dtype=np.int32), state_copies=copies)


def executor_with_states() -> SimulatedExecutor:
    return SimulatedExecutor(num_blocks=8, block_size=4, num_states=4)


def test_states_that_are_right_change_no_text():
    plain, stateful = executor(), executor_with_states()
    for batch in (prompt_batch([0, 1]), decode_batch([0, 1], 65, [])):
        expected = plain.execute(batch).next_tokens
        assert stateful.execute(with_state(batch, 2)).next_tokens == expected


@pytest.mark.parametrize(
    ("state", "copies", "is_right"),
    [
        (1, [StateCopy(0, 1)], True),
        (1, [StateCopy(0, 3), StateCopy(3, 1)], True),
        (1, [StateCopy(3, 1), StateCopy(0, 3)], False),
        (1, [], False),
        (0, [StateCopy(3, 0)], False),
    ],
)
def test_one_wrong_state_changes_the_text(state: int, copies: list[StateCopy], is_right: bool):
    right, one = executor(), executor_with_states()
    right.execute(prompt_batch([0, 1]))
    one.execute(with_state(prompt_batch([0, 1]), 0))
    batch = decode_batch([0, 1], 65, [])
    expected = right.execute(batch).next_tokens
    found = one.execute(with_state(batch, state, *copies)).next_tokens
    assert (found == expected) == is_right


def test_a_state_that_took_a_token_in_twice_changes_the_text():
    one = executor_with_states()
    one.execute(with_state(prompt_batch([0, 1]), 0))
    batch = with_state(decode_batch([0, 1], 65, []), 0)
    expected = one.execute(batch).next_tokens
    assert one.execute(batch).next_tokens != expected


def test_a_row_at_the_beginning_begins_with_an_empty_state():
    one = executor_with_states()
    batch = with_state(prompt_batch([0, 1]), 0)
    assert one.execute(batch).next_tokens == one.execute(batch).next_tokens
