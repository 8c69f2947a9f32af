"""Where each token of a batch belongs: its row, its slot in the pool, its share of attention.

Kernels do not check bounds, so everything that becomes an address is checked here, before the pool
is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from compute_plane.executor.block_tables import are_blocks, used_entries
from compute_plane.executor.interface import (
    BlockCopy,
    BoolArray,
    CopyKind,
    ExecutionBatch,
    Int32Array,
)
from planes.errors import ValidationError

Int64Array = npt.NDArray[np.int64]

FEW_TOKENS: Final = 256
"""Up to so many, a Python set counts different numbers sooner than a sort does."""


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The limits a batch must keep: blocks of the pools, tokens of a block, width of the logits.

    `num_states`: 0 in models without states. `num_adapters`: that rows may be computed with.
    """

    num_blocks: int
    block_size: int
    vocab_size: int
    num_host_blocks: int = 0
    num_states: int = 0
    num_adapters: int = 0


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """The tokens of one step as the kernels want them.

    `token_ids`, `positions`, `token_rows`: [T] int32. `kv_slots`: [T] int64, block · B + offset.
    `block_tables`: [S, M] int32. `row_ends`: [S], index of the first token after each row.
    """

    token_ids: Int32Array
    positions: Int32Array
    token_rows: Int32Array
    kv_slots: Int64Array
    block_tables: Int32Array
    row_ends: Int64Array


def lay_out_tokens(batch: ExecutionBatch, shape: PoolShape) -> TokenLayout:
    """Return the layout of a batch. Raises ValidationError, naming the field, if it is bad."""
    num_rows = len(batch.query_lens)
    if num_rows == 0:
        raise ValidationError("the batch has no rows", field="query_lens")
    is_decode = bool((batch.query_lens == 1).all())
    if not is_decode and batch.query_lens.min() < 1:
        raise ValidationError(
            f"every row needs at least 1 token, got {batch.query_lens.min()}", field="query_lens"
        )
    token_rows = np.arange(num_rows, dtype=np.int32)
    if not is_decode:
        token_rows = np.repeat(token_rows, batch.query_lens)
    num_tokens = len(token_rows)
    for name, array, wanted in (
        ("input_tokens", batch.input_tokens, num_tokens),
        ("positions", batch.positions, num_tokens),
        ("seq_lens", batch.seq_lens, num_rows),
        ("block_tables", batch.block_tables, num_rows),
    ):
        if len(array) != wanted:
            raise ValidationError(f"needs {wanted} entries, got {len(array)}", field=name)
    positions = np.ascontiguousarray(batch.positions, dtype=np.int32)
    block_tables = np.ascontiguousarray(batch.block_tables, dtype=np.int32)
    _check_range("input_tokens", batch.input_tokens, shape.vocab_size)
    _check_tables(batch.seq_lens, block_tables, shape)
    seq_lens = batch.seq_lens if is_decode else batch.seq_lens[token_rows]  # [T]
    out_of_row = (positions < 0) | (positions >= seq_lens)
    if out_of_row.any():
        token = int(np.argmax(out_of_row))
        row = int(token_rows[token])
        raise ValidationError(
            f"row {row} ends at position {int(batch.seq_lens[row]) - 1}, got {positions[token]}",
            field="positions",
        )
    places = positions // shape.block_size
    kv_slots = block_tables[token_rows, places].astype(np.int64) * shape.block_size
    kv_slots += positions - places * shape.block_size
    if _num_different(kv_slots) != num_tokens:
        raise ValidationError("two tokens would be written to one slot", field="block_tables")
    _check_requests(batch, shape)
    return TokenLayout(
        token_ids=np.ascontiguousarray(batch.input_tokens, dtype=np.int32),
        positions=positions,
        token_rows=token_rows,
        kv_slots=kv_slots,
        block_tables=block_tables,
        row_ends=np.cumsum(batch.query_lens, dtype=np.int64),
    )


def _check_tables(seq_lens: Int32Array, block_tables: Int32Array, shape: PoolShape) -> None:
    """Check that every row's table is long enough, and its entries are blocks of the pool."""
    width = block_tables.shape[1]
    _check_range("seq_lens", seq_lens, width * shape.block_size + 1)
    used = -(-seq_lens.astype(np.int64) // shape.block_size)
    if not are_blocks(block_tables, used, shape.num_blocks):
        _check_range("block_tables", used_entries(block_tables, used), shape.num_blocks)


def _num_different(values: Int64Array | Int32Array) -> int:
    """Return how many different values there are."""
    return len(set(values.tolist())) if len(values) <= FEW_TOKENS else len(np.unique(values))


def _check_requests(batch: ExecutionBatch, shape: PoolShape) -> None:
    """Check what is asked of the rows: samples, log-probabilities, hidden states, block copies."""
    num_rows = len(batch.query_lens)
    _check_range("sampled_rows", batch.sampled_rows, num_rows)
    if len(batch.sampling) != len(batch.sampled_rows):
        raise ValidationError(
            f"needs {len(batch.sampled_rows)} entries, got {len(batch.sampling)}", field="sampling"
        )
    if len(batch.prompt_logprob_rows) != len(batch.prompt_logprob_targets):
        raise ValidationError(
            f"needs {len(batch.prompt_logprob_rows)} entries, "
            f"got {len(batch.prompt_logprob_targets)}",
            field="prompt_logprob_targets",
        )
    if batch.prompt_logprob_rows:
        _check_range("prompt_logprob_rows", np.asarray(batch.prompt_logprob_rows), num_rows)
    for row, targets in zip(batch.prompt_logprob_rows, batch.prompt_logprob_targets, strict=True):
        if len(targets) > batch.query_lens[row]:
            raise ValidationError(
                f"row {row} computes {batch.query_lens[row]} tokens, got {len(targets)} targets",
                field="prompt_logprob_targets",
            )
        _check_range("prompt_logprob_targets", targets, shape.vocab_size)
    if batch.embeddings:
        _check_range("embeddings", np.array([want.row for want in batch.embeddings]), num_rows)
    check_copies(batch.copies, shape)
    _check_states(batch, shape)
    check_adapters(batch, shape.num_adapters)


def _check_states(batch: ExecutionBatch, shape: PoolShape) -> None:
    """Check that every row has a state of its own, in models with states."""
    if not shape.num_states:
        return
    num_rows = len(batch.query_lens)
    if len(batch.states) != num_rows:
        raise ValidationError(f"needs {num_rows} entries, got {len(batch.states)}", field="states")
    _check_range("states", batch.states, shape.num_states)
    if _num_different(batch.states) != num_rows:
        raise ValidationError("two rows would go on from one state", field="states")
    if batch.state_copies:
        _check_range("state_copies", np.array(batch.state_copies), shape.num_states)


def check_adapters(batch: ExecutionBatch, num_adapters: int) -> None:
    """Check that rows are computed with adapters that there are. Raises ValidationError."""
    adapters, num_rows = batch.adapters, len(batch.query_lens)
    if not len(adapters):
        return
    if len(adapters) != num_rows:
        raise ValidationError(f"needs {num_rows} entries, got {len(adapters)}", field="adapters")
    _check_range("adapters", adapters, num_adapters + 1)


def check_copies(copies: Sequence[BlockCopy], shape: PoolShape) -> None:
    """Check that blocks are copied between blocks that there are. Raises ValidationError."""
    if not copies:
        return
    device: list[int] = []
    host: list[int] = []
    for copy in copies:
        (host if copy.kind is CopyKind.SWAP_IN else device).append(copy.source)
        (host if copy.kind is CopyKind.SWAP_OUT else device).append(copy.destination)
    _check_range("copies", np.asarray(device), shape.num_blocks)
    _check_range("copies", np.asarray(host), shape.num_host_blocks)


def _check_range(name: str, values: npt.NDArray[np.generic], limit: int) -> None:
    """Raise ValidationError unless all values lie in 0 to limit − 1."""
    if values.size and (int(values.min()) < 0 or int(values.max()) >= limit):
        bad: BoolArray = (values < 0) | (values >= limit)  # type: ignore[operator]
        raise ValidationError(f"must be in 0 to {limit - 1}, got {values[bad].flat[0]}", field=name)
