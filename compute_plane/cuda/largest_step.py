"""The step that takes the most memory, run once on padding, before there is a pool to compute on.

It has as many tokens as a batch may have and as many logits as exist at once, all of them adjusted,
sampled and listed with log-probabilities, as many embeddings as a batch may ask for, room for
results of every token, and room for the longest inputs: histories and block tables. Its tokens are
of prompts, with an adapter that takes more than any, and beside its layers lies the scratch memory
that attention of other steps takes. They have no place in a pool: keys and values are written
nowhere and read from one block of zeros. All of them go through one state as if they were one row.
What torch holds afterwards is what steps need.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from compute_plane.cuda.batch_layout import BatchLayout
from compute_plane.cuda.block_pools import BlockPools
from compute_plane.cuda.columns import Layout
from compute_plane.cuda.decode_wants import ROOM
from compute_plane.cuda.embeddings import largest_embedding_columns, run_embeddings
from compute_plane.cuda.host_layers import rows_for_the_host
from compute_plane.cuda.model import DecoderModel
from compute_plane.cuda.operands import MAX_LOGPROBS, PADDING_SLOT
from compute_plane.cuda.sampling_columns import LOGITS_ROWS, plan_sampling
from compute_plane.cuda.sampling_step import results_layout, run_group
from compute_plane.cuda.staging import StagingRing
from compute_plane.executor.adapter_runs import AdapterRun
from compute_plane.executor.batch_checks import max_embeddings
from compute_plane.executor.interface import (
    MAX_STEPS_UNDER_WAY,
    ExecutionBatch,
    Penalties,
    SamplingRow,
)
from compute_plane.executor.logits_groups import wanted_tokens
from compute_plane.executor.token_layout import PoolShape
from compute_plane.model.late_layers import first_late_layer

INT_BYTES: Final = 4
MOST_HISTORY_BYTES: Final = 128 << 20
"""32 million tokens: more than the sequences of a batch have together, even where they share."""

if TYPE_CHECKING:
    import torch

    from compute_plane.cuda.batch_layout import StepTensors
    from compute_plane.cuda.drivers import Driver
    from compute_plane.cuda.layer_products import Hidden
    from compute_plane.cuda.operations import DeviceOperations
    from compute_plane.cuda.sampling_columns import SamplingPlan
    from compute_plane.cuda.weights import DeviceWeights
    from compute_plane.executor.registry import ExecutorContext
    from compute_plane.model.spec import ModelSpec

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What bounds the steps of a plane: tokens of a block, tokens and rows of a batch."""

    block_size: int
    max_tokens: int
    max_rows: int

    @classmethod
    def of(cls, context: ExecutorContext) -> StepSizes:
        """Return those of a plane."""
        return cls(context.block_size, context.max_tokens, context.max_rows)


def run_largest_step(
    spec: ModelSpec,
    weights: DeviceWeights,
    operations: DeviceOperations,
    driver: Driver,
    sizes: StepSizes,
    *,
    pool_dtype: torch.dtype,
    has_head: bool = True,
) -> None:
    """Run the step and wait for it.

    `pool_dtype`: of the pool that there will be. `has_head`: whether the device computes logits; if
    not, the step ends as `host_layers` has it. Raises torch.OutOfMemoryError if there is not memory
    enough.
    """
    block_size, max_tokens = sizes.block_size, sizes.max_tokens
    has_states = spec.recurrence is not None
    pools = BlockPools(
        spec,
        driver,
        dtype=pool_dtype,
        block_size=block_size,
        num_blocks=1,
        num_states=int(has_states),
    )
    if weights.adapters is not None:
        weights = replace(weights, adapters=weights.adapters.largest())
    with driver.computing():  # which reads what is made here
        model = DecoderModel(spec, weights, pools, operations, spec.context_length, max_tokens)
    batch = largest_batch(spec, sizes)
    num_states = len(batch.query_lens) if has_states else 0
    shape = PoolShape(batch.block_tables.size, block_size, spec.vocab_size, 0, num_states)
    layout = BatchLayout(batch, shape, max_tokens=max_tokens, tile_tokens=operations.tile_tokens)
    plan = _plan(batch, layout, spec.vocab_size)
    columns = layout.columns()
    if has_head:
        columns |= {**plan.columns, **largest_embedding_columns(max_tokens)}
    columns["kv_slots"] = np.full_like(columns["kv_slots"], PADDING_SLOT)
    for tables in {"decode_tables", "prefill_tables"} & columns.keys():
        columns[tables] = np.zeros_like(columns[tables])
    if has_states:
        columns |= one_long_row(columns["state_rows"], max_tokens)
    inputs_of = Layout.of(columns)
    more_bytes = bytes_of_tables(spec, sizes)
    if has_head:
        more_bytes += bytes_of_histories(spec, sizes)
    ring = StagingRing(driver, 1, device_bytes=inputs_of.num_bytes + more_bytes)
    with driver.computing():
        inputs = ring.upload(ring.take(), inputs_of, columns)
        step = _with_one_long_row(layout.tensors(inputs))
        if weights.adapters is not None:
            step = replace(step, adapters=(AdapterRun(0, 0, max_tokens),))
        scratch_bytes = bytes_of_scratch(spec, sizes, operations)
        if has_head:
            of_all_tokens = _plan(with_prompt_logprobs(batch), layout, spec.vocab_size)
            num_embeddings = min(sizes.max_rows, max_embeddings(spec.hidden_size))
            most_of, results_of = (
                results_layout(
                    wants,
                    spec.vocab_size,
                    keep_logits=False,
                    embeddings=(num_embeddings, spec.hidden_size),
                )
                for wants in (of_all_tokens, plan)
            )
            buffers = [driver.device_buffer(most_of.num_bytes) for _ in range(MAX_STEPS_UNDER_WAY)]
            results = results_of.tensors(buffers[0])
            hidden = _run_layers(model, step, driver, scratch_bytes)
            for group in plan.groups:
                logits = model.logits(hidden, inputs["out_tokens"][group.out_tokens])
                run_group(group, logits, inputs, results, operations)
            run_embeddings(model, hidden, inputs, results)
        else:
            rows_for_the_host(_run_layers(model, step, driver, scratch_bytes))
    driver.synchronize()


def _run_layers(
    model: DecoderModel, step: StepTensors, driver: Driver, scratch_bytes: int
) -> Hidden:
    """Run them beside so much scratch memory, which is given back; return what comes out."""
    scratch = driver.device_buffer(scratch_bytes)
    hidden = model.run(step)
    del scratch
    return hidden


def one_long_row(rows: Array, num_tokens: int) -> dict[str, Array]:
    """Return the columns of rows of which the first has all tokens, and begins in state 0.

    `rows`: [R, 4], as in `StateRows`. Nothing takes more memory than a single long row.
    """
    found = np.zeros_like(rows)
    found[0] = 0, num_tokens, 0, 1
    return {"state_rows": found, "token_rows": np.zeros(num_tokens, dtype=np.int32)}


def _with_one_long_row(step: StepTensors) -> StepTensors:
    """Return the step as those columns have it."""
    if step.states is None:
        return step
    return replace(step, states=replace(step.states, num_long=1))


def bytes_of_tables(spec: ModelSpec, sizes: StepSizes) -> int:
    """Return what block tables of all rows take if one of them is as long as can be.

    Those of tokens that go on alone are as many again. Tables that are put together on the device
    (`TableColumns`) take up to half as much more.
    """
    num_tables = 1 if first_late_layer(spec) is None else 2
    width = -(-spec.context_length // sizes.block_size)
    return num_tables * INT_BYTES * sizes.max_rows * width * 3 // 2


def bytes_of_histories(spec: ModelSpec, sizes: StepSizes) -> int:
    """Return what the histories of penalties take, at most, with room to grow."""
    return min(INT_BYTES * sizes.max_rows * (spec.context_length + ROOM), MOST_HISTORY_BYTES)


def bytes_of_scratch(spec: ModelSpec, sizes: StepSizes, operations: DeviceOperations) -> int:
    """Return the scratch memory of attention in a step in which all rows decode, at most."""
    num_rows = min(sizes.max_rows, sizes.max_tokens)
    return operations.decode_scratch_bytes(num_rows, spec.context_length)


def _plan(batch: ExecutionBatch, layout: BatchLayout, vocab_size: int) -> SamplingPlan:
    return plan_sampling(batch, layout.places(wanted_tokens(batch, layout.tokens)), vocab_size)


def with_prompt_logprobs(batch: ExecutionBatch) -> ExecutionBatch:
    """Return a batch of prompts that asks for the log-probabilities of all their tokens."""
    return replace(
        batch,
        prompt_logprob_rows=range(len(batch.query_lens)),
        prompt_logprob_targets=[np.zeros(length, dtype=np.int32) for length in batch.query_lens],
        prompt_num_logprobs=[MAX_LOGPROBS] * len(batch.query_lens),
    )


def largest_batch(spec: ModelSpec, sizes: StepSizes) -> ExecutionBatch:
    """Return prompts of `max_tokens` together, as many as can be, the first ones longer.

    None is longer than the model takes. Every sample has a penalty and a mask.
    """
    # As many as there are logits are sampled, also where they would be wanted for prompts alone.
    max_tokens, max_rows = sizes.max_tokens, max(sizes.max_rows, LOGITS_ROWS)
    num_rows = max(min(max_rows, max_tokens), -(-max_tokens // spec.context_length))
    query_lens = np.full(num_rows, max_tokens // num_rows, dtype=np.int32)
    query_lens[: max_tokens % num_rows] += 1
    width = -(-int(query_lens[0]) // sizes.block_size)
    sampled_rows = np.arange(min(num_rows, max_rows), dtype=np.int32)
    penalties = Penalties(1.1, 0.1, 0.1, np.zeros(1, dtype=np.int32), 1)
    every_token = np.full(-(-spec.vocab_size // 8), 0xFF, dtype=np.uint8)
    sampling = [
        SamplingRow(1.0, 0.9, 0, 0, int(query_lens[row]), top_k=1, penalties=penalties,
                    num_logprobs=MAX_LOGPROBS, allowed_tokens=every_token)
        for row in sampled_rows
    ]  # fmt: skip
    return ExecutionBatch(
        input_tokens=np.zeros(max_tokens, dtype=np.int32),
        positions=np.concatenate([np.arange(length, dtype=np.int32) for length in query_lens]),
        seq_lens=query_lens.copy(),
        block_tables=np.arange(num_rows * width, dtype=np.int32).reshape(num_rows, width),
        is_prefill=np.ones(num_rows, dtype=np.bool_),
        prompt_lens=query_lens.copy(),
        query_lens=query_lens,
        sampled_rows=sampled_rows,
        sampling=sampling,
        states=np.arange(num_rows if spec.recurrence is not None else 0, dtype=np.int32),
    )
