"""The operations on tensors of torch's CPU device, by `kernels.reference`: the specification.

Slow and plain. Every tensor is computed with in float32 and rounded once on the way out, as the
kernels of a device do, whatever its own dtype is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from compute_plane.cuda.dense_kernels import MOST_ROWS
from compute_plane.cuda.matrices import QuantizedMatrix, dense_product
from compute_plane.cuda.operands import (
    PLAIN,
    UNCHANGED,
    Around,
    HeadChanges,
    LayerAttention,
    LayerConvolution,
    LayerDeltaNet,
    LayerMamba2,
    PrefillRows,
    StateRows,
    num_kv_heads_of,
)
from compute_plane.cuda.reference_attention import Queries, attend
from compute_plane.cuda.reference_blocks import floats, write_tokens
from compute_plane.cuda.reference_experts import ReferenceExperts
from compute_plane.cuda.reference_latents import ReferenceLatents
from compute_plane.cuda.reference_logits import ReferenceLogits
from compute_plane.cuda.reference_recurrences import (
    go_through_convolution,
    go_through_delta_net,
    go_through_mamba2,
)
from kernels.cuda.quantized_formats import GATE_TURN
from kernels.cuda.quantized_layout import unpack_matrix
from kernels.cuda.quantized_strands import most_rows_of
from kernels.reference import delta_net, rope
from kernels.reference.gate_mul import GATE_MUL
from kernels.reference.quantized_matmul import dequantized
from kernels.reference.relu2 import relu2
from kernels.reference.rms_norm import rms_norm

if TYPE_CHECKING:
    from collections.abc import Callable

    from compute_plane.cuda.matrices import Matrix
    from compute_plane.cuda.next_product import NextProduct
    from compute_plane.model.architectures import Activation

Array = npt.NDArray[Any]


class ReferenceOperations(ReferenceLogits):
    """`DeviceOperations` in NumPy, on views of the tensors' memory. `activation`: what gates."""

    name = "reference"
    tile_tokens = (16,)  # the plan is made as for a device, and not needed

    def __init__(self, activation: Activation = "silu") -> None:
        self._activation = activation
        self._unpacked: WeakKeyDictionary[QuantizedMatrix, Tensor] = WeakKeyDictionary()
        self.experts = ReferenceExperts(self)
        self.latents = ReferenceLatents()

    def embedding(self, out: Tensor, table: Matrix, token_ids: Tensor) -> None:
        """Copy rows of a table."""
        if isinstance(table, QuantizedMatrix):
            out.copy_(self._values(table)[token_ids])
        else:
            torch.index_select(table.values, 0, token_ids, out=out)

    def quantized_matmul(
        self,
        out: Tensor,
        x: Tensor,
        matrix: QuantizedMatrix,
        first_column: int,
        bias: Tensor | None = None,
    ) -> None:
        """Multiply with the weights, unpacked to float32."""
        product = x.float() @ self._values(matrix).t()
        if bias is not None:
            product += bias
        out[:, first_column : first_column + matrix.num_outputs] = product

    def takes_gate(self, num_rows: int, matrix: QuantizedMatrix) -> bool:
        """Whether rows are few, as for a device."""
        return num_rows <= most_rows_of(matrix.format)

    def quantized_gate(self, out: Tensor, x: Tensor, matrix: QuantizedMatrix) -> None:
        """Multiply, not rounded, and gate."""
        product = torch.empty((len(x), matrix.num_outputs), dtype=torch.float32)
        self.quantized_matmul(product, x, matrix, 0)
        self.gate_mul(out, product, in_turns=True)

    def takes_product(self, num_rows: int, weight: Tensor) -> bool:  # noqa: ARG002 - any matrix
        """Whether rows are few, as for a device."""
        return num_rows <= MOST_ROWS

    def normalises_product(self, weight: Tensor) -> bool:  # noqa: ARG002 - any matrix
        """Whether it does: always."""
        return True

    def dense_matmul(self, out: Tensor, x: Tensor, weight: Tensor, around: Around) -> None:
        """Multiply, one operation after the other, each rounded: `layer_products` without it."""
        if around.norm is not None:
            normed = torch.empty_like(x)
            self.rms_norm(normed, x, around.norm, around.eps)
            x = normed
        if around.writes == "gated":
            self.gate_mul(out, dense_product(x, weight, x.dtype))
        elif around.writes == "added":
            product = dense_product(x, weight, x.dtype).float()
            if around.bias is not None:
                product += around.bias
            out.copy_(out.float() + product)
        else:
            out.copy_(dense_product(x, weight, out.dtype))

    def num_product_parts(self, num_rows: int, weight: Tensor) -> int:  # noqa: ARG002 - any matrix
        """Leave every product whole: nothing is gained."""
        return 1

    def rms_norm(
        self,
        out: Tensor,
        x: Tensor,
        weight: Tensor,
        eps: float,
        then: NextProduct | None = None,  # noqa: ARG002 - nothing to be fetched
    ) -> None:
        """Normalise rows."""
        normed = np.empty(x.shape, dtype=np.float32)
        rms_norm(floats(x), floats(weight), eps, normed)
        out.copy_(torch.from_numpy(normed))

    def add_rms_norm(
        self,
        out: Tensor,
        residual: Tensor,
        x: Tensor,
        weight: Tensor,
        eps: float,
        then: NextProduct | None = None,
        added_weight: Tensor | None = None,
        factor: float = 1.0,
    ) -> None:
        """Add and normalise rows."""
        added = floats(x) if x.dim() == residual.dim() else floats(x.sum(0))
        if added_weight is not None:
            normed = np.empty(added.shape, dtype=np.float32)
            rms_norm(added, floats(added_weight), eps, normed)
            added = normed
        residual.copy_(torch.from_numpy((floats(residual) + added) * np.float32(factor)))
        self.rms_norm(out, residual, weight, eps, then)

    def add_normed_parts(
        self, sums: Tensor, x: Tensor, weight: Tensor, eps: float, factor: float
    ) -> None:
        """Add parts of rows, each normalised as a row of its own."""
        parts = floats(x.view(-1, len(weight)))
        normed = np.empty(parts.shape, dtype=np.float32)
        rms_norm(parts, floats(weight), eps, normed)
        added = (floats(sums) + normed.reshape(sums.shape)) * np.float32(factor)
        sums.copy_(torch.from_numpy(added))

    def gate_apart(self, out: Tensor, gates: Tensor, ups: Tensor, first_column: int) -> None:
        """Gate columns of what lies apart."""
        columns = ups[:, first_column : first_column + gates.shape[1]]
        self.gate_mul(out, torch.cat((gates, columns), dim=1))

    def rope_write_kv(
        self,
        out: Tensor,
        pool: Tensor,
        layer: int,
        qkv: Tensor,
        angles: tuple[Tensor, Tensor],
        positions: Tensor,
        kv_slots: Tensor,
        changes: HeadChanges = UNCHANGED,
    ) -> None:
        """Rotate the queries, write keys and values; by way of a pool of one layer and B = 1."""
        num_tokens, num_heads, head_dim = out.shape
        num_kv_heads = num_kv_heads_of(qkv, num_heads, head_dim)
        cosines, sines = (table.numpy()[positions.numpy()] for table in angles)
        queries = np.empty(out.shape, dtype=np.float32)
        written = np.empty((num_tokens, 1, 2, num_kv_heads, 1, head_dim), dtype=np.float32)
        places = np.arange(num_tokens, dtype=np.int64)
        of_rows = _on_host(changes, positions)
        rope.rope_write_kv(floats(qkv), cosines, sines, written, 0, places, queries, of_rows)
        out.copy_(torch.from_numpy(queries))
        if not num_kv_heads:
            return
        is_kept = kv_slots >= 0
        write_tokens(pool, layer, kv_slots[is_kept], written[is_kept.numpy(), 0, :, :, 0])

    def attention_decode(
        self,
        out: Tensor,
        query: Tensor,
        pool: Tensor,
        layer: int,
        block_tables: Tensor,
        seq_lens: Tensor,
        longest: int,
        own: LayerAttention = PLAIN,
    ) -> None:
        """Attend with one token a row."""
        lengths = seq_lens.numpy()
        if int(lengths.max(initial=0)) > longest:
            raise ValueError(f"a row has {lengths.max()} tokens, longest is {longest}")
        out.zero_()
        rows = np.flatnonzero(lengths).astype(np.int32)
        queries = Queries(rows, rows, lengths[rows] - 1, own.window)
        attend(out, query, pool, layer, block_tables.numpy(), queries, own)

    def decode_scratch_bytes(self, num_rows: int, longest: int) -> int:  # noqa: ARG002 - none
        """There is none."""
        return 0

    def attention_prefill(
        self,
        out: Tensor,
        query: Tensor,
        pool: Tensor,
        layer: int,
        rows: PrefillRows,
        own: LayerAttention = PLAIN,
    ) -> None:
        """Attend with the last tokens of each row."""
        firsts, lengths = rows.cu_query_lens.numpy(), rows.seq_lens.numpy()
        counts = np.diff(firsts)
        token_rows = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        tokens = np.arange(len(token_rows), dtype=np.int32)
        positions = tokens - firsts[token_rows] + (lengths - counts)[token_rows]
        queries = Queries(tokens, token_rows, positions, own.window)
        attend(out, query, pool, layer, rows.block_tables.numpy(), queries, own)

    def gate_attended(self, attended: Tensor, gates: Tensor) -> None:
        """Gate what attention gave."""
        gated = delta_net.gate_attended(floats(attended), floats(gates))
        attended.copy_(torch.from_numpy(gated))

    def delta_net(
        self,
        out: Tensor,
        states: Tensor,
        layer: int,
        inputs: Tensor,
        rows: StateRows,
        own: LayerDeltaNet,
    ) -> None:
        """Bring tokens through their states, row by row."""
        go_through_delta_net(out, states, layer, inputs, rows, own)

    def gated_convolution(
        self,
        out: Tensor,
        states: Tensor,
        layer: int,
        inputs: Tensor,
        rows: StateRows,
        own: LayerConvolution,
    ) -> None:
        """Bring tokens through their states, row by row."""
        go_through_convolution(out, states, layer, inputs, rows, own)

    def mamba2(
        self,
        out: Tensor,
        states: Tensor,
        layer: int,
        inputs: Tensor,
        rows: StateRows,
        own: LayerMamba2,
    ) -> None:
        """Bring tokens through their states, row by row."""
        go_through_mamba2(out, states, layer, inputs, rows, own)

    def gate_mul(
        self,
        out: Tensor,
        gate_up: Tensor,
        *,
        in_turns: bool = False,
        then: NextProduct | None = None,  # noqa: ARG002 - as above
    ) -> None:
        """Gate."""
        gated = np.empty(out.shape, dtype=np.float32)
        turn = GATE_TURN if in_turns else None
        GATE_MUL[self._activation](floats(gate_up), gated, turn=turn)
        out.copy_(torch.from_numpy(gated))

    def relu2(
        self,
        values: Tensor,
        then: NextProduct | None = None,  # noqa: ARG002 - nothing is fetched ahead
    ) -> None:
        """Square what is above zero."""
        squares = np.empty(values.shape, dtype=np.float32)
        relu2(floats(values), squares)
        values.copy_(torch.from_numpy(squares))

    def copy_blocks(self, target: Tensor, source: Tensor, pairs: Tensor) -> None:
        """Copy whole blocks."""
        for source_block, target_block in pairs.tolist():
            if source_block >= 0:
                target[target_block].copy_(source[source_block])

    def repeated(self, work: Callable[[], None]) -> Callable[[], None]:
        """There is nothing to save."""
        work()
        return work

    def _values(self, matrix: QuantizedMatrix) -> Tensor:
        """Return a matrix unpacked, float32 [N, K]; what was unpacked once is kept.

        Unpacking takes longer than a step of few rows, and memory is not what this is for.
        """
        if matrix not in self._unpacked:
            shape = matrix.num_outputs, matrix.num_inputs
            parts = unpack_matrix(matrix.format, matrix.packed.numpy(), *shape)
            values = np.empty(shape, dtype=np.float32)
            dequantized(*parts.operands, values)
            self._unpacked[matrix] = torch.from_numpy(values)
        return self._unpacked[matrix]


def _on_host(changes: HeadChanges, positions: Tensor) -> rope.HeadChanges:
    """Return changes of heads as the specification has them, of tokens at some positions."""
    norms = None
    if changes.norms is not None:
        of_queries, of_keys = changes.norms
        # Without keys it normalises none of them.
        norms = floats(of_queries), floats(of_queries if of_keys is None else of_keys)
    bias = None if changes.bias is None else floats(changes.bias)
    growth = None
    if changes.growth is not None:
        factors, length = changes.growth
        growth = factors.numpy()[positions.numpy() // length]
    return rope.HeadChanges(
        bias, norms, changes.eps, growth, changes.are_joint, changes.norms_values
    )
