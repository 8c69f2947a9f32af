"""The inputs of decode graphs on the device, and how the host's bytes come to lie there.

All graphs read one memory: one runs at a time. For a graph of R rows it is laid out as

    │ how R samples are drawn, │ tokens, positions, lengths, slots, │ blocks of tables │
    │ adjusted, listed         │ places of R rows and samples       │                  │
      stays from step to step    new in every step                    only those that are new

and beside it are the block tables [R, M] that kernels read, as wide as the longest sequence there
can be: the blocks that a step has sent are put in place there on the device (`table_updates`). So a
step is one copy, of the middle alone, or to either side as far as something has changed. What the
rows go on from, in models with states, is in the middle, too.

Array letters: R rows of the graph, S rows of the step, M table width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from compute_plane.cuda.batch_layout import StepTensors
from compute_plane.cuda.columns import ALIGNMENT, Layout
from compute_plane.cuda.operands import PADDING_SLOT, StateRows
from compute_plane.cuda.state_pool import fill_rows
from kernels.cuda.recurrent_states import ROW_NUMBERS

if TYPE_CHECKING:
    from torch import Tensor

    from compute_plane.cuda.columns import Array
    from compute_plane.cuda.drivers import Driver
    from compute_plane.cuda.table_updates import KnownTables

INT_BYTES: Final = 4
PLACE_BYTES: Final = 8
MAX_VIEWS: Final = 64
"""Tensors of sent block tables that are kept made, by their shape: few at a time, others later."""

STAYING: Final = {
    "draw_rows": np.int32,
    "top_ks": np.int32,
    "sample_indexes": np.int32,
    "seeds": np.int64,
    "inverse_temperatures": np.float64,
    "top_ps": np.float64,
    "min_ps": np.float64,
    "sample_rows": np.int32,
    "sample_counts": np.int32,
    "adjust_rows": np.int32,
    "repetition_penalties": np.float32,
    "presence_penalties": np.float32,
    "frequency_penalties": np.float32,
    "history_starts": np.int64,
    "num_prompts": np.int32,
    "bias_starts": np.int32,
    "awaited_tokens": np.int64,
    "awaited_samples": np.int64,
}
"""Columns of the step's samples that stay, and of tokens that are samples of the step before."""
MOVING: Final = {
    "token_ids": np.int32,
    "positions": np.int32,
    "decode_lens": np.int32,
    "kv_slots": np.int64,
    "sample_positions": np.int64,
    "history_lengths": np.int32,
    "history_rows": np.int64,
    "history_ends": np.int64,
}
"""Columns that every step has anew."""
STATE_ROWS: Final = "state_rows"
"""Another one, in models with states: `StateRows.rows`, those of padding without tokens."""


def rows_layout(num_rows: int, *, has_states: bool = False) -> Layout:
    """Return the columns of a graph of so many rows; `has_states`: of a model with states."""
    arrays: dict[str, tuple[type, tuple[int, ...]]]
    arrays = {name: (dtype, (num_rows,)) for name, dtype in (STAYING | MOVING).items()}
    arrays["bias_starts"] = STAYING["bias_starts"], (num_rows + 1,)
    if has_states:
        arrays[STATE_ROWS] = np.int32, (num_rows, ROW_NUMBERS)
    return Layout(arrays)


def bytes_of_inputs(num_rows: int, table_width: int, *, has_states: bool = False) -> int:
    """Return what the inputs of graphs of up to so many rows take."""
    columns = rows_layout(num_rows, has_states=has_states).num_bytes
    numbers = INT_BYTES * num_rows if has_states else 0
    return columns + 2 * INT_BYTES * num_rows * table_width + numbers + ALIGNMENT


class InputMemory:
    """The memory of the inputs of graphs of up to `num_rows` rows; its tables are zeroed.

    `has_states`: of models with states; `token_rows`: int32 [num_rows], the row of each token, of
    such models. What lies there, as far as the host knows, else None: `staying`, a
    `HostRows.staying` of the staying columns; `tables_known`, of the tables.
    """

    def __init__(
        self, driver: Driver, num_rows: int, table_width: int, *, has_states: bool = False
    ) -> None:
        self.num_rows = num_rows
        self.has_states = has_states
        table_bytes = INT_BYTES * num_rows * table_width
        column_bytes = rows_layout(num_rows, has_states=has_states).num_bytes
        self.columns: Tensor = driver.device_buffer(column_bytes + table_bytes)
        tables = driver.device_buffer(table_bytes)
        self.tables: Tensor = tables.view(torch.int32).view(num_rows, table_width)
        self.tables.zero_()
        self.flat_tables = self.tables.view(-1)
        self.token_rows: Tensor | None = None
        if has_states:
            self.token_rows = torch.arange(num_rows, dtype=torch.int32, device=tables.device)
        self.forget()

    def forget(self) -> None:
        """Note that anything may lie there."""
        self.staying: object = None
        self.tables_known: KnownTables | None = None


class _SentTables(NamedTuple):
    """A `TableUpdate` on the device; `target`: where the rectangle belongs."""

    places: Tensor
    blocks: Tensor
    rectangle: Tensor
    target: Tensor


class GraphInputs:
    """The inputs of the graph of R rows: padding at first.

    `step`: as the graph has them. `layout`: of the columns in the memory's bytes.
    """

    def __init__(self, memory: InputMemory, num_rows: int, longest: int) -> None:
        self.memory = memory
        self.num_rows = num_rows
        self.layout = rows_layout(num_rows, has_states=memory.has_states)
        self.first_moving = self.layout.fields["token_ids"].offset
        self.columns = self.layout.tensors(memory.columns)
        states = None
        if memory.token_rows is not None:
            states = StateRows(self.columns[STATE_ROWS], memory.token_rows[:num_rows], num_long=0)
        self.step = StepTensors(
            self.columns["token_ids"],
            self.columns["positions"],
            self.columns["kv_slots"],
            num_rows,
            memory.tables[:num_rows],
            self.columns["decode_lens"],
            longest,
            None,
            states,
        )
        self._sent_tables: dict[tuple[int, int, int], _SentTables] = {}
        memory.forget()
        for name in self.layout.fields.keys() - STAYING.keys():
            self.columns[name].zero_()
        self.step.kv_slots.fill_(PADDING_SLOT)

    def take_tables(self, num_entries: int, rows: int, width: int) -> None:
        """Queue the copy of a `TableUpdate` that was sent to the tables that the graph reads."""
        shape = num_entries, rows, width
        sent = self._sent_tables.get(shape)
        if sent is None:
            if len(self._sent_tables) == MAX_VIEWS:
                self._sent_tables.clear()
            sent = self._sent_tables[shape] = self._views(*shape)
        if num_entries:
            self.memory.flat_tables.index_copy_(0, sent.places, sent.blocks)
        if width:
            sent.target.copy_(sent.rectangle)

    def _views(self, num_entries: int, rows: int, width: int) -> _SentTables:
        first = self.layout.num_bytes
        sent = self.memory.columns[first:]
        num_places = PLACE_BYTES * num_entries
        num_listed = num_places + INT_BYTES * num_entries
        end = num_listed + INT_BYTES * rows * width
        return _SentTables(
            sent[:num_places].view(torch.int64),
            sent[num_places:num_listed].view(torch.int32),
            sent[num_listed:end].view(torch.int32).view(rows, width),
            self.step.decode_tables[:rows, :width],
        )


class HostRows:
    """The columns of a graph of R rows as the host fills them in; they stay from step to step.

    `arrays`: by name, as in `rows_layout`. `staying`: what the staying columns say, whatever it is
    called.
    """

    def __init__(self, inputs: GraphInputs) -> None:
        self.bytes: Array = np.zeros(inputs.layout.num_bytes, dtype=np.uint8)
        self.arrays = inputs.layout.views(self.bytes)
        self.arrays["kv_slots"].fill(PADDING_SLOT)
        self.num_rows = 0
        self.staying: object = None
        self._moving = self.arrays.keys() - STAYING.keys()
        self._every: Array = np.arange(inputs.num_rows, dtype=np.int32)

    def resize(self, num_rows: int) -> None:
        """Make rows from `num_rows` on padding again."""
        if num_rows < self.num_rows:
            for name in self._moving:
                self.arrays[name][num_rows:] = PADDING_SLOT if name == "kv_slots" else 0
        self.num_rows = num_rows

    def fill_states(self, states: Array, positions: Array) -> None:
        """Fill in which states the rows go on from, [S] each."""
        num_rows = len(states)
        rows = self.arrays[STATE_ROWS][:num_rows]
        fill_rows(rows, self._every[:num_rows], 1, states, positions)
