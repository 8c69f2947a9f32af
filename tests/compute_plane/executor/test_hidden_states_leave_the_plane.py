"""Hidden states of rows, from the executors to the slots' results."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from compute_plane.errors import BatchRefused, InvalidBatch, UnsupportedBatch
from compute_plane.executor.batch_checks import features_of
from compute_plane.executor.embeddings import (
    GRAIN,
    NOT_FINITE,
    EmbeddedTokens,
    EmbeddingSums,
)
from compute_plane.executor.interface import EmbeddingPart, EmbeddingWant, ExecutionOutput
from compute_plane.executor.simulated import hidden_states
from compute_plane.executor.step import StepBatch
from planes.errors import ExecutionError
from tests.compute_plane.executor.embedded_texts import embed
from tests.compute_plane.executor.slot_batches import LIMITS, Plane, start, step
from tests.compute_plane.executor.tiny_llama import pool_for, tiny_executor, tiny_spec
from tests.compute_plane.executor.tiny_weights import tiny_weights
from tests.golden.batch_driver import BatchDriver, DrivenSequence

LAST, SUM = EmbeddingPart.LAST, EmbeddingPart.SUM
EMBEDS = replace(LIMITS, embedding_size=2)
TEXT = b"one, two, three"


def wanting(batch: StepBatch, *wants: tuple[int, EmbeddingPart]) -> StepBatch:
    return replace(batch, embeddings=[EmbeddingWant(*want) for want in wants])


def states(text: bytes) -> np.ndarray:
    return hidden_states(np.frombuffer(text, dtype=np.uint8).astype(np.int32))


# Executors


def texts(seed: int, *lengths: int) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 131, length).tolist() for length in lengths]


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_hidden_states_are_those_that_transformers_hands_to_its_head(architecture) -> None:
    import torch

    from tests.compute_plane.executor.llama_of_transformers import transformers_model

    spec = tiny_spec(architecture=architecture)
    weights, given = tiny_weights(spec), texts(1, 90, 1, 17)
    base = transformers_model(spec, weights).model
    with torch.inference_mode():
        expected = [base(torch.tensor([text])).last_hidden_state[0].double() for text in given]
    with tiny_executor(spec, weights, pool_for(spec, 60, 4)) as executor:
        last, sums = embed(executor, given, LAST), embed(executor, given, SUM)
    np.testing.assert_allclose(last, [all_of[-1] for all_of in expected], rtol=2e-5, atol=2e-5)
    means = sums / [[len(text)] for text in given]
    np.testing.assert_allclose(means, [s.mean(0) for s in expected], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("part", [LAST, SUM])
def test_in_chunks_in_company_and_with_any_threads_a_text_has_the_same_bits(part) -> None:
    spec = tiny_spec(quantisable=True)
    weights = tiny_weights(spec)
    given, company = texts(2, 90, 3, 33), texts(3, 5, 12, 1)
    found = []
    for num_threads in (1, 2):
        pool = pool_for(spec, 80, 4)
        with tiny_executor(spec, weights, pool, num_threads=num_threads) as executor:
            for chunk in (None, 7, 64):
                found += [
                    embed(
                        executor, given, part, chunk=chunk, company=beside, num_blocks=80
                    ).tobytes()
                    for beside in ((), company)
                ]
            found += [b"".join(embed(executor, [text], part).tobytes() for text in given)]
    assert len(set(found)) == 1


def test_hidden_states_are_not_scaled_as_logits_are() -> None:
    spec = tiny_spec()
    given = texts(4, 9)
    found = []
    for one in (spec, replace(spec, logits_scale=0.25)):
        with tiny_executor(one, tiny_weights(one), pool_for(one, 60, 4)) as executor:
            found.append(embed(executor, given, LAST))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("part", [LAST, SUM])
def test_a_step_whose_tokens_are_sorted_by_kind_gives_them_to_their_rows(part) -> None:
    """As with AMX, where generated tokens come before those of prompts."""
    spec = tiny_spec()
    weights, (text, other) = tiny_weights(spec), texts(7, 9, 8)
    found = []
    for tells_apart in (False, True):
        with tiny_executor(spec, weights, pool_for(spec, 60, 4)) as executor:
            executor._model.tells_prompts_apart = tells_apart
            driver = BatchDriver(executor, num_blocks=60, block_size=4)
            sequences = [DrivenSequence(text), DrivenSequence(other, num_prompt=3)]
            wants = [EmbeddingWant(0, part), EmbeddingWant(1, part)]
            batch = replace(driver.batch(sequences), embeddings=wants)
            found.append(executor.execute(batch).embeddings)
    np.testing.assert_array_equal(*found)


def test_sums_of_rounded_numbers_are_the_same_however_a_text_is_cut() -> None:
    random = np.random.default_rng(5)
    scales = 10.0 ** random.uniform(-9, 3, (1000, 1))  # whose sums float64 would round
    rows = (random.standard_normal((1000, 7)) * scales).astype(np.float32)
    wanted = EmbeddedTokens(np.arange(1000), np.zeros(1000, dtype=np.int64), np.array([True]))
    found = []
    for cut in (1, 13, 1000):
        sums = EmbeddingSums(wanted, 7)
        for first in range(0, 1000, cut):
            sums.add(first, rows[first : first + cut])
        found.append(sums.taken())
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])
    np.testing.assert_allclose(found[0][0], rows.astype(np.float64).sum(0), atol=1000 * GRAIN)


# Slots


def test_rows_with_and_without_samples_give_their_hidden_states() -> None:
    plane = Plane(EMBEDS)
    starts = [start(0, TEXT, [0, 1, 2, 3]), start(1, b"other", [4, 5]), start(2, b"ab", [6])]
    rows = [(0, 0, len(TEXT)), (1, 0, 5), (2, 0, 2)]
    batch = step(rows, starts=starts, sampled=[1])
    result = plane.run(wanting(batch, (2, SUM), (0, LAST)))
    assert result.sampled_token_ids.size == 1
    assert [item.row for item in result.embeddings] == [2, 0]
    np.testing.assert_array_equal(result.embeddings[0].values, states(b"a") + states(b"ab"))
    np.testing.assert_array_equal(result.embeddings[1].values, states(TEXT))


def test_rows_of_poisoned_slots_give_none_and_leave_the_numbers_of_the_others() -> None:
    plane = Plane(EMBEDS)
    starts = [start(0, b"first", [0, 1]), start(1, b"other", [4, 5])]
    plane.run(step([(0, 0, 2), (1, 0, 2)], starts=starts, sampled=[]), {0: "broken"})
    result = plane.run(wanting(step([(0, 2, 3), (1, 2, 3)], sampled=[]), (0, LAST), (1, LAST)))
    assert [failure.row for failure in result.row_failures] == [0]
    [item] = result.embeddings
    assert item.row == 1
    np.testing.assert_array_equal(item.values, states(b"other"))


def test_a_row_with_hidden_states_that_are_no_numbers_fails_alone() -> None:
    plane = Plane(EMBEDS)
    execute = plane.executor.execute

    def spoil(batch):
        output = execute(batch)
        output.embeddings[1] = [np.nan, 1.0]
        return output

    plane.executor.execute = spoil
    starts = [start(0, b"first", [0, 1]), start(1, b"other", [4, 5])]
    batch = step([(0, 0, 5), (1, 0, 5)], starts=starts, sampled=[])
    prepared = plane.slots.prepare(wanting(batch, (0, LAST), (1, LAST)))
    result = plane.slots.complete(prepared, plane.executor.execute(prepared.batch))
    assert [(failure.row, failure.message) for failure in result.row_failures] == [(1, NOT_FINITE)]
    assert [item.row for item in result.embeddings] == [0]


@pytest.mark.parametrize("embeddings", [None, np.zeros((1, 3)), np.zeros((2, 2))])
def test_an_executor_that_answers_something_else_has_failed(embeddings) -> None:
    plane = Plane(EMBEDS)
    batch = step([(0, 0, 5)], starts=[start(0, b"first", [0, 1])], sampled=[])
    prepared = plane.slots.prepare(wanting(batch, (0, LAST)))
    output = ExecutionOutput(np.zeros(0, dtype=np.int32), embeddings=embeddings)
    with pytest.raises(ExecutionError, match=r"embeddings of shape \(1, 2\)"):
        plane.slots.complete(prepared, output)


@pytest.mark.parametrize(
    ("wants", "field"),
    [
        ([(1, LAST)], "embeddings[0].row"),
        ([(0, LAST), (0, SUM)], "embeddings[1].row"),
        ([(0, EmbeddingPart.UNSAID)], "embeddings[0].part"),
    ],
)
def test_wrong_wants_are_refused_by_name(wants, field) -> None:
    plane = Plane(EMBEDS)
    batch = step([(0, 0, 5)], starts=[start(0, b"first", [0, 1])], sampled=[])
    with pytest.raises(InvalidBatch) as caught:
        plane.slots.prepare(wanting(batch, *wants))
    assert caught.value.field == field


def test_a_reply_has_room_for_the_hidden_states_of_a_batch() -> None:
    plane = Plane(replace(LIMITS, embedding_size=4 << 20))
    starts = [start(0, b"first", [0, 1]), start(1, b"other", [4, 5])]
    batch = step([(0, 0, 5), (1, 0, 5)], starts=starts, sampled=[])
    with pytest.raises(InvalidBatch, match="2 entries, a batch has at most 1"):
        plane.slots.prepare(wanting(batch, (0, LAST), (1, LAST)))


def test_a_plane_whose_executor_gives_none_says_so_and_refuses_by_name() -> None:
    assert "embeddings" in features_of(EMBEDS)
    assert "embeddings" not in features_of(LIMITS)
    plane = Plane(LIMITS)
    batch = step([(0, 0, 5)], starts=[start(0, b"first", [0, 1])], sampled=[])
    with pytest.raises(UnsupportedBatch, match="no hidden states") as caught:
        plane.slots.prepare(wanting(batch, (0, LAST)))
    assert isinstance(caught.value, BatchRefused)
    assert caught.value.field == "embeddings"


def test_a_row_with_drafts_gives_none_and_those_beside_it_do() -> None:
    plane = Plane(EMBEDS)
    starts = [start(0, b"first", [0, 1]), start(1, b"other", [4, 5])]
    plane.run(step([(0, 0, 5)], starts=starts, sampled=[0]))
    batch = replace(
        step([(0, 5, 2), (1, 0, 5)], sampled=[0]),
        draft_counts=np.array([1, 0]),
        draft_ids=np.array([97]),
    )
    with pytest.raises(InvalidBatch, match="has drafts"):
        plane.slots.prepare(wanting(batch, (0, LAST)))
    [item] = plane.run(wanting(batch, (1, LAST))).embeddings
    assert item.row == 1
    np.testing.assert_array_equal(item.values, states(b"other"))


def test_a_decode_run_is_not_gone_on_with_where_hidden_states_are_wanted() -> None:
    plane = Plane(EMBEDS)
    plane.run(step([(0, 0, 5)], starts=[start(0, b"first", [0, 1, 2])]))
    plane.run(step([(0, 5, 1)]))
    result = plane.run(wanting(step([(0, 6, 1)]), (0, LAST)))
    assert len(result.embeddings) == 1
    assert not plane.run(step([(0, 7, 1)])).embeddings
