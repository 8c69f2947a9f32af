"""What a device computes for attention over latents: the border to its kernels, as `operations` is.

Letters beside those of `operations`: those of `kernels.reference.latent_attention`, R elements of a
latent, P that turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from compute_plane.cuda.mixers import Turns
    from compute_plane.cuda.operands import PrefillRows


class LatentNorm(NamedTuple):
    """The RMSNorm of a layer's latents: `weight` [R] and `eps`."""

    weight: Tensor
    eps: float


class LatentOperations(Protocol):
    """The operations of one device."""

    def norm_queries(self, out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
        """Normalise what queries are made of; `out`, `x`: [T, K], `weight`: [K]."""
        ...

    def write(
        self,
        queries: Tensor,
        pool: Tensor,
        layer: int,
        inputs: Tensor,
        turning: Tensor,
        turns: Turns,
        kv_slots: Tensor,
        own: LatentNorm,
    ) -> None:
        """Put what tokens leave into a layer of `pool`, and what turns of queries into `queries`.

        `queries`: [T, H, R + P], of which the last P of a head are written. `inputs`: [T, R + P],
        contiguous; `turning`: [T, H, P], elements of which are neighbours. `turns`: of angles
        cosines and sines have [positions, P/2] each. `kv_slots`: int64 [T]; a negative one writes
        nothing to the pool. `own`: of latents.
        """
        ...

    def attention_decode(
        self,
        out: Tensor,
        queries: Tensor,
        pool: Tensor,
        layer: int,
        block_tables: Tensor,
        seq_lens: Tensor,
        longest: int,
        scale: float,
    ) -> None:
        """Attend as `DeviceOperations.attention_decode`; `out`: [S, H, R]."""
        ...

    def attention_prefill(
        self,
        out: Tensor,
        queries: Tensor,
        pool: Tensor,
        layer: int,
        rows: PrefillRows,
        scale: float,
    ) -> None:
        """Attend as `DeviceOperations.attention_prefill`; `out`: [T, H, R]."""
        ...
