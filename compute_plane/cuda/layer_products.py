"""The products of a layer, each with what comes before and after it in the residual stream.

A step of few rows has one launch for each, where its weights are one dense matrix; product and
gate are one where gate and up are one quantised matrix, too:

    rows                 one launch                  otherwise
    normed   (qkv)       norm · Wᵀ                   add and norm, product
    product  (latents')  x · Wᵀ                      product
    gated    (gate, up)  norm · Wᵀ, gate             add and norm, product, gate
    add      (o, down)   residual += x · Wᵀ          product, perhaps in parts; what it gave is
                                                     added by the next norm
    add_both (o and a    twice                       both, and what they gave is added by the next
              state's)                               norm together
    logits               norm · Wᵀ, float32          add and norm, product

Where what is added is normalised before (Gemma 3), the next norm does both, so that no other one is
part of a product:

    normed, gated        add what is normalised and norm, product (with the gate in it)
    add    (o, down)     product, perhaps in parts

Where the stream itself is multiplied (EXAONE 4), that norm only adds. Of models whose layers scale
the stream (Gemma 4) it multiplies the sum.

Norm and gate are told what the library multiplies with behind them (`next_product`).

A matrix of many bytes has its norm in a launch before its product
(`kernels.cuda.dense_matmul.NORMALISED_BYTES`).

Which of the two it is depends on the number of rows, the dtype and the matrix alone, so equal
batches have equal bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from compute_plane.cuda.matrices import (
    DenseMatrix,
    inputs_in_order,
    product_in_parts,
    project,
    sum_of_parts,
)
from compute_plane.cuda.next_product import NextProduct
from compute_plane.cuda.operands import Around, Writes

if TYPE_CHECKING:
    from compute_plane.cuda.matrices import Projection
    from compute_plane.cuda.operations import DeviceOperations
    from compute_plane.executor.adapter_runs import AdapterRuns


class AddedNorm(NamedTuple):
    """What is added is normalised before: with `weight` [E] and `eps`."""

    weight: Tensor
    eps: float


@dataclass(slots=True)
class Hidden:
    """The residual stream, [T, E] each: the sum of both, if `added` is not part of it already.

    `added` may be parts, float32 [P, T, E]; with a `norm` it is normalised before it is added.
    `factor`: what the sum of both is multiplied by, 1 where nothing is to be added. `adapters`:
    of its tokens (`adapted_products`).
    """

    residual: Tensor
    added: Tensor | None = None
    norm: AddedNorm | None = None
    factor: float = 1.0
    adapters: AdapterRuns = ()

    def rows(self, tokens: Tensor) -> Hidden:
        """Return a copy of some tokens' rows, without adapters. `tokens`: [R]."""
        added = self.added
        return Hidden(
            self.residual.index_select(0, tokens),
            None if added is None else added.index_select(-2, tokens),
            self.norm,
            self.factor,
        )

    def multiply(self, factor: float) -> None:
        """Multiply the stream, of which something is still to be added."""
        if self.added is None:
            raise ValueError("a stream is multiplied only while something is beside it")
        self.factor *= factor

    def take_in(self) -> None:
        """Say that what was beside the stream is part of it."""
        self.added, self.norm, self.factor = None, None, 1.0

    def sums(self) -> Tensor:
        """Return the sums of both parts, float32 [T, E]: nothing is rounded on the way."""
        rows, added = self.residual.float(), self.added
        if added is None:
            return rows
        added = added.float() if added.dim() == rows.dim() else added.sum(0)
        if self.norm is not None:
            added = normed_rows(added, *self.norm)
        sums = torch.add(rows, added)
        return sums if self.factor == 1 else sums.mul_(self.factor)


def normed_rows(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return rows, float32 [T, E], normalised in float32. `weight`: [E]."""
    scale = torch.rsqrt(rows.square().mean(dim=1, keepdim=True) + eps)
    return (rows * scale).mul_(weight)


class LayerProducts:
    """Queues products on a device's operations. `eps`: of all norms.

    `gates_mlps`: whether MLPs have a gate; otherwise what they multiply once is squared.
    """

    def __init__(
        self, operations: DeviceOperations, eps: float, *, gates_mlps: bool = True
    ) -> None:
        self.operations = operations
        self.gates_mlps = gates_mlps
        self._eps = eps

    def normed(self, hidden: Hidden, norm: Tensor | None, projection: Projection) -> Tensor:
        """Return the normalised rows times a projection, [T, N]. `norm`: [E]; None: as they are."""
        return self._normed(hidden, norm, projection, "rounded")

    def product(self, x: Tensor, projection: Projection) -> Tensor:
        """Return rows x [T, K], which no part of the stream is, times a projection, [T, N]."""
        weight = self._taken(len(x), projection)
        if weight is None:
            return project(x, projection, self.operations, x.dtype)
        return self._of_few(x, weight)

    def both_normed(
        self, hidden: Hidden, norm: Tensor | None, one: Projection, other: Projection
    ) -> tuple[Tensor, Tensor]:
        """Return the normalised rows times two projections, as `normed`; normalised once."""
        x = None
        if hidden.added is not None or not all(
            self._norms_with(len(hidden.residual), norm, projection) for projection in (one, other)
        ):
            x = self.normalised(hidden, norm, self._of_library(len(hidden.residual), one))
        first, second = (
            self._normed(hidden, norm, projection, "rounded", normalised=x)
            for projection in (one, other)
        )
        return first, second

    def gated(
        self,
        hidden: Hidden,
        norm: Tensor | None,
        projection: Projection,
        then: Projection,
        normalised: Tensor | None = None,
    ) -> Tensor:
        """Return activation(gate) · up of the normalised rows, [T, F]; without a gate relu(up)².

        `projection`: the gate first. `then`: what they are multiplied with to be added.
        `normalised`: the normalised rows, [T, E], where they are there already.
        """
        if self.gates_mlps:
            return self._normed(hidden, norm, projection, "gated", then, normalised)
        product = self._normed(hidden, norm, projection, "rounded", normalised=normalised)
        self.operations.relu2(product, self._added_by_library(len(product), then))
        return product

    def logits(self, hidden: Hidden, norm: Tensor, projection: Projection) -> Tensor:
        """Return the normalised rows times a projection, float32 [T, V]."""
        return self._normed(hidden, norm, projection, "float32")

    def add(
        self,
        hidden: Hidden,
        x: Tensor,
        projection: Projection,
        norm: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        """Add rows x [T, K] times a projection to the residual stream, normalised by `norm` [E].

        `bias`: [E], added to the product.
        """
        if hidden.added is not None:
            raise ValueError(
                "a product is added after a norm, which takes in what was added before"
            )
        weight = self._taken(len(x), projection)
        if weight is not None and norm is None:
            around = Around(writes="added", bias=bias)
            self.operations.dense_matmul(hidden.residual, x, weight, around)
            return
        hidden.added = self._beside(x, projection, weight, bias)
        hidden.norm = None if norm is None else AddedNorm(norm, self._eps)

    def add_both(
        self, hidden: Hidden, one: tuple[Tensor, Projection], other: tuple[Tensor, Projection]
    ) -> None:
        """Add two products, each of rows [T, K] and a projection, to the residual stream."""
        self.add(hidden, *one)
        before, hidden.added = hidden.added, None
        self.add(hidden, *other)
        if before is not None:
            added = hidden.added
            hidden.added = before if added is None else sum_of_parts(before, added)

    def put_beside(self, hidden: Hidden, added: Tensor, norm: Tensor) -> None:
        """Leave rows [T, E] to be added by the next norm, normalised by `norm` [E]."""
        if hidden.added is not None:
            raise ValueError("something is beside the stream already")
        hidden.added, hidden.norm = added, AddedNorm(norm, self._eps)

    def added_normed(self, rows: Tensor, x: Tensor, norm: Tensor) -> Tensor:
        """Return rows [T, E], to which x [T, E], normalised by `norm` [E], is added in place."""
        return self._summed(Hidden(rows, x, AddedNorm(norm, self._eps)), None)

    def _beside(
        self, x: Tensor, projection: Projection, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """Return a product that the next norm adds, perhaps in parts. `weight`: as of `_taken`."""
        if weight is not None:
            # Of a model whose sublayers' outputs are normalised, and none of those has this bias.
            assert bias is None
            return self._of_few(x, weight)
        product = self._of_library(len(x), projection, is_added=True)
        if product is not None and product.num_parts > 1:
            parts = product_in_parts(x, product.weight, product.num_parts)
            if bias is not None:
                parts[0] += bias
            return parts
        return project(x, projection, self.operations, x.dtype, bias)

    def _of_few(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return few rows times a matrix, [T, N], with nothing around it."""
        out = torch.empty((len(x), len(weight)), dtype=x.dtype, device=x.device)
        self.operations.dense_matmul(out, x, weight, Around())
        return out

    def _normed(
        self,
        hidden: Hidden,
        norm: Tensor | None,
        projection: Projection,
        writes: Writes,
        then: Projection | None = None,
        normalised: Tensor | None = None,
    ) -> Tensor:
        operations, residual = self.operations, hidden.residual
        num_outputs = projection.num_outputs // (2 if writes == "gated" else 1)
        dtype = torch.float32 if writes == "float32" else residual.dtype
        num_rows = len(residual)
        weight = self._taken(num_rows, projection)
        if weight is not None and norm is not None and operations.normalises_product(weight):
            if hidden.added is None:
                out = torch.empty((num_rows, num_outputs), dtype=dtype, device=residual.device)
                operations.dense_matmul(out, residual, weight, Around(norm, self._eps, writes))
                return out
            weight = None  # only a norm by itself adds, and there is no such product without one
        product = None if weight is not None else self._of_library(num_rows, projection)
        x = self.normalised(hidden, norm, product) if normalised is None else normalised
        if weight is not None:
            out = torch.empty((num_rows, num_outputs), dtype=dtype, device=residual.device)
            operations.dense_matmul(out, x, weight, Around(writes=writes))
            return out
        gate = projection.gate_in_turns
        if gate is not None and operations.takes_gate(len(x), gate):
            out = torch.empty((num_rows, num_outputs), dtype=dtype, device=residual.device)
            operations.quantized_gate(out, inputs_in_order(x, gate), gate)
            return out
        outputs = project(x, projection, operations, dtype)
        if writes != "gated":
            return outputs
        del x  # its memory serves what follows
        return self._gated(outputs, projection, then)

    def _gated(self, outputs: Tensor, projection: Projection, then: Projection | None) -> Tensor:
        """Return activation(gate) · up of a projection's outputs [T, N]."""
        num_rows, num_outputs = outputs.shape
        in_turns = projection.gate_in_turns is not None
        out = torch.empty((num_rows, num_outputs // 2), dtype=outputs.dtype, device=outputs.device)
        following = self._added_by_library(num_rows, then)
        self.operations.gate_mul(out, outputs, in_turns=in_turns, then=following)
        return out

    def normalised(
        self, hidden: Hidden, norm: Tensor | None, then: NextProduct | None = None
    ) -> Tensor:
        """Queue the norm; what was beside the residual stream is part of it afterwards.

        Without a `norm` only that: the stream itself is returned.
        """
        residual, added, eps = hidden.residual, hidden.added, self._eps
        if norm is None:
            return self._summed(hidden, then)
        out = torch.empty_like(residual)
        if added is None:
            self.operations.rms_norm(out, residual, norm, eps, then)
        else:
            added_weight = None if hidden.norm is None else hidden.norm.weight
            self.operations.add_rms_norm(
                out, residual, added, norm, eps, then, added_weight, hidden.factor
            )
            hidden.take_in()
        return out

    def _summed(self, hidden: Hidden, then: NextProduct | None) -> Tensor:
        """Add what is beside the residual stream to it, and return that."""
        residual, added = hidden.residual, hidden.added
        if added is not None:
            # By the operation that normalises the sum as well, which nobody reads.
            assert hidden.norm is not None
            weight, unread = hidden.norm.weight, torch.empty_like(residual)
            self.operations.add_rms_norm(
                unread, residual, added, weight, self._eps, then, weight, hidden.factor
            )
            hidden.take_in()
        return residual

    def _norms_with(self, num_rows: int, norm: Tensor | None, projection: Projection) -> bool:
        """Whether rows are normalised by the product itself."""
        weight = self._taken(num_rows, projection)
        return (
            weight is not None and norm is not None and self.operations.normalises_product(weight)
        )

    def _taken(self, num_rows: int, projection: Projection) -> Tensor | None:
        """Return the weights if `dense_matmul` takes them for so many rows."""
        weight = _dense_weight(projection)
        if weight is None or not self.operations.takes_product(num_rows, weight):
            return None
        return weight

    def _added_by_library(self, num_rows: int, then: Projection | None) -> NextProduct | None:
        """Return a product that is added, if the library computes it."""
        if then is None or self._taken(num_rows, then) is not None:
            return None
        return self._of_library(num_rows, then, is_added=True)

    def _of_library(
        self, num_rows: int, projection: Projection, *, is_added: bool = False
    ) -> NextProduct | None:
        """Return the product of so many rows as the library computes it, if that is all of it."""
        weight = _dense_weight(projection)
        if weight is None:
            return None
        num_parts = self.operations.num_product_parts(num_rows, weight) if is_added else 1
        return NextProduct(weight, num_parts)


def _dense_weight(projection: Projection) -> Tensor | None:
    """Return the weights if they are one dense matrix."""
    first, *others = projection.parts
    return first.values if isinstance(first, DenseMatrix) and not others else None
