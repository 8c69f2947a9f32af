"""Mixtures of experts on tensors of torch's CPU device, by `kernels.reference`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from compute_plane.cuda.dense_kernels import MOST_ROWS
from compute_plane.cuda.expert_operations import Routing
from compute_plane.cuda.expert_products import router_logits
from compute_plane.cuda.matrices import Projection, project
from kernels.cuda.expert_tiles import TILE_NUMBERS, most_tiles
from kernels.reference import mixture as reference

if TYPE_CHECKING:
    from compute_plane.cuda.experts import DeviceExperts, StackedMatrix
    from compute_plane.cuda.operations import DeviceOperations
    from compute_plane.model.spec import Mixture

TILE_PAIRS = 8


class ReferenceExperts:
    """`ExpertOperations` in NumPy. `operations`: those that multiply and gate."""

    def __init__(self, operations: DeviceOperations) -> None:
        self._operations = operations

    def takes(self, num_tokens: int, experts: DeviceExperts) -> bool:
        """Whether tokens are few, as for a device."""
        return num_tokens <= MOST_ROWS and bool(experts.stacks)

    def route(self, x: Tensor, experts: DeviceExperts, mixture: Mixture) -> Routing:
        """Choose and sort."""
        logits = router_logits(x, experts.router, experts.biases).numpy()
        shape = len(x), mixture.experts_per_token
        chosen, weights = np.empty(shape, np.int32), np.empty(shape, np.float32)
        correction = experts.correction
        reference.route(
            logits,
            normalises=mixture.normalises_weights,
            chosen=chosen,
            weights=weights,
            is_sigmoid=mixture.scores == "sigmoid",
            correction=None if correction is None else correction.numpy(),
            scale=mixture.weight_scale,
            num_groups=mixture.num_groups,
            groups_per_token=mixture.groups_per_token,
            expert_scales=None if experts.factors is None else experts.factors.numpy(),
        )
        num_tiles = most_tiles(chosen.size, mixture.num_experts, TILE_PAIRS)
        order = np.empty(chosen.size, np.int32)
        tiles = np.empty((num_tiles, TILE_NUMBERS), np.int32)
        reference.sort_pairs(chosen, mixture.num_experts, TILE_PAIRS, order, tiles)
        of = torch.from_numpy
        return Routing(of(weights), of(order), of(tiles), TILE_PAIRS)

    def multiply(
        self,
        out: Tensor,
        x: Tensor,
        stack: StackedMatrix,
        routing: Routing,
        biases: Tensor | None = None,
        *,
        first_column: int = 0,
        gates: bool = False,
    ) -> None:
        """Multiply tile by tile."""
        share = len(out) // len(x)
        num_outputs = stack.num_outputs // 2 if gates else stack.num_outputs
        columns = slice(first_column, first_column + num_outputs)
        for expert, first, count in routing.tiles.tolist():
            pairs = routing.order[first : first + count].long()
            projection = Projection((stack.matrices[expert],))
            product = project(x[pairs // share], projection, self._operations, x.dtype)
            if biases is not None:
                product += biases[expert]
            if gates:
                gated = torch.empty((count, num_outputs), dtype=x.dtype)
                in_turns = projection.gate_in_turns is not None
                self._operations.gate_mul(gated, product, in_turns=in_turns)
                product = gated
            out[pairs, columns] = product

    def add(self, residual: Tensor, given: Tensor, weights: Tensor) -> None:
        """Weigh and add."""
        sums = residual.float().numpy().copy()
        of_tokens = given.float().view(len(residual), -1, residual.shape[1])
        reference.add_experts(of_tokens.numpy(), weights.numpy(), sums)
        residual.copy_(torch.from_numpy(sums))
