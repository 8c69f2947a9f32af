"""A mixture of experts on the device: choosing, sorting, the products of all experts, adding up.

    norm ─→ router, top k, softmax ─→ rows sorted by expert ─→ gate, up ─→ SiLU · up ─→ down ─→ weighed, added

What a row meets is known on the device alone. Where the library has a product of groups of rows
that reads their ends there (`has_grouped_products`), nothing waits, and a step can be captured;
elsewhere the ends are waited for, and each expert that has rows is a product of its own. Tokens go
in pieces, for each of them is as many rows as it has experts.
"""  # noqa: E501 - a picture

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from compute_plane.cuda.matrices import Projection, project

if TYPE_CHECKING:
    from compute_plane.cuda.layer_products import Hidden, LayerProducts
    from compute_plane.cuda.operations import DeviceOperations
    from compute_plane.model.spec import Mixture, ModelSpec

PIECE_TOKENS: Final = 4096
"""Tokens whose rows exist at once."""
GROUPED_MAJORS: Final = (9, 10)
"""Major capabilities of devices whose products of groups do not wait for their ends."""
FLOAT_BYTES: Final = 4


@dataclass(frozen=True, slots=True, eq=False)
class StackedMatrices:
    """The dense matrices of all experts; `values`: [E, N, K]."""

    values: Tensor

    @property
    def num_outputs(self) -> int:
        """Outputs N of a product."""
        return int(self.values.shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class SeparateProjections:
    """What rows of each expert are multiplied with, E of them."""

    of_experts: tuple[Projection, ...]

    @property
    def num_outputs(self) -> int:
        """Outputs N of a product."""
        return self.of_experts[0].num_outputs


ExpertMatrices: TypeAlias = StackedMatrices | SeparateProjections


@dataclass(frozen=True, slots=True, eq=False)
class DeviceExperts:
    """`router`: float32 [E, hidden]. `gate_up`: 2·F outputs, the gate first; `down`: hidden."""

    router: Tensor
    gate_up: ExpertMatrices
    down: ExpertMatrices


def has_grouped_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the library multiplies groups of rows of a dtype without waiting for their ends."""
    if dtype is not torch.bfloat16 or not hasattr(functional, "grouped_mm"):
        return False
    return device.type == "cpu" or torch.cuda.get_device_capability(device)[0] in GROUPED_MAJORS


def multiply_groups(
    rows: Tensor, ends: Tensor, matrices: ExpertMatrices, operations: DeviceOperations
) -> Tensor:
    """Return each row times its expert's matrix, [R, N].

    `rows`: [R, K], sorted by expert. `ends`: int32 [E], behind the last row of each.
    """
    if isinstance(matrices, StackedMatrices) and has_grouped_products(rows.device, rows.dtype):
        product: Tensor = functional.grouped_mm(rows, matrices.values.mT, offs=ends)
        return product
    out = torch.empty((len(rows), matrices.num_outputs), dtype=rows.dtype, device=rows.device)
    first = 0
    for expert, end in enumerate(ends.tolist()):
        if end == first:
            continue
        if isinstance(matrices, StackedMatrices):
            torch.mm(rows[first:end], matrices.values[expert].t(), out=out[first:end])
        else:
            of_expert = matrices.of_experts[expert]
            out[first:end] = project(rows[first:end], of_expert, operations, rows.dtype)
        first = end
    return out


def route(x: Tensor, router: Tensor, mixture: Mixture) -> tuple[Tensor, Tensor]:
    """Return each token's experts [T, C], the likeliest first, and their weights, float32 [T, C].

    `x`: [T, hidden]. Specification: `kernels.reference.mixture`; of equal logits any may go first.
    """
    logits = torch.mm(x.float(), router.t())
    taken, chosen = logits.topk(mixture.experts_per_token, dim=1)
    if mixture.normalises_weights:
        return chosen, taken.softmax(dim=1)
    return chosen, logits.softmax(dim=1).gather(1, chosen)


class ExpertProducts:
    """Queues mixtures on a device's operations. `products`: those of the model's layers."""

    def __init__(
        self, operations: DeviceOperations, products: LayerProducts, mixture: Mixture
    ) -> None:
        self._operations = operations
        self._products = products
        self._mixture = mixture

    def add(self, hidden: Hidden, norm: Tensor, experts: DeviceExperts) -> None:
        """Normalise, and add what the experts give to the residual stream. `norm`: [hidden]."""
        x = self._products.normalised(hidden, norm)
        pieces = [self._given(piece, experts) for piece in x.split(PIECE_TOKENS)]
        hidden.added = pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _given(self, x: Tensor, experts: DeviceExperts) -> Tensor:
        """Return what the experts of some tokens give together, [T, hidden]."""
        count = self._mixture.experts_per_token
        chosen, weights = route(x, experts.router, self._mixture)
        order = chosen.view(-1).argsort(stable=True)
        numbers = torch.arange(self._mixture.num_experts, device=x.device)
        ends = (chosen.view(-1, 1) == numbers).sum(0).cumsum(0).to(torch.int32)
        rows = x.index_select(0, order.div(count, rounding_mode="floor"))
        gate_up = multiply_groups(rows, ends, experts.gate_up, self._operations)
        gated = torch.empty((len(rows), gate_up.shape[1] // 2), dtype=x.dtype, device=x.device)
        self._operations.silu_mul(gated, gate_up)
        del rows, gate_up  # their memory serves what follows
        given = multiply_groups(gated, ends, experts.down, self._operations)
        of_tokens = torch.empty_like(given)
        of_tokens.index_copy_(0, order, given)
        weighed = of_tokens.view(len(x), count, -1).float() * weights.unsqueeze(2)
        return weighed.sum(1).to(x.dtype)


def expert_working_bytes(spec: ModelSpec, item_bytes: int, max_tokens: int) -> int:
    """Return what a step takes for its mixtures, at most at once, beside what other models take."""
    if spec.mixture is None:
        return 0
    num_rows = min(max_tokens, PIECE_TOKENS) * spec.mixture.experts_per_token
    hidden, inner = spec.hidden_size, spec.intermediate_size
    multiplied = num_rows * (hidden + 3 * inner) * item_bytes
    weighed = num_rows * hidden * (2 * item_bytes + 2 * FLOAT_BYTES)
    return max(multiplied, weighed) + 2 * max_tokens * hidden * item_bytes
