"""The largest step has all that any step may have, and the room that it takes is left for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compute_plane.cuda import largest_step
from compute_plane.cuda.block_pools import BlockPools
from compute_plane.cuda.build import planned_weights
from compute_plane.cuda.decode_wants import ROOM
from compute_plane.cuda.largest_step import StepSizes, largest_batch, run_largest_step
from compute_plane.cuda.layer_products import Hidden
from compute_plane.cuda.operands import MAX_LOGPROBS, DrawNeeds
from compute_plane.cuda.reference_operations import ReferenceOperations
from compute_plane.cuda.sampling_columns import needs_of
from compute_plane.cuda.staging import FIRST_BYTES
from compute_plane.executor.interface import MAX_STEPS_UNDER_WAY
from tests.compute_plane.cuda.metered_device import MeteredDriver, MeteredOperations
from tests.compute_plane.cuda.test_the_pool_fills_what_steps_leave import (
    BLOCK_SIZE,
    DEVICE_BYTES,
    MAX_TOKENS,
    SPEC,
    context,
)


def largest_bytes(
    tmp_path: Path, *, context_length: int = 96, has_head: bool = True, max_tokens: int = MAX_TOKENS
) -> int:
    """Return what the largest step of a model takes beside its angles."""
    spec = replace(SPEC, context_length=context_length)
    driver, wants = MeteredDriver(1 << 40), context(tmp_path, spec=spec)
    assert wants.model is not None
    weights = planned_weights(wants, wants.model, driver.device).place(driver.device, 1)
    with driver.meter:
        run_largest_step(
            spec, weights, MeteredOperations(driver), driver,  # type: ignore[arg-type]
            StepSizes(BLOCK_SIZE, max_tokens, MAX_TOKENS),
            pool_dtype=weights.dtype, has_head=has_head,
        )  # fmt: skip
    return driver.meter.peak - 4 * context_length * spec.head_dim


def test_room_for_histories_is_left_where_tokens_are_sampled_and_for_tables_everywhere(
    tmp_path: Path,
) -> None:
    lengths = 400, 8400
    # Tables of the step, and of tokens that go on alone; half of that more to put them together.
    of_tables = 3 * 4 * MAX_TOKENS // BLOCK_SIZE
    for has_head in (False, True):
        few, many = (
            largest_bytes(tmp_path, context_length=length, has_head=has_head) for length in lengths
        )
        histories = 4 * 8000 * MAX_TOKENS * has_head
        assert abs(many - few - of_tables * 8000 - histories) <= FIRST_BYTES
    sizes = StepSizes(BLOCK_SIZE, MAX_TOKENS, 8)
    assert largest_step.bytes_of_histories(SPEC, sizes) == 4 * 8 * (SPEC.context_length + ROOM)
    # A context so long that no batch has a history of it in every row.
    longest = largest_bytes(tmp_path, context_length=1 << 20, has_head=True)
    more = longest - many - of_tables * ((1 << 20) - lengths[1])
    assert more < 4 * (1 << 20) * MAX_TOKENS // 2


def test_steps_under_way_have_room_for_likely_tokens_of_all_their_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    take = MeteredDriver.device_buffer
    monkeypatch.setattr(
        MeteredDriver, "device_buffer", lambda self, size: (sizes.append(size), take(self, size))[1]
    )
    largest_bytes(tmp_path, max_tokens=400)  # more than are sampled at once
    of_results = [size for size in sizes if size % FIRST_BYTES]
    assert len(of_results) == MAX_STEPS_UNDER_WAY
    assert min(of_results) >= 4 * 400 * (1 + 2 * 20)


def test_without_a_head_the_largest_step_ends_with_what_goes_to_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed_over: list[tuple[int, ...]] = []

    def note(hidden: Hidden) -> torch.Tensor:
        handed_over.append(tuple(hidden.residual.shape))
        return hidden.residual

    monkeypatch.setattr(largest_step, "rows_for_the_host", note)
    largest_bytes(tmp_path)
    assert not handed_over
    largest_bytes(tmp_path, has_head=False)
    assert handed_over == [(MAX_TOKENS, SPEC.hidden_size)]


@pytest.mark.parametrize(
    ("max_tokens", "context_length"),
    [(1, 96), (63, 96), (256, 96), (300, 96), (1000, 96), (1000, 2)],
)
def test_the_largest_batch_has_all_tokens_and_all_rows_and_none_too_long(
    max_tokens: int, context_length: int
) -> None:
    spec = replace(SPEC, context_length=context_length)
    batch = largest_batch(spec, StepSizes(BLOCK_SIZE, max_tokens, 300))
    assert batch.query_lens.sum() == len(batch.input_tokens) == max_tokens
    assert batch.query_lens.min() >= 1
    assert batch.seq_lens.max() <= context_length
    assert len(batch.sampling) == min(max_tokens, 300)
    assert needs_of(batch.sampling) == DrawNeeds(draws=True, cuts=True)
    for row in batch.sampling:
        assert row.num_logprobs == MAX_LOGPROBS
        assert row.penalties is not None
        assert row.allowed_tokens is not None


def test_the_largest_step_writes_no_key_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[BlockPools] = []
    made = BlockPools.__init__

    def make(self: BlockPools, *arguments: object, **named: object) -> None:
        made(self, *arguments, **named)  # type: ignore[arg-type]
        pools.append(self)

    monkeypatch.setattr(BlockPools, "__init__", make)
    driver, wants = MeteredDriver(DEVICE_BYTES), context(tmp_path)
    assert wants.model is not None
    weights = planned_weights(wants, wants.model, driver.device).place(driver.device, 1)
    run_largest_step(
        SPEC, weights, ReferenceOperations(), driver, StepSizes(BLOCK_SIZE, MAX_TOKENS, 4),
        pool_dtype=torch.bfloat16,
    )  # fmt: skip
    (pool,) = pools
    assert pool.num_blocks == 1
    assert not pool.device.any()
