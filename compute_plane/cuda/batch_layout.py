"""A batch as the device wants it: decoding rows first, every number a column to be copied.

    sent      │ row 0: 4 tokens │ row 1: 1 │ row 2: 9 tokens │ row 3: 1 │
    tokens    │ row 1 │ row 3 │ row 0      │ row 2                     │
                decode          prefill

A row of one token is attended by the decode kernel, whatever it is, a longer one by the prefill
kernel; everything else treats all tokens alike. (Steps of decoding rows only that a captured graph
holds go another way, `decode_steps`.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from compute_plane.cuda.operands import PrefillRows, StateRows
from compute_plane.cuda.state_pool import empty_rows, fill_rows
from compute_plane.executor.interface import BoolArray, ExecutionBatch, Int32Array
from compute_plane.executor.token_layout import PoolShape, TokenLayout, lay_out_tokens
from kernels.cuda.attention_tiles import plan_tiles
from planes.errors import ValidationError

Array = npt.NDArray[Any]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The tokens of a step on the device.

    `token_ids`, `positions`: int32 [T]. `kv_slots`: int64 [T]. `num_decode`: tokens that are rows
    of their own, the first ones; `decode_tables`: int32 [num_decode, M]; `decode_lens`: int32
    [num_decode]; `longest`: none of them is longer. `prefill`: the rows of the other tokens.
    `states`: those that all rows go on from; None: the model has none.
    """

    token_ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    num_decode: int
    decode_tables: Tensor
    decode_lens: Tensor
    longest: int
    prefill: PrefillRows | None
    states: StateRows | None = None


class BatchLayout:
    """The tokens of a batch in the device's order, checked.

    `tile_tokens`: as in `DeviceOperations`. Raises ValidationError, naming the field, for a batch
    that is malformed. `tokens`: as sent.
    """

    def __init__(
        self, batch: ExecutionBatch, shape: PoolShape, *, max_tokens: int, tile_tokens: int
    ) -> None:
        self._tile_tokens = tile_tokens
        self.tokens: TokenLayout = lay_out_tokens(batch, shape)
        num_tokens = len(self.tokens.token_ids)
        if num_tokens > max_tokens:
            raise ValidationError(
                f"must be at most {max_tokens} tokens, got {num_tokens}", field="query_lens"
            )
        self._query_lens = batch.query_lens.astype(np.int64)
        self._seq_lens = batch.seq_lens.astype(np.int64)
        self._check_positions()
        self._block_size = shape.block_size
        self._states = batch.states if shape.num_states else None
        is_decode: BoolArray = self._query_lens == 1
        self.num_decode = int(np.count_nonzero(is_decode))
        self._row_order: Int64Array = np.argsort(~is_decode, kind="stable")
        is_decode_token = is_decode[self.tokens.token_rows]
        self._token_order: Int64Array = np.argsort(~is_decode_token, kind="stable")

    @property
    def is_decode(self) -> bool:
        """Whether every row has one token."""
        return self.num_decode == len(self._query_lens)

    def check_lengths(self, longest: int) -> None:
        """Raise ValidationError for a sequence longer than `longest` tokens."""
        if int(self._seq_lens.max()) > longest:
            raise ValidationError(
                f"must be at most {longest}, got {self._seq_lens.max()}", field="seq_lens"
            )

    def places(self, tokens: Int64Array) -> Int64Array:
        """Return where tokens, numbered as sent, are on the device."""
        if self.is_decode:
            return tokens
        places = np.empty_like(self._token_order)
        places[self._token_order] = np.arange(len(places))
        return places[tokens]

    def columns(self) -> dict[str, Array]:
        """Return the columns of the tokens; those of prefill rows only if there are any."""
        sent, order = self.tokens, self._token_order
        decode = self._row_order[: self.num_decode]
        columns: dict[str, Array] = {
            "token_ids": sent.token_ids[order],
            "positions": sent.positions[order],
            "kv_slots": sent.kv_slots[order],
            "decode_lens": self._seq_lens[decode].astype(np.int32),
            "decode_tables": self._tables(decode),
        }
        if not self.is_decode:
            columns |= self._prefill_columns()
        if self._states is not None:
            columns |= self._state_columns(self._states)
        return columns

    def _prefill_columns(self) -> dict[str, Array]:
        prefill = self._row_order[self.num_decode :]
        query_lens, seq_lens = self._query_lens[prefill], self._seq_lens[prefill]
        tiles = plan_tiles(query_lens, seq_lens, self._tile_tokens)
        return {
            "prefill_lens": seq_lens.astype(np.int32),
            "prefill_tables": self._tables(prefill),
            "cu_query_lens": np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32),
            "tile_rows": tiles.rows,
            "tile_tokens": tiles.tokens,
        }

    def _state_columns(self, states: Int32Array) -> dict[str, Array]:
        """Return which rows go on from which states, as `StateRows` has it."""
        order, rows = self._row_order, empty_rows(len(self._row_order))
        lengths = self._query_lens[order]
        firsts, positions = np.cumsum(lengths) - lengths, self._seq_lens[order] - lengths
        fill_rows(rows, firsts, lengths, states[order], positions)
        numbers = np.arange(len(order), dtype=np.int32)
        return {"state_rows": rows, "token_rows": np.repeat(numbers, lengths)}

    def tensors(self, columns: dict[str, Tensor]) -> StepTensors:
        """Return the step over its columns on the device."""
        prefill = self._row_order[self.num_decode :]
        rows = None
        if len(prefill):
            rows = PrefillRows(
                columns["prefill_tables"],
                columns["prefill_lens"],
                columns["cu_query_lens"],
                columns["tile_rows"],
                columns["tile_tokens"],
            )
        states = None
        if self._states is not None:
            states = StateRows(columns["state_rows"], columns["token_rows"], len(prefill))
        decode = self._row_order[: self.num_decode]
        return StepTensors(
            columns["token_ids"],
            columns["positions"],
            columns["kv_slots"],
            len(columns["decode_lens"]),
            columns["decode_tables"],
            columns["decode_lens"],
            int(self._seq_lens[decode].max(initial=0)),
            rows,
            states,
        )

    def _tables(self, rows: Int64Array) -> Array:
        """Return the block tables of some rows, as wide as the longest of them needs."""
        width = -(-int(self._seq_lens[rows].max(initial=0)) // self._block_size)
        return self.tokens.block_tables[rows, :width]

    def _check_positions(self) -> None:
        """Check that each row's tokens are the last ones of its sequence, in order."""
        sent, rows = self.tokens, self.tokens.token_rows
        in_row = np.arange(len(rows)) - (sent.row_ends - self._query_lens)[rows]
        expected = (self._seq_lens - self._query_lens)[rows] + in_row
        wrong = sent.positions != expected
        if wrong.any():
            token = int(wrong.argmax())
            raise ValidationError(
                f"row {rows[token]} ends at position {self._seq_lens[rows[token]] - 1}, so token "
                f"{token} of the batch must be at {expected[token]}, got {sent.positions[token]}",
                field="positions",
            )
