"""A batch as the device wants it: decoding rows first, every number a column to be copied.

    sent      │ row 0: 4 tokens │ row 1: 1 │ row 2: 9 tokens │ row 3: 1 │
    tokens    │ row 1 │ row 3 │ row 0      │ row 2                     │
                decode          prefill

A row of one token is attended by the decode kernel, whatever it is, a longer one by the prefill
kernel; everything else treats all tokens alike. (Steps of decoding rows only that a captured graph
holds go another way, `decode_steps`.)

Once all keys and values are written, tokens go on alone whose output somebody wants (ADR 0043):
the last one of a prompt, none of a chunk. Each is a row of one token then:

    late      │ row 1 │ row 3 │ last of row 2 │

In a step with adapters rows that decode are sorted by adapter, and so are the others (`adapters`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from compute_plane.cuda.operands import PADDING_SLOT, PrefillRows, QueryTiles, StateRows
from compute_plane.cuda.state_pool import empty_rows, fill_rows
from compute_plane.cuda.table_updates import TableColumns
from compute_plane.executor.adapter_runs import AdapterRuns, runs_of
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
    `states`: those that all rows go on from; None: the model has none. `late`: the tokens that go
    on alone; None: all do. `adapters`: of which tokens, if any have one.
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
    late: LateTokens | None = None
    adapters: AdapterRuns = ()


@dataclass(frozen=True, slots=True)
class LateTokens:
    """Tokens of a step that go on alone once all keys and values are written.

    `tokens`: int64 [R], which of the step's they are, rising. `step`: they alone, each a row of its
    own; their keys and values are in the pool already.
    """

    tokens: Tensor
    step: StepTensors


class BatchLayout:
    """The tokens of a batch in the device's order, checked.

    `tile_tokens`: as in `DeviceOperations`. Raises ValidationError, naming the field, for a batch
    that is malformed. `tokens`: as sent.
    """

    def __init__(
        self,
        batch: ExecutionBatch,
        shape: PoolShape,
        *,
        max_tokens: int,
        tile_tokens: tuple[int, ...],
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
        self._used = -(-self._seq_lens // shape.block_size)
        self._tables = TableColumns(self.tokens.block_tables)
        self._states = batch.states if shape.num_states else None
        self._longest_late = 0
        self._late_adapters: AdapterRuns = ()
        is_decode: BoolArray = self._query_lens == 1
        self.num_decode = int(np.count_nonzero(is_decode))
        rows, adapters = self.tokens.token_rows, batch.adapters
        self._adapters = adapters[rows] if adapters.any() else None
        if self._adapters is None:
            self._row_order: Int64Array = np.argsort(~is_decode, kind="stable")
            self._token_order: Int64Array = np.argsort(~is_decode[rows], kind="stable")
        else:
            self._row_order = np.lexsort((adapters, ~is_decode))
            self._token_order = np.lexsort((self._adapters, ~is_decode[rows]))

    @property
    def rooms(self) -> dict[str, tuple[int, ...]]:
        """Memory that the columns returned last need beside them (`StagingRing.upload`)."""
        return self._tables.rooms

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
        if self.is_decode and self._adapters is None:
            return tokens
        places = np.empty_like(self._token_order)
        places[self._token_order] = np.arange(len(places))
        return places[tokens]

    def late_tokens(self, wanted: Int64Array) -> Int64Array | None:
        """Return those whose output is `wanted`, rising; None if all tokens may as well go on.

        As the device numbers them. There are no more than rows: what their block tables take is
        bounded by that.
        """
        if self.is_decode:
            return None
        taken: Int64Array = np.unique(wanted)
        return taken if len(taken) <= len(self._query_lens) else None

    def columns(self, late: Int64Array | None = None) -> dict[str, Array]:
        """Return the columns of the tokens; those of prefill rows only if there are any.

        `late`: as of `late_tokens`.
        """
        sent, order = self.tokens, self._token_order
        decode = self._row_order[: self.num_decode]
        columns: dict[str, Array] = {
            "token_ids": sent.token_ids[order],
            "positions": sent.positions[order],
            "kv_slots": sent.kv_slots[order],
            "decode_lens": self._seq_lens[decode].astype(np.int32),
        }
        self._tables.rooms.clear()
        columns |= self._tables.columns("decode_tables", decode, self._used[decode])
        if not self.is_decode:
            columns |= self._prefill_columns()
        if self._states is not None:
            columns |= self._state_columns(self._states)
        if late is not None:
            columns |= self._late_columns(late)
        return columns

    def _late_columns(self, late: Int64Array) -> dict[str, Array]:
        taken = self._token_order[late]
        positions, rows = self.tokens.positions[taken], self.tokens.token_rows[taken]
        self._longest_late = int(positions.max(initial=-1)) + 1
        self._late_adapters = self._runs(taken)
        used = positions.astype(np.int64) // self._block_size + 1
        return {
            "late_tokens": late,
            "late_positions": positions,
            "late_slots": np.full(len(late), PADDING_SLOT, dtype=np.int64),
            "late_lens": (positions + 1).astype(np.int32),
            **self._tables.columns("late_tables", rows, used),
        }

    def _prefill_columns(self) -> dict[str, Array]:
        prefill = self._row_order[self.num_decode :]
        query_lens, seq_lens = self._query_lens[prefill], self._seq_lens[prefill]
        columns: dict[str, Array] = {
            "prefill_lens": seq_lens.astype(np.int32),
            "cu_query_lens": np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32),
            **self._tables.columns("prefill_tables", prefill, self._used[prefill]),
        }
        for kind, tile_tokens in enumerate(self._tile_tokens):
            tiles = plan_tiles(query_lens, seq_lens, tile_tokens)
            columns |= {f"tile_rows_{kind}": tiles.rows, f"tile_tokens_{kind}": tiles.tokens}
        return columns

    def _state_columns(self, states: Int32Array) -> dict[str, Array]:
        """Return which rows go on from which states, as `StateRows` has it."""
        order, rows = self._row_order, empty_rows(len(self._row_order))
        lengths = self._query_lens[order]
        firsts, positions = np.cumsum(lengths) - lengths, self._seq_lens[order] - lengths
        fill_rows(rows, firsts, lengths, states[order], positions)
        numbers = np.arange(len(order), dtype=np.int32)
        return {"state_rows": rows, "token_rows": np.repeat(numbers, lengths)}

    def tensors(self, columns: dict[str, Tensor]) -> StepTensors:
        """Return the step over its columns on the device, where tables are put together."""
        prefill = self._row_order[self.num_decode :]
        rows = None
        if len(prefill):
            rows = PrefillRows(
                self._tables.put_together("prefill_tables", columns),
                columns["prefill_lens"],
                columns["cu_query_lens"],
                tuple(
                    QueryTiles(columns[f"tile_rows_{kind}"], columns[f"tile_tokens_{kind}"])
                    for kind in range(len(self._tile_tokens))
                ),
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
            self._tables.put_together("decode_tables", columns),
            columns["decode_lens"],
            int(self._seq_lens[decode].max(initial=0)),
            rows,
            states,
            self._late(columns) if "late_tokens" in columns else None,
            self._runs(self._token_order),
        )

    def _late(self, columns: dict[str, Tensor]) -> LateTokens:
        """Return the tokens that go on alone, over the columns on the device."""
        tokens = columns["late_tokens"]
        step = StepTensors(
            token_ids=tokens,  # nobody looks at them any more
            positions=columns["late_positions"],
            kv_slots=columns["late_slots"],
            num_decode=len(tokens),
            decode_tables=self._tables.put_together("late_tables", columns),
            decode_lens=columns["late_lens"],
            longest=self._longest_late,
            prefill=None,
            adapters=self._late_adapters,
        )
        return LateTokens(tokens, step)

    def _runs(self, tokens: Int64Array) -> AdapterRuns:
        """Return the runs of one adapter among tokens, which are numbered as sent."""
        return () if self._adapters is None else runs_of(self._adapters[tokens])

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
