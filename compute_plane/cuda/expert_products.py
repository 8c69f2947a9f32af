"""A mixture of experts on the device: choosing, sorting, the products of all experts, adding up.

Few tokens:

    norm ─→ router ─→ choose, sort ─→ gate, up ─→ SiLU · up ─→ down ─→ weighed, added

each a launch of a kernel of `expert_operations`, biases in it; gate, up and SiLU are one where they
are one stack. What all tokens go through besides comes before that, as one MLP would. Where its
parts have norms of their own (Gemma 4), what both give is normalised, each by itself, and added
beside the residual stream. Many:

    norm ─→ router, top k, softmax ─→ rows sorted by expert ─→ gate, up ─→ SiLU · up ─→ down ─→ added

with torch. What a row meets is known on the device alone. The kernels read it there, and so does
the library's product of groups of rows where it has one (`has_grouped_products`): such steps wait
for nothing, and can be captured. Elsewhere the ends of the groups are waited for, and each expert
that has rows is a product of its own. Tokens go in pieces, for each of them is as many rows as it
has experts.
"""  # noqa: E501 - a picture

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor
from torch.nn import functional

from compute_plane.cuda.layer_products import Hidden
from compute_plane.cuda.matrices import project
from kernels.reference.mixture import LEAST

if TYPE_CHECKING:
    from compute_plane.cuda.experts import (
        DeviceExperts,
        ExpertBiases,
        ExpertMatrices,
        ExpertNorms,
        SharedExperts,
    )
    from compute_plane.cuda.layer_products import LayerProducts
    from compute_plane.cuda.operations import DeviceOperations
    from compute_plane.model.spec import Mixture, ModelSpec

PIECE_TOKENS: Final = 4096
"""Tokens whose rows exist at once."""
GROUPED_MAJORS: Final = (9, 10)
"""Major capabilities of devices whose products of groups do not wait for their ends."""
FLOAT_BYTES: Final = 4


def has_grouped_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the library multiplies groups of rows of a dtype without waiting for their ends."""
    if dtype is not torch.bfloat16 or not hasattr(functional, "grouped_mm"):
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in GROUPED_MAJORS


def waits_for_experts(
    num_tokens: int, experts: DeviceExperts, operations: DeviceOperations, dtype: torch.dtype
) -> bool:
    """Whether a step of so many tokens waits for the device, to learn where its rows go."""
    if operations.experts.takes(num_tokens, experts):
        return False
    if not has_grouped_products(experts.router.device, dtype):
        return True
    return experts.gate_up.dense_stack is None or experts.down.dense_stack is None


def multiply_groups(
    rows: Tensor, ends: Tensor, matrices: ExpertMatrices, operations: DeviceOperations
) -> Tensor:
    """Return each row times its expert's matrix, [R, N].

    `rows`: [R, K], sorted by expert. `ends`: int32 [E], behind the last row of each.
    """
    stack = matrices.dense_stack
    if stack is not None and has_grouped_products(rows.device, rows.dtype):
        product: Tensor = functional.grouped_mm(rows, stack.values.mT, offs=ends)
        return product
    out = torch.empty((len(rows), matrices.num_outputs), dtype=rows.dtype, device=rows.device)
    first = 0
    for of_expert, end in zip(matrices.of_experts, ends.tolist(), strict=True):
        if end > first:
            out[first:end] = project(rows[first:end], of_expert, operations, rows.dtype)
        first = end
    return out


def router_logits(x: Tensor, router: Tensor, biases: ExpertBiases | None = None) -> Tensor:
    """Return the logits of tokens x [T, hidden], float32 [T, E]. `router`: float32 [E, hidden]."""
    logits = torch.mm(x.float(), router.t())
    return logits if biases is None else logits.add_(biases.router)


def choose(
    logits: Tensor,
    mixture: Mixture,
    correction: Tensor | None = None,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return each token's experts [T, C], the likeliest first, and their weights, float32 [T, C].

    `logits`: [T, E]. `correction`, `factors`: [E]. Specification: `kernels.reference.mixture`.
    """
    is_sigmoid, count = mixture.scores == "sigmoid", mixture.experts_per_token
    by_scores = is_sigmoid or correction is not None or not mixture.normalises_weights
    scores = logits
    if by_scores:
        scores = logits.sigmoid() if is_sigmoid else logits.softmax(dim=1)
    ranks = logits if correction is None else scores + correction
    allowed = None
    if mixture.num_groups > 1:
        allowed = experts_of_groups(ranks, mixture, 1 if correction is None else 2)
        ranks = ranks.gather(1, allowed)
    ordered, numbers = ranks.sort(dim=1, descending=True, stable=True)
    chosen = numbers[:, :count] if allowed is None else allowed.gather(1, numbers[:, :count])
    if not by_scores:
        weights = ordered[:, :count].softmax(dim=1)
    else:
        weights = scores.gather(1, chosen)
        if mixture.normalises_weights:
            total = weights.sum(dim=1, keepdim=True)
            weights = weights / (total + LEAST if is_sigmoid else total)
    if mixture.weight_scale != 1:
        weights = weights * mixture.weight_scale
    return chosen, weights if factors is None else weights * factors[chosen]


def experts_of_groups(ranks: Tensor, mixture: Mixture, num_largest: int) -> Tensor:
    """Return the experts that each token may choose, [T, n], their numbers rising.

    `ranks`: [T, E]. Specification: `kernels.reference.mixture.experts_of_groups`.
    """
    of_groups = ranks.unflatten(1, (mixture.num_groups, -1))
    size = of_groups.shape[2]
    sums = of_groups.topk(num_largest, dim=2).values.sum(dim=2)
    best = sums.argsort(dim=1, descending=True, stable=True)[:, : mixture.groups_per_token]
    first = best.sort(dim=1).values.unsqueeze(2) * size
    return (first + torch.arange(size, device=ranks.device)).flatten(1)


def sort_pairs(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the pairs sorted by expert, [T · C], and how many pairs each expert has, [E].

    `chosen`: [T, C]. Nothing waits for the device.
    """
    numbers = torch.arange(num_experts, device=chosen.device)
    counts = (chosen.reshape(-1, 1) == numbers).sum(0)
    return chosen.reshape(-1).argsort(stable=True), counts


class ExpertProducts:
    """Queues mixtures on a device's operations. `products`: those of the model's layers."""

    def __init__(
        self, operations: DeviceOperations, products: LayerProducts, mixture: Mixture
    ) -> None:
        self._operations = operations
        self._products = products
        self._mixture = mixture

    def add(
        self,
        hidden: Hidden,
        norm: Tensor,
        experts: DeviceExperts,
        output_norm: Tensor | None = None,
    ) -> None:
        """Normalise, and add what the experts give to the residual stream. `norm`: [hidden].

        `output_norm`: [hidden], of all that is added, of mixtures with norms of their own.
        """
        if experts.norms is not None:
            assert experts.shared is not None
            assert output_norm is not None
            both = self._normed_sum(hidden, norm, experts, experts.shared, experts.norms)
            self._products.put_beside(hidden, both, output_norm)
            return
        x = self._products.normalised(hidden, norm)
        if experts.shared is not None:
            self._add_shared(hidden, norm, x, experts.shared)
        if self._operations.experts.takes(len(x), experts):
            self._add_at_once(hidden.residual, x, x, experts)
            return
        given = self._given_in_pieces(x, x, experts)
        if hidden.added is None:
            hidden.added = given
        else:
            beside = hidden.added if hidden.added.dim() == given.dim() else hidden.added[0]
            beside.add_(given)

    def _normed_sum(
        self,
        hidden: Hidden,
        norm: Tensor,
        experts: DeviceExperts,
        shared: SharedExperts,
        norms: ExpertNorms,
    ) -> Tensor:
        """Return what all tokens go through and what experts give, each normalised, [T, hidden]."""
        products = self._products

        def normed(rows: Tensor, weight: Tensor) -> Tensor:
            return products.normalised(Hidden(rows), weight)

        x = products.normalised(hidden, norm)  # nothing is beside the stream any more
        gated = products.gated(hidden, norm, shared.gate_up, shared.down, x)
        both = normed(products.product(gated, shared.down), norms.shared_output)
        of_router = normed(hidden.residual, norms.router)
        of_experts = normed(hidden.residual, norms.experts)
        if self._operations.experts.takes(len(x), experts):
            given = torch.zeros_like(x)
            self._add_at_once(given, of_experts, of_router, experts)
        else:
            given = self._given_in_pieces(of_experts, of_router, experts)
        return products.added_normed(both, given, norms.experts_output)

    def _add_shared(self, hidden: Hidden, norm: Tensor, x: Tensor, shared: SharedExperts) -> None:
        """Add what all tokens go through. `x`: normalised rows."""
        gated = self._products.gated(hidden, norm, shared.gate_up, shared.down, x)
        if shared.gate is not None:
            # What multiplies all that comes out may as well multiply what goes in.
            gated.mul_(torch.mm(x.float(), shared.gate.t()).sigmoid_())
        self._products.add(hidden, gated, shared.down)

    def _add_at_once(
        self, residual: Tensor, x: Tensor, of_router: Tensor, experts: DeviceExperts
    ) -> None:
        """Add what the experts of all tokens give. `of_router`: what the router reads."""
        operations = self._operations.experts
        routing = operations.route(of_router, experts, self._mixture)
        num_pairs, gate_up, biases = len(routing.order), experts.gate_up, experts.biases

        def empty(width: int) -> Tensor:
            return torch.empty((num_pairs, width), dtype=x.dtype, device=x.device)

        of_stacks = (None,) * len(gate_up.stacks) if biases is None else biases.gate_up
        first, *others = gate_up.stacks
        if self._products.gates_mlps and not others and first.can_gate:
            gated = empty(gate_up.num_outputs // 2)
            operations.multiply(gated, x, first, routing, of_stacks[0], gates=True)
        else:
            product = empty(gate_up.num_outputs)
            column = 0
            for stack, own in zip(gate_up.stacks, of_stacks, strict=True):
                operations.multiply(product, x, stack, routing, own, first_column=column)
                column += stack.num_outputs
            gated = self._gated(product, gate_up)
            del product  # its memory serves what follows
        given = empty(experts.down.num_outputs)
        (down,) = experts.down.stacks
        operations.multiply(given, gated, down, routing, None if biases is None else biases.down)
        operations.add(residual, given, routing.weights)

    def _gated(self, product: Tensor, of: ExpertMatrices) -> Tensor:
        """Return what gates times what it gates; where nothing gates, `product` itself, squared."""
        if not self._products.gates_mlps:
            self._operations.relu2(product)
            return product
        shape = len(product), product.shape[1] // 2
        gated = torch.empty(shape, dtype=product.dtype, device=product.device)
        in_turns = of.of_experts[0].gate_in_turns is not None
        self._operations.gate_mul(gated, product, in_turns=in_turns)
        return gated

    def _given_in_pieces(self, x: Tensor, of_router: Tensor, experts: DeviceExperts) -> Tensor:
        """Return what the experts of all tokens give together, [T, hidden]."""
        rows = zip(x.split(PIECE_TOKENS), of_router.split(PIECE_TOKENS), strict=True)
        pieces = [self._given(*piece, experts) for piece in rows]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _given(self, x: Tensor, of_router: Tensor, experts: DeviceExperts) -> Tensor:
        """Return what the experts of some tokens give together, [T, hidden]."""
        mixture = self._mixture
        count = mixture.experts_per_token
        logits = router_logits(of_router, experts.router, experts.biases)
        chosen, weights = choose(logits, mixture, experts.correction, experts.factors)
        order, counts = sort_pairs(chosen, mixture.num_experts)
        ends = counts.cumsum(0).to(torch.int32)
        rows = x.index_select(0, order.div(count, rounding_mode="floor"))
        gate_up = multiply_groups(rows, ends, experts.gate_up, self._operations)
        biases, of_rows = experts.biases, chosen.reshape(-1)[order]
        if biases is not None:
            column = 0
            for own in biases.gate_up:
                gate_up[:, column : column + own.shape[1]] += own.index_select(0, of_rows)
                column += own.shape[1]
        gated = self._gated(gate_up, experts.gate_up)
        del rows, gate_up  # their memory serves what follows
        given = multiply_groups(gated, ends, experts.down, self._operations)
        if biases is not None:
            given += biases.down.index_select(0, of_rows)
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
    # What is gated, and the biases of what gates it and is gated.
    beside = 3 * inner if spec.has_all_biases else inner
    multiplied = num_rows * (hidden + 2 * inner + beside) * item_bytes
    weighed = num_rows * hidden * (2 * item_bytes + 2 * FLOAT_BYTES)
    return max(multiplied, weighed) + 2 * max_tokens * hidden * item_bytes
