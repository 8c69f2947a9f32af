"""The kernels that multiply tokens with their experts, and when they are taken.

A launch for the router's logits, one that chooses and sorts, one for each product, one that adds
up; no launch waits for what another one has found. So steps of few tokens can be graphs whatever
their weights are. With many, an expert's rows pass its weights several times, tile by tile:

    quantised    while an expert has no more rows, on average, than a matrix may have for
                 `quantized_matmul` (`most_rows_of`), beyond which weights are unpacked
    dense        as many tokens as `dense_kernels` takes, where torch's library has a product of
                 groups; where it has none, up to `DENSE_ROWS` rows an expert, on average

Which it is depends on the number of tokens and the model alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from compute_plane.cuda.dense_kernels import MOST_ROWS
from compute_plane.cuda.expert_operations import Routing
from compute_plane.cuda.expert_products import choose, has_grouped_products, sort_pairs
from compute_plane.cuda.experts import ExpertUses
from compute_plane.cuda.weights import DTYPES
from kernels.cuda import dense_matmul, quantized_strands
from kernels.cuda.activation import SILU
from kernels.cuda.add_experts import AddExpertsVariant
from kernels.cuda.dense_matmul import DenseMatmulVariant
from kernels.cuda.expert_tiles import TILE_NUMBERS, most_tiles
from kernels.cuda.quantized_matmul import QuantizedMatmulVariant
from kernels.cuda.quantized_strands import most_rows_of, strand_bits_of
from kernels.cuda.route_experts import RouteExpertsVariant
from kernels.cuda.router_logits import TOKENS, RouterLogitsVariant, tokens_of

if TYPE_CHECKING:
    from compute_plane.cuda.experts import DeviceExperts, StackedMatrix
    from compute_plane.cuda.launchers import Launcher
    from compute_plane.model.spec import Mixture, ModelSpec
    from kernels.cuda.variant import Variant

NO_EXPERTS: Final = ExpertUses()
DENSE_ROWS: Final = 64
"""Rows of an expert, on average, up to which dense weights are read tile by tile."""


class ExpertKernels:
    """`ExpertOperations` by kernels, for one model. `dtype`: of a step, by name.

    Without stacks, or in a dtype that no kernel is written for, there are none. Raises
    UnsupportedVariantError for a mixture that they are not written for.
    """

    def __init__(
        self, launcher: Launcher, spec: ModelSpec, dtype: str, uses: ExpertUses = NO_EXPERTS
    ) -> None:
        self._launcher = launcher
        self._products: dict[
            tuple[str | None, bool, int], QuantizedMatmulVariant | DenseMatmulVariant
        ] = {}
        self._others: list[Variant] = []
        mixture = spec.mixture
        if mixture is None or dtype not in dense_matmul.DTYPES:
            return
        biased = spec.has_all_biases
        for label in sorted(uses.quantised):
            for columns in quantized_strands.COLUMNS:
                for gates in (False, True) if label in uses.gates else (False,):
                    activation = spec.activation if gates else SILU
                    self._products[label, gates, columns] = QuantizedMatmulVariant(
                        label, dtype, columns, False, True, gates, activation, biased
                    )
        for columns in dense_matmul.COLUMNS if uses.has_dense else ():
            for writes in dense_matmul.EXPERTS_WRITE:
                if writes == "gated" and not spec.gates_mlps:
                    continue
                activation = spec.activation if writes == "gated" else SILU
                self._products[None, writes == "gated", columns] = DenseMatmulVariant(
                    dtype, columns, writes, of_experts=True, activation=activation, biased=biased
                )
        if not self._products:
            return
        self._count = mixture.experts_per_token
        self._has_grouped = has_grouped_products(launcher.device, DTYPES[dtype])
        self._logits = {tokens: RouterLogitsVariant(dtype, tokens, biased) for tokens in TOKENS}
        self._route = RouteExpertsVariant(
            mixture.num_experts,
            self._count,
            mixture.normalises_weights,
            mixture.scores,
            mixture.corrects_choice,
            mixture.num_groups,
            mixture.groups_per_token,
            mixture.has_own_norms,
        )
        self._add = AddExpertsVariant(dtype, self._count)
        self._add.grid(1, spec.hidden_size)  # refuses the sizes that kernels do not take
        self._others = [*self._logits.values(), self._route, self._add]

    @property
    def variants(self) -> list[Variant]:
        """Every kernel that may be launched."""
        return [*self._others, *self._products.values()]

    def takes(self, num_tokens: int, experts: DeviceExperts) -> bool:
        """Whether there are kernels, and rows are few enough."""
        if not self._products or not experts.stacks:
            return False
        rows_of_expert = num_tokens * self._count / len(experts.router)
        for stack in experts.stacks:
            if stack.format is not None:
                is_taken = rows_of_expert <= most_rows_of(stack.format)
            elif self._has_grouped:
                is_taken = num_tokens <= MOST_ROWS
            else:
                is_taken = rows_of_expert <= DENSE_ROWS
            if not is_taken:
                return False
        return True

    def route(self, x: Tensor, experts: DeviceExperts, mixture: Mixture) -> Routing:
        """Choose and sort: by a kernel, or with torch if there are more pairs than it takes."""
        num_tokens, num_experts = len(x), len(experts.router)
        logits = torch.empty((num_tokens, num_experts), dtype=torch.float32, device=x.device)
        variant = self._logits[tokens_of(num_tokens)]
        sizes = num_tokens, num_experts, x.shape[1]
        biases = experts.router if experts.biases is None else experts.biases.router
        self._launcher.launch(
            variant, variant.grid(*sizes), logits, x, experts.router, *sizes, biases
        )
        num_pairs = num_tokens * self._count
        tile_pairs = tile_pairs_of(num_pairs, experts)
        num_tiles = most_tiles(num_pairs, num_experts, tile_pairs)
        if not self._route.takes(num_tokens):
            chosen, weights = choose(logits, mixture, experts.correction, experts.factors)
            order, counts = sort_pairs(chosen, num_experts)
            tiles = cut_into_tiles(counts, tile_pairs, num_tiles)
            return Routing(weights.contiguous(), order.to(torch.int32), tiles, tile_pairs)
        routing = Routing(
            torch.empty((num_tokens, self._count), dtype=torch.float32, device=x.device),
            torch.empty(num_pairs, dtype=torch.int32, device=x.device),
            torch.empty((num_tiles, TILE_NUMBERS), dtype=torch.int32, device=x.device),
            tile_pairs,
        )
        self._launcher.launch(
            self._route,
            self._route.grid,
            routing.weights,
            routing.order,
            routing.tiles,
            logits,
            num_tokens,
            tile_pairs.bit_length() - 1,
            num_tiles,
            logits if experts.correction is None else experts.correction,
            mixture.weight_scale,
            logits if experts.factors is None else experts.factors,
        )
        return routing

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
        """Multiply pairs, tile by tile, with weights as they are."""
        variant = self._products[stack.format, gates, routing.tile_pairs]
        # As many warps as all experts of a token fill: the number is the model's.
        strand_bits = strand_bits_of(stack.num_outputs * self._count)
        num_outputs = stack.num_outputs // 2 if gates else stack.num_outputs
        sizes = num_outputs, stack.num_inputs, strand_bits
        self._launcher.launch(
            variant,
            variant.experts_grid(len(routing.tiles), *sizes),
            out.view(-1)[first_column:],  # rows are the whole width apart
            x,
            stack.values.view(-1),
            routing.tiles,
            routing.order,
            len(out) // len(x),
            *sizes,
            out.shape[1],
            x if biases is None else biases,
        )

    def add(self, residual: Tensor, given: Tensor, weights: Tensor) -> None:
        """Weigh and add."""
        grid = self._add.grid(*residual.shape)
        self._launcher.launch(self._add, grid, residual, given, weights, residual.shape[1])


def tile_pairs_of(num_pairs: int, experts: DeviceExperts) -> int:
    """Return how many pairs a tile has: twice what an expert has on average, as kernels allow.

    It decides about time only: experts have more rows and fewer, and a tile that is not full costs
    what its empty columns take, an expert in two tiles what reading its weights twice takes.
    """
    is_quantised = all(stack.format is not None for stack in experts.stacks)
    widths = quantized_strands.COLUMNS if is_quantised else dense_matmul.COLUMNS
    wanted = 2 * num_pairs / len(experts.router)
    return next((width for width in widths if width >= wanted), widths[-1])


def cut_into_tiles(counts: Tensor, tile_pairs: int, num_tiles: int) -> Tensor:
    """Return the tiles of experts that have so many pairs, int32 [num_tiles, 3].

    `counts`: [E]. As `kernels.reference.mixture.sort_pairs`; nothing waits for the device.
    """
    of_experts = (counts + tile_pairs - 1).div(tile_pairs, rounding_mode="floor")
    ends = of_experts.cumsum(0)
    tiles = torch.arange(num_tiles, device=counts.device)
    experts = torch.searchsorted(ends, tiles, right=True)
    is_used = experts < len(counts)
    experts = experts.clamp(max=len(counts) - 1)
    done = (tiles - (ends - of_experts)[experts]) * tile_pairs
    places = (counts.cumsum(0) - counts)[experts] + done
    left = (counts[experts] - done).clamp(max=tile_pairs)
    return (torch.stack([experts, places, left], dim=1) * is_used[:, None]).to(torch.int32)
