"""Which kernels a model runs on, where there is no device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from compute_plane.cuda.kernel_operations import KernelOperations
from compute_plane.cuda.weight_plan import plan_weights

if TYPE_CHECKING:
    from torch import Tensor

    from compute_plane.model.loader import LoadedModel
    from kernels.cuda.variant import Variant


def kernels_of(
    model: LoadedModel,
    dtype: str,
    block_size: int,
    *,
    configured: str = "auto",
    kv_dtype: str = "",
) -> tuple[Variant, ...]:
    """Return the kernels of a model whose steps are computed in `dtype`.

    `configured`: what `--dtype` says. `kv_dtype`: of its pool, the same as of steps unless given.
    Raises UnsupportedVariantError where there is none for a size that it has.
    """
    plan = plan_weights(model.spec, model.source, dtype, configured)
    made = KernelOperations(
        Nowhere(), model.spec, dtype, block_size, plan.quantized, kv_dtype or dtype,
        has_dense=plan.has_dense, experts=plan.experts,
    )  # fmt: skip
    return tuple(made.variants)


class Nowhere:
    """The launcher of a device that is not there."""

    device = torch.device("meta")
    num_multiprocessors = 1
    fetches_ahead = True

    def prepare(self, variants: Sequence[Variant]) -> None:
        """Load nothing."""

    def launch(
        self, variant: Variant, grid: tuple[int, int, int], *arguments: Tensor | float
    ) -> None:
        """Refuse."""
        raise RuntimeError(f"{variant.name} was launched without a device: {grid}, {arguments}")

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Have the work refused, if it launches anything."""
        work()
        return work
