"""What a device computes for mixtures of experts: the border to its kernels, as `operations` is.

Array letters beside those: E experts, C of them a token. What a token's experts read and give lies
by pairs, token by token (`kernels.cuda.expert_tiles`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from compute_plane.cuda.experts import DeviceExperts, StackedMatrix
    from compute_plane.model.spec import Mixture


@dataclass(frozen=True, slots=True)
class Routing:
    """Where the tokens of a step go.

    `weights`: float32 [T, C], of a token's experts, the likeliest first. `order`: int32 [T · C],
    pairs sorted by expert; `tiles`: int32 [n, 3], of `tile_pairs`
    (`kernels.reference.mixture.sort_pairs`).
    """

    weights: Tensor
    order: Tensor
    tiles: Tensor
    tile_pairs: int


class ExpertOperations(Protocol):
    """The operations of one device. None of them waits for it."""

    def takes(self, num_tokens: int, experts: DeviceExperts) -> bool:
        """Whether these multiply so many tokens with a layer's experts."""
        ...

    def route(self, x: Tensor, experts: DeviceExperts, mixture: Mixture) -> Routing:
        """Choose each token's experts, and sort. `x`: [T, hidden]."""
        ...

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
        """Write every pair's product with its expert's matrix to columns of `out` [T · C, F].

        `x`: [T, K], a pair reads its token's row, or [T · C, K], its own. `biases`: [E, N], added
        to the products. Where it `gates`, the model's gate of a gate's products and those beside
        them; of stacks that `can_gate`.
        """
        ...

    def add(self, residual: Tensor, given: Tensor, weights: Tensor) -> None:
        """Add to each token what its experts gave, weighed, in the order of the weights.

        `residual`: [T, hidden]. `given`: [T · C, hidden]. `weights`: float32 [T, C].
        """
        ...
