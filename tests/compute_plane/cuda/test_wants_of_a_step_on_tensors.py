"""From a batch's wants to columns, through the operations, to the answer in the order sent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compute_plane.cuda import masks, sampling_columns
from compute_plane.cuda.answers import NOT_FINITE, answer
from compute_plane.cuda.columns import Layout
from compute_plane.cuda.reference_operations import ReferenceOperations
from compute_plane.cuda.sampling_columns import plan_sampling
from compute_plane.cuda.sampling_step import results_layout, run_group
from compute_plane.executor.interface import (
    ExecutionBatch,
    ExecutionOutput,
    LogitBias,
    Penalties,
    SamplingRow,
)
from kernels.reference.logit_adjustments import Adjustments
from kernels.reference.logprobs import log_softmax, most_likely
from kernels.reference.sampling import Choice, choose
from planes.errors import ValidationError

VOCAB, NUM_TOKENS = 60, 9
EMPTY = np.zeros(0, dtype=np.int32)
HISTORY = np.array([4, 4, 9, 2], dtype=np.int32)
BIAS = LogitBias(np.array([50], dtype=np.int32), np.array([90], dtype=np.float32))
ALLOWED = np.packbits(np.isin(np.arange(VOCAB), [3, 17, 50, 59]), bitorder="little")
WAYS = [
    SamplingRow(0.0, 1.0, 0, 0, 5),
    SamplingRow(0.8, 0.9, 2**64 - 1, 3, 2**33, 40, 0.01),
    SamplingRow(1e-310, 1.0, 7, 0, 9, num_logprobs=0),
    SamplingRow(1.0, 0.95, 8, 0, 9, penalties=Penalties(1.5, 0.5, 0.25, HISTORY, 1)),
    SamplingRow(0.0, 1.0, 9, 0, 9, num_logprobs=4, logit_bias=BIAS),
    SamplingRow(
        3.0, 1.0, 11, 2, 10, penalties=Penalties(0.7, 0, -1, HISTORY[1:], 0), num_logprobs=20
    ),
    SamplingRow(0.0, 1.0, 12, 0, 5, allowed_tokens=ALLOWED),
    SamplingRow(1.0, 0.9, 13, 0, 5, logit_bias=BIAS, num_logprobs=3, allowed_tokens=~ALLOWED),
]  # fmt: skip


def adjustments(way: SamplingRow) -> Adjustments:
    made = Adjustments()
    if way.penalties is not None:
        p = way.penalties
        made = Adjustments(EMPTY, np.zeros(0, np.float32), *p[:3], p.history, p.num_prompt)
    if way.logit_bias is not None:
        made = Adjustments(way.logit_bias.token_ids, way.logit_bias.values)
    return made if way.allowed_tokens is None else replace(made, allowed_tokens=way.allowed_tokens)


def token_of(way: SamplingRow, row: np.ndarray) -> int:
    made = Choice(
        way.temperature, way.top_p, way.seed, way.sample_index, way.position, way.top_k, way.min_p,
        adjustments(way),
    )  # fmt: skip
    return choose(row, made) or 0


def batch_of(ways: list[SamplingRow], prompts: list[tuple[list[int], int]]) -> ExecutionBatch:
    return ExecutionBatch(
        *[EMPTY] * 7,
        sampled_rows=np.arange(len(ways), dtype=np.int32),
        sampling=ways,
        prompt_logprob_rows=list(range(len(ways), len(ways) + len(prompts))),
        prompt_logprob_targets=[np.array(targets, dtype=np.int32) for targets, _ in prompts],
        prompt_num_logprobs=[count for _, count in prompts],
    )


def run(batch: ExecutionBatch, wanted: np.ndarray, logits: np.ndarray) -> ExecutionOutput:
    """Run all wants; want i is for the logits behind token wanted[i]."""
    plan = plan_sampling(batch, wanted, VOCAB)
    layout = Layout.of(plan.columns)
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    layout.fill(buffer, plan.columns)
    columns = layout.tensors(buffer)
    results_of = results_layout(plan, VOCAB, keep_logits=True)
    kept = torch.full((results_of.num_bytes,), 0xA5, dtype=torch.uint8)
    for group in plan.groups:
        rows = torch.from_numpy(logits)[columns["out_tokens"][group.out_tokens]]
        assert len(rows) <= sampling_columns.LOGITS_ROWS
        run_group(group, rows, columns, results_of.tensors(kept), ReferenceOperations())
    return answer(batch, plan, results_of.arrays(kept), VOCAB, [])


def test_a_mask_does_not_hide_logits_that_are_not_finite() -> None:
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, 20] = np.nan
    way = SamplingRow(0.0, 1.0, 0, 0, 5, allowed_tokens=ALLOWED)  # not 20
    assert run(batch_of([way], []), np.array([0]), logits).failed_rows == {0: NOT_FINITE}


def test_every_mask_is_applied_where_there_are_more_than_are_spread_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(masks, "ROWS_AT_ONCE", 2)
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, 20] = 9
    ways = [SamplingRow(0.0, 1.0, 12, 0, 5, allowed_tokens=ALLOWED)] * 5  # not 20
    assert run(batch_of(ways, []), np.zeros(5, np.int64), logits).next_tokens.tolist() == [3] * 5


@settings(max_examples=60, deadline=None)
@given(
    wants=st.lists(st.tuples(st.sampled_from(WAYS), st.integers(0, NUM_TOKENS - 1)), max_size=8),
    prompts=st.lists(
        st.tuples(st.lists(st.integers(0, VOCAB - 1), max_size=4), st.sampled_from([0, 0, 3, 20])),
        max_size=3,
    ),
    bad=st.integers(-1, NUM_TOKENS - 1),
    data=st.data(),
)
def test_every_want_gets_what_the_reference_gives_it(wants, prompts, bad, data) -> None:
    logits = np.random.default_rng(3).standard_normal((NUM_TOKENS, VOCAB)).astype(np.float32) * 4
    if bad >= 0:
        logits[bad, 17] = np.inf
    ways = [way for way, _ in wants]
    num_targets = sum(len(targets) for targets, _ in prompts)
    behind = data.draw(
        st.lists(st.integers(0, NUM_TOKENS - 1), min_size=num_targets, max_size=num_targets)
    )
    tokens = np.array([token for _, token in wants] + behind, dtype=np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling_columns, "LOGITS_ROWS", 3)
        output = run(batch_of(ways, prompts), tokens, logits)

    expected = [token_of(way, logits[token]) for way, token in wants]
    assert output.next_tokens.tolist() == expected
    np.testing.assert_array_equal(output.logits, logits[tokens[: len(wants)]])
    failed = {row for row, (_, token) in enumerate(wants) if token == bad}
    asked = [k for k, way in enumerate(ways) if way.num_logprobs is not None]
    assert [one.sample for one in output.sample_logprobs] == asked
    for one in output.sample_logprobs:
        row, count = logits[tokens[one.sample]], ways[one.sample].num_logprobs
        np.testing.assert_equal(one.logprob, float(log_softmax(row)[expected[one.sample]]))
        assert one.top.token_ids.shape == one.top.logprobs.shape == (1, count)
        if one.sample not in failed:
            np.testing.assert_array_equal(one.top.token_ids[0], most_likely(row, count))
    first = len(wants)
    for index, (targets, count) in enumerate(prompts):
        rows = logits[tokens[first : first + len(targets)]]
        first += len(targets)
        found = [log_softmax(row)[target] for row, target in zip(rows, targets, strict=True)]
        np.testing.assert_array_equal(output.prompt_logprobs[index], np.array(found, np.float32))
        likely = output.prompt_top_logprobs[index].token_ids
        assert likely.shape == (len(targets), count)
        for tokens_of, row in zip(likely, rows, strict=True):
            if np.isfinite(row).all():
                np.testing.assert_array_equal(tokens_of, most_likely(row, count))
        if np.isnan(found).any():
            failed.add(len(wants) + index)
    assert output.failed_rows == dict.fromkeys(failed, NOT_FINITE)


def test_no_more_likely_tokens_come_back_than_a_vocabulary_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"{__name__}.VOCAB", 7)
    batch = batch_of([WAYS[2]._replace(num_logprobs=20)], [([1], 20)])
    output = run(batch, np.zeros(2, dtype=np.int64), np.zeros((1, 7), dtype=np.float32))
    tops = [output.sample_logprobs[0].top, *output.prompt_top_logprobs]
    assert [top.token_ids.shape for top in tops] == [(1, 7)] * 2


def test_log_probabilities_that_nobody_asks_for_are_not_copied_back() -> None:
    wanted = np.arange(3)
    batch = batch_of([WAYS[0]], [([1, 2], 0)])
    for asks in (False, True):
        if asks:
            batch = replace(batch, sampling=[WAYS[2]], prompt_num_logprobs=[1])
        plan = plan_sampling(batch, wanted, VOCAB)
        assert not plan.adjusted_order.size  # whose logits would be copied
        fields = results_layout(plan, VOCAB, keep_logits=False).fields
        sizes = [fields[name].shape[0] for name in ("logprobs", "top_tokens", "prompt_top_tokens")]
        assert sizes == [1 * asks, 1 * asks, 2 * asks]


@pytest.mark.parametrize(
    ("way", "field"),
    [
        (replaced, field)
        for field, replaced in (
            ("sampling.num_logprobs", WAYS[0]._replace(num_logprobs=21)),
            ("sampling.num_logprobs", WAYS[0]._replace(num_logprobs=-1)),
            ("sampling.logit_bias.token_ids", WAYS[0]._replace(
                logit_bias=LogitBias(np.array([VOCAB], np.int32), np.ones(1, np.float32)))),
            ("sampling.penalties.history", WAYS[0]._replace(
                penalties=Penalties(2, 0, 0, np.array([3, -1], np.int32), 0))),
        )
    ],
)  # fmt: skip
def test_what_would_be_a_bad_address_is_refused_by_field(way: SamplingRow, field: str) -> None:
    with pytest.raises(ValidationError) as info:
        plan_sampling(batch_of([way], []), np.zeros(1, dtype=np.int64), VOCAB)
    assert info.value.field == field


def test_too_many_likely_prompt_tokens_are_refused() -> None:
    batch = replace(batch_of([], [([1], 0)]), prompt_num_logprobs=[21])
    with pytest.raises(ValidationError, match="0 to 20, got 21"):
        plan_sampling(batch, np.zeros(1, dtype=np.int64), VOCAB)
