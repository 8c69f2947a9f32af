"""The records of what lets a token see those before it, up to what it adds to the hidden states.

write:  norm → QKV → biases, norms of heads, rotate, write K and V
read:   attention → O, added to hidden
(of Qwen3.5 what attention gives is multiplied by the sigmoid of a product)
or read:        norm → Q, K, V, Z, B, A → Gated DeltaNet → O, added to hidden
(LFM2: norm → B, C, X → gated convolution → …; Granite 4: norm → X, B, C, Z, D
→ Mamba-2 → norm → O, added to hidden)
or write:       attention's, and then of a state beside it: norm → X, B, C, Z, D → Mamba-2 → O,
                added to hidden (Falcon-H1)
read:           attention → O, added to hidden
or write, read: attention over latents, `latent_records` → O, added to hidden
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from compute_plane.cpu.hidden_reads import HiddenReads
from compute_plane.cpu.latent_records import LatentRecords, make_attention
from compute_plane.cpu.packed_latents import PackedLatents
from compute_plane.cpu.packed_layers import PackedAttention
from compute_plane.cpu.packed_recurrences import PackedMamba2
from compute_plane.cpu.pieces import PIECE_TOKENS
from compute_plane.cpu.product_records import HiddenRows, ProductRecords, float_bits
from compute_plane.cpu.recurrence_records import RecurrenceRecords, rows_width
from compute_plane.cpu.step_table import StepTable
from compute_plane.cpu.token_records import TokenRecords
from compute_plane.memory.huge_pages import HugePageArena
from compute_plane.model.mamba2 import Mamba2
from kernels.cpu.catalogue import grouped_rows, normed_rows, plain_rows
from kernels.cpu.operands import RowInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compute_plane.cpu.packed_layers import PackedLayer, PackedMatrix
    from compute_plane.cpu.packed_recurrences import PackedRecurrence
    from compute_plane.cpu.row_buffers import RowBuffers
    from compute_plane.memory.kv_pool import KvPool
    from compute_plane.memory.state_pool import StatePool
    from compute_plane.model.spec import ModelSpec

FLOAT_BYTES: Final = 4


class MixerRecords:
    """Adds records to a table; methods return their addresses.

    `first_layer`: of the model, the first one whose records are wanted. `step_rows`: of buffers
    that hold all tokens of a step. `states`: of models with such
    layers. `hidden`: how hidden states are read. `before`: what a piece needs once, which
    its positions alone decide.
    """

    def __init__(
        self,
        table: StepTable,
        arena: HugePageArena,
        spec: ModelSpec,
        kv_pool: KvPool,
        *,
        first_layer: int,
        step_rows: int,
        states: StatePool | None,
        hidden: HiddenReads,
    ) -> None:
        self._spec, self._hidden = spec, hidden
        kinds = spec.kinds_of_heads
        heads_width = max(heads.query_size + 2 * heads.kv_size for heads in kinds)
        query_size = max(heads.query_size for heads in kinds)
        if spec.latents is not None:  # has buffers of its own
            heads_width = query_size = 0
        recurrence = spec.recurrence
        own_rows = 0 if recurrence is None else rows_width(recurrence)
        out_size = 0 if recurrence is None else recurrence.out_size

        def floats(width: int) -> int:
            return arena.take(FLOAT_BYTES * PIECE_TOKENS * width).ctypes.data

        self._projected = floats(max(heads_width, own_rows))
        self._attended = floats(max(query_size, out_size))
        self.widest = max(spec.attended_size, query_size, out_size)
        """Elements of the widest rows that products read of what a mixer gives."""
        if spec.latents is not None:
            self.widest = max(self.widest, spec.latents.query_rank)
        self._attention = make_attention(
            table,
            arena,
            spec,
            kv_pool,
            first_layer=first_layer,
            max_tokens=step_rows,
            max_rows=PIECE_TOKENS,
            heads=(self._projected, self._attended),
        )
        self._recurrence = None
        if recurrence is not None and states is not None:
            self._recurrence = RecurrenceRecords(
                table,
                arena,
                recurrence,
                states,
                first_layer=first_layer,
                max_rows=PIECE_TOKENS,
                rows=self._projected,
                out=self._attended,
            )
        self.before = tuple(self._attention.before)

    def rows_between(self, index: int) -> list[tuple[int, int]]:
        """Return address and width of rows that `write` of a layer leaves to its `read`.

        Of buffers that hold all tokens of a step.
        """
        attention = self._attention
        if isinstance(attention, LatentRecords):
            return []
        return attention.rows_between(index)

    @property
    def rows_of_heads(self) -> RowBuffers | None:
        """The rows that products of heads read, of models that have such."""
        attention = self._attention
        return attention.rows if isinstance(attention, LatentRecords) else None

    @property
    def num_slots(self) -> int:
        """Partials of attention that a piece has room for (`kernels.cpu.attention_plan`)."""
        return self._attention.num_slots

    @property
    def scratch_bytes(self) -> int:
        """What a worker needs for all but products."""
        of_states = 0 if self._recurrence is None else self._recurrence.scratch_bytes
        return max(self._attention.scratch_bytes, of_states)

    def added(
        self, index: int, layer: PackedLayer, records: TokenRecords, hidden: HiddenRows
    ) -> tuple[list[int], list[int]]:
        """Return what is to be done before all keys and values are there, and what then."""
        mixer = layer.mixer
        if mixer is None:
            return [], []
        if isinstance(mixer, PackedAttention):
            write, read = self._attention_of(index, layer, mixer, records)
        elif isinstance(mixer, PackedLatents):
            write, read = self._latents_of(index, layer, mixer, records)
        else:
            write, read = [], self._recurrence_of(index, layer, mixer, records.products)
        if layer.beside is not None:
            # Attention has read the hidden states, and later tokens need the state as they do keys.
            write += self._recurrence_of(index, layer, layer.beside, records.products)
            write += records.products.added(layer.beside.o, hidden)
        hidden = replace(hidden, bias=mixer.o_bias)
        return write, [*read, *records.products.added(mixer.o, hidden)]

    def _attention_of(
        self, index: int, layer: PackedLayer, mixer: PackedAttention, records: TokenRecords
    ) -> tuple[list[int], list[int]]:
        """Return what writes keys and values, and what attends, up to the product behind it."""
        products, attention = records.products, self._attention
        if isinstance(attention, LatentRecords):
            raise TypeError("a model with latents has no layers without")
        write = [
            *products.rows(*self._hidden.read(layer.attn_norm, mixer.qkv)),
            *products.beside_each_other(
                mixer.qkv, self._projected, sum(matrix.n for matrix in mixer.qkv)
            ),
            *attention.rope_write(index, mixer, self._hidden.epsilon),
        ]
        read = attention.attend(index, mixer)
        if mixer.gate is not None:  # its rows are the piece's, so they are made when it is read
            width = self._spec.query_size
            read += [
                *products.rows(*self._hidden.read(layer.attn_norm, [mixer.gate])),
                *products.product(mixer.gate, self._projected, width),
                attention.gate(self._projected),
            ]
        return write, [*read, *self._attended_rows(mixer.o, mixer.o.k, products)]

    def _latents_of(
        self, index: int, layer: PackedLayer, mixer: PackedLatents, records: TokenRecords
    ) -> tuple[list[int], list[int]]:
        """Return what writes latents, and what attends, up to the product behind it."""
        products, attention, epsilon = records.products, self._attention, self._hidden.epsilon
        if records.heads is None or not isinstance(attention, LatentRecords):
            raise TypeError("a model without latents has layers with them")

        def read(matrices: Sequence[PackedMatrix]) -> list[int]:
            return products.rows(*self._hidden.read(layer.attn_norm, matrices))

        return (
            attention.write(index, mixer, products, read, epsilon),
            attention.attend(index, mixer, products, records.heads, read, epsilon),
        )

    def _recurrence_of(
        self,
        index: int,
        layer: PackedLayer,
        mixer: PackedRecurrence,
        products: ProductRecords,
    ) -> list[int]:
        """Return what lets tokens through their states, up to the product behind."""
        if self._recurrence is None:
            raise ValueError("a model with states needs a pool of them")
        norm = mixer.norm if isinstance(mixer, PackedMamba2) else None
        return [
            *products.rows(*self._hidden.read(layer.attn_norm, mixer.inputs)),
            *self._recurrence.run(index, mixer, products, self._hidden.epsilon),
            *self._attended_rows(mixer.o, mixer.o.k, products, norm),
        ]

    def _attended_rows(
        self, o: PackedMatrix, width: int, products: ProductRecords, norm: int | None = None
    ) -> list[int]:
        """Make the rows that a product reads of what a mixer gave. `norm`: Mamba-2's."""
        operands: dict[int, int] = {
            RowInput.SOURCE: self._attended,
            RowInput.SOURCE_STRIDE: width,
        }
        of = self._spec.recurrence
        if norm is None or not isinstance(of, Mamba2):
            return products.rows(plain_rows, [o], operands)
        operands |= {RowInput.WEIGHT: norm, RowInput.EPSILON: float_bits(of.norm_eps)}
        if of.num_groups == 1:
            return products.rows(normed_rows, [o], operands)
        operands[RowInput.NUM_GROUPS] = of.num_groups
        return products.rows(grouped_rows, [o], operands)
