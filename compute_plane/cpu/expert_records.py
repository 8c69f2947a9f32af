"""The records of a mixture of experts, in the place of those of one MLP.

    normed rows ─→ router ─→ route ─→ group by expert
         └───────────────────────────→ rows of experts ─→ gate, up ─→ SiLU · up ─→ down ─→ add

What all tokens go through besides comes behind that, as one MLP would; it works where the normed
rows lie, which experts have taken theirs from by then:

    normed rows ─→ gate, up ─→ SiLU · up ─→ down ─→ (times the sigmoid of its own gate) add

Where there are biases, they are added behind the router, where rows are gated, and at the end.

A record of a product stands for all experts (`kernels.cpu.expert_product`): the shared one it
calls, of the first expert, is made as that of any matrix is, but nobody walks to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from compute_plane.cpu.expert_buffers import FLOAT_BYTES, ExpertBuffers
from compute_plane.cpu.product_records import (
    MLP_ROWS,
    MOST_PRODUCT_CHUNKS,
    HiddenRows,
    ProductRecords,
    float_bits,
)
from compute_plane.cpu.row_buffers import RowBuffers
from kernels.cpu.catalogue import (
    add_experts,
    add_normed_rows,
    add_shared,
    clamped_rows,
    expert_product,
    group_by_expert,
    route_tokens,
    rows_of_experts,
)
from kernels.cpu.operands import (
    NUM_BESIDE,
    ExpertProduct,
    NormedSum,
    Routing,
    RowFormat,
    RowInput,
    group_bytes,
    row_bytes,
)
from kernels.cpu.operation import StepWord
from kernels.cpu.routing_sizes import EXPERT_CALL_BYTES, routing_scratch_bytes

if TYPE_CHECKING:
    from compute_plane.cpu.packed_layers import (
        ExpertBiases,
        PackedExperts,
        PackedMatrix,
        PackedMlp,
        PackedOwnNorms,
        PackedShared,
    )
    from compute_plane.cpu.step_table import StepTable

BESIDE: Final = (
    RowInput.OUT_SCALES,
    RowInput.OUT_SCALED_SUMS,
    RowInput.OUT_SUMS,
    RowInput.OUT_PAIR_SUMS,
    RowInput.OUT_BEGINS,
)


class ExpertRecords:
    """Adds mixtures to a table, for one kind of tokens.

    `token_rows`: where the rows of tokens lie. `products`: those of tokens; `experts`: others, on
    the buffers' rows, of the same kind of tokens. `scratch_bytes`: what a worker needs.
    """

    def __init__(
        self,
        table: StepTable,
        buffers: ExpertBuffers,
        token_rows: RowBuffers,
        products: ProductRecords,
        *,
        of_prompt: bool,
    ) -> None:
        self._table = table
        self._buffers = buffers
        self._token_rows = token_rows
        self._products = products
        self._experts = ProductRecords(table, buffers.rows, of_prompt=of_prompt, fetches=False)

    @property
    def scratch_bytes(self) -> int:
        """Return the bytes, with what a call of an expert's product takes behind them."""
        needed = max(
            self._experts.scratch_bytes,
            routing_scratch_bytes(self._buffers.mixture.num_experts, self._buffers.hidden_size),
        )
        return needed + EXPERT_CALL_BYTES

    def added(self, experts: PackedExperts, hidden: int, sums: int) -> list[int]:
        """Route rows that are made already, multiply, and add to the hidden states.

        `sums`: address of float32 [tokens, gate | up] of what all tokens go through.
        """
        return [
            *self._routed(experts),
            *self._multiplied(experts),
            self._summed(experts, hidden),
            *([] if experts.shared is None else self._shared(experts.shared, hidden, sums)),
        ]

    def added_normed(
        self,
        experts: PackedExperts,
        norms: PackedOwnNorms,
        hidden: HiddenRows,
        sums: int,
        read: Callable[[int | None, Sequence[PackedMatrix]], list[int]],
        shared_norm: int | None,
    ) -> list[int]:
        """Do the same where parts of the mixture have norms of their own, before and behind them.

        `hidden`: with the norm of what is added. `read`: makes the rows that matrices read of
        hidden states, with a norm. `shared_norm`: before what all tokens go through.
        """
        buffers, products, shared = self._buffers, self._products, experts.shared
        if shared is None:
            raise ValueError("a mixture with norms of its own has an MLP for all tokens")
        outputs, mlp = self._token_rows.outputs, shared.mlp
        of_sum: dict[int, int] = {
            NormedSum.K: buffers.hidden_size,
            NormedSum.EPSILON: hidden.epsilon,
            NormedSum.PARTS: 1,
        }
        return [
            *read(shared_norm, mlp.gate_up),
            *products.gated_into(
                mlp.gate_up, mlp.down, sums, outputs, activation=buffers.activation
            ),
            self._table.add(
                add_normed_rows,
                StepWord.TOKEN_CHUNKS,
                {
                    **of_sum,
                    NormedSum.SOURCE: outputs,
                    NormedSum.SOURCE_FIRST_WORD: StepWord.ZERO,
                    NormedSum.BASE: buffers.zeros,
                    NormedSum.HIDDEN: buffers.added,
                    NormedSum.WEIGHT: norms.shared_output,
                    NormedSum.SCALE: float_bits(1.0),
                },
            ),
            *read(norms.router, [experts.router]),
            *self._routed(experts),
            *read(norms.experts, experts.first.gate_up),
            *self._multiplied(experts),
            self._summed(experts, buffers.added, hidden.epsilon),
            self._table.add(
                add_normed_rows,
                StepWord.TOKEN_CHUNKS,
                {
                    **of_sum,
                    NormedSum.SOURCE: buffers.added,
                    NormedSum.SOURCE_FIRST_WORD: StepWord.FIRST_TOKEN,
                    NormedSum.HIDDEN: hidden.address,
                    NormedSum.WEIGHT: hidden.norm or 0,
                    NormedSum.SCALE: float_bits(hidden.scale),
                },
            ),
        ]

    def _routed(self, experts: PackedExperts) -> list[int]:
        """Choose the experts of each token."""
        buffers, biases, norms = self._buffers, experts.biases, experts.norms
        return [
            *self._products.beside_each_other(
                [experts.router], buffers.logits, buffers.mixture.num_experts
            ),
            *self._products.bias(
                None if biases is None else biases.router,
                buffers.logits,
                buffers.mixture.num_experts,
                StepWord.ZERO,
            ),
            self._table.add(
                route_tokens,
                StepWord.TOKEN_CHUNKS,
                {
                    **buffers.routing,
                    **buffers.groups,
                    Routing.CORRECTION: experts.correction or 0,
                    Routing.EXPERT_SCALES: 0 if norms is None else norms.expert_scales,
                },
            ),
            self._table.add(group_by_expert, 1, buffers.routing),
        ]

    def _multiplied(self, experts: PackedExperts) -> list[int]:
        """Multiply the rows that tokens have made with their experts."""
        first = experts.first
        formats = dict.fromkeys(map(self._experts.format_of, first.gate_up))
        return [
            *(self._rows_of_experts(row_format, first.gate_up[0].k) for row_format in formats),
            *self._given(first, experts.stride_bytes, experts.biases),
        ]

    def _summed(self, experts: PackedExperts, out: int, epsilon: int = 0) -> int:
        """Add up what the experts of each token gave. `epsilon`: of the norm of that, if any."""
        buffers, biases, norms = self._buffers, experts.biases, experts.norms
        return self._table.add(
            add_experts,
            StepWord.TOKEN_CHUNKS,
            {
                **buffers.routing,
                Routing.SOURCE: buffers.given,
                Routing.OUT: out,
                Routing.N: buffers.hidden_size,
                Routing.BIASES: 0 if biases is None else biases.down,
                Routing.NORM: 0 if norms is None else norms.experts_output,
                Routing.EPSILON: epsilon,
            },
        )

    def _shared(self, shared: PackedShared, hidden: int, sums: int) -> list[int]:
        """Multiply what all tokens go through, and add it."""
        mlp, gate, products = shared.mlp, shared.gate, self._products
        if gate is None:
            of_all = HiddenRows(hidden)
            activation = self._buffers.activation
            return products.gated(mlp.gate_up, mlp.down, sums, of_all, activation=activation)
        outputs = self._token_rows.outputs
        return [
            *products.product(gate, self._buffers.gates, 1),
            *products.gated_into(mlp.gate_up, mlp.down, sums, outputs),
            self._table.add(
                add_shared,
                StepWord.TOKEN_CHUNKS,
                {
                    Routing.LOGITS: self._buffers.gates,
                    Routing.SOURCE: outputs,
                    Routing.OUT: hidden,
                    Routing.N: self._buffers.hidden_size,
                },
            ),
        ]

    def _rows_of_experts(self, row_format: RowFormat, k: int) -> int:
        of_tokens = self._token_rows.written(row_format)
        of_experts = self._buffers.rows.written(row_format)
        beside = np.array([[of_tokens[at], of_experts[at]] for at in BESIDE], dtype=np.int64)
        assert beside.shape == (NUM_BESIDE, 2)
        self._table.keep(beside)
        return self._table.add(
            rows_of_experts,
            StepWord.EXPERT_ROW_CHUNKS,
            {
                **self._buffers.routing,
                Routing.SOURCE: of_tokens[RowInput.OUT],
                Routing.OUT: of_experts[RowInput.OUT],
                Routing.ROW_BYTES: row_bytes(row_format, 1, k),
                Routing.BESIDE: beside.ctypes.data if row_format == RowFormat.INT8 else 0,
                Routing.GROUP_BYTES: group_bytes(1, k),
            },
        )

    def _given(self, mlp: PackedMlp, stride_bytes: int, biases: ExpertBiases | None) -> list[int]:
        """Multiply with gate and up, gate, multiply with down."""
        experts, down = self._experts, mlp.down
        out, stride = self._buffers.given, self._buffers.hidden_size
        fused = None
        if self._buffers.activation == "silu":
            fused = experts.gated_product(mlp.gate_up, down)
        if fused is None:
            gated = self._gated_apart(mlp, stride_bytes, biases)
            multiplied = experts.product(down, out, stride)
        else:
            width = row_bytes(RowFormat.BF16, 1, down.k)
            gated = self._of_all(fused, mlp.gate_up, stride_bytes, width)
            multiplied = experts.product(down, out, stride, experts.gated_input)
        return [*gated, *self._of_all(multiplied, [down], stride_bytes, FLOAT_BYTES * stride)]

    def _gated_apart(
        self, mlp: PackedMlp, stride_bytes: int, biases: ExpertBiases | None
    ) -> list[int]:
        """Multiply with gate and up, and make of the sums the rows that down reads.

        Experts with biases are those with a clamped gate.
        """
        buffers = self._buffers
        if biases is None:
            maker, own = MLP_ROWS[buffers.activation], dict[int, int]()
        else:
            maker, own = (
                clamped_rows,
                {
                    RowInput.BIASES: biases.gate_up,
                    RowInput.RUNS: buffers.routing[Routing.RUNS],
                },
            )
        width = sum(matrix.n for matrix in mlp.gate_up)
        shared = self._experts.beside_each_other(mlp.gate_up, buffers.sums, width)
        return [
            *self._of_all(shared, mlp.gate_up, stride_bytes, FLOAT_BYTES * width),
            *self._experts.rows(
                maker,
                [mlp.down],
                {
                    **own,
                    RowInput.SOURCE: buffers.sums,
                    RowInput.SOURCE_STRIDE: width,
                    RowInput.ROWS_WORD: StepWord.NUM_EXPERT_ROWS,
                },
                chunks=StepWord.EXPERT_ROW_CHUNKS,
            ),
        ]

    def _of_all(
        self,
        shared: Sequence[int],
        matrices: Sequence[PackedMatrix],
        stride_bytes: int,
        out_bytes: int,
    ) -> list[int]:
        """Return records for all experts. `shared`: those of the first one's matrices."""
        return [
            self._table.add(
                expert_product,
                MOST_PRODUCT_CHUNKS,
                {
                    ExpertProduct.RECORD: record,
                    ExpertProduct.RUNS: self._buffers.routing[Routing.RUNS],
                    ExpertProduct.WEIGHTS_BYTES: stride_bytes,
                    ExpertProduct.INPUT_BYTES: row_bytes(
                        self._experts.format_of(matrix), 1, matrix.k
                    ),
                    ExpertProduct.GROUP_BYTES: group_bytes(1, matrix.k),
                    ExpertProduct.OUT_BYTES: out_bytes,
                },
            )
            for record, matrix in zip(shared, matrices, strict=True)
        ]
