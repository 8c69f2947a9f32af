"""The kernels of attention over latents: what tokens leave is written, and attended to.

Scratch comes from torch's allocator at every call; in a captured graph it is the graph's own.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.cuda.attention_chunks import num_tickets
from kernels.cuda.attention_variant import LOG2_E
from kernels.cuda.errors import UnsupportedVariantError
from kernels.cuda.fetched_weights import NOTHING
from kernels.cuda.latent_attention import LatentDecodeVariant, LatentPrefillVariant
from kernels.cuda.latent_write import LatentWriteVariant
from kernels.cuda.rms_norm import RmsNormVariant

if TYPE_CHECKING:
    from compute_plane.cuda.latent_operations import LatentNorm
    from compute_plane.cuda.launchers import Launcher
    from compute_plane.cuda.mixers import Turns
    from compute_plane.cuda.operands import PrefillRows
    from compute_plane.model.spec import ModelSpec
    from kernels.cuda.variant import Variant


class LatentKernels:
    """`LatentOperations` by kernels, of a model that has latents.

    `dtype`: of a step and of the pool, by name; `kv_dtype`: of a pool that has another one, which
    they do not read. Raises UnsupportedVariantError for what they are not written for.
    """

    def __init__(
        self,
        launcher: Launcher,
        spec: ModelSpec,
        dtype: str,
        block_size: int,
        kv_dtype: str | None,
    ) -> None:
        of = spec.latents
        if of is None:
            raise ValueError("the model has no latents")
        if kv_dtype is not None:
            raise UnsupportedVariantError("kv_cache_dtype", dtype, kv_dtype)
        self._launcher = launcher
        shape = dtype, spec.num_heads, of.rank, of.turning, block_size
        self._norm = None
        if of.query_rank:
            self._norm = RmsNormVariant(dtype, of.query_rank, adds_residual=False)
        self._write = LatentWriteVariant(dtype, of.rank, of.turning, block_size)
        self._decode = LatentDecodeVariant(*shape)
        self._prefill = LatentPrefillVariant(*shape)
        self._plan_decode = lru_cache(maxsize=64)(self._decode.plan)
        self._tickets = torch.zeros(
            num_tickets(launcher.num_multiprocessors), dtype=torch.int32, device=launcher.device
        )

    @property
    def variants(self) -> list[Variant]:
        """Every kernel that may be launched."""
        norms = [] if self._norm is None else [self._norm]
        return [*norms, self._write, self._decode, self._prefill]

    @property
    def tile_tokens(self) -> tuple[int, ...]:
        """Query tokens of a prefill tile."""
        return (self._prefill.tile_tokens,)

    def norm_queries(self, out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
        """Normalise rows."""
        assert self._norm is not None
        grid = self._norm.grid(len(out), NOTHING)
        self._launcher.launch(
            self._norm, grid, out, x, x, weight, weight, eps, 1.0, out, *NOTHING.arguments
        )

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
        """Normalise, rotate and write, in one launch."""
        num_tokens, num_heads, _ = queries.shape
        angles, positions = turns
        self._launcher.launch(
            self._write,
            self._write.grid(num_tokens, num_heads),
            queries,
            pool,
            inputs,
            turning,
            *angles,
            positions,
            kv_slots,
            *own,
            num_heads,
            *_layer_of(pool, layer),
            inputs.stride(0),
            *turning.stride()[:2],
        )

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
        """Attend with one token a row; some or all are split where that fills the device."""
        plan = self._plan_decode(len(queries), longest, self._launcher.num_multiprocessors)
        partials = torch.empty(plan.num_partials, dtype=torch.float32, device=queries.device)
        self._launcher.launch(
            self._decode,
            plan.grid,
            out,
            queries,
            pool,
            block_tables,
            seq_lens,
            partials,
            self._tickets,
            plan.split_rows,
            scale * LOG2_E,
            queries.stride(0),
            block_tables.shape[1],
            *_layer_of(pool, layer),
        )

    def most_partials(self, num_rows: int, longest: int) -> int:
        """Return how many float32 `attention_decode` has for partial results, at most."""
        return self._decode.most_partials(num_rows, longest, self._launcher.num_multiprocessors)

    def attention_prefill(
        self,
        out: Tensor,
        queries: Tensor,
        pool: Tensor,
        layer: int,
        rows: PrefillRows,
        scale: float,
    ) -> None:
        """Attend with the last tokens of each row, tile by tile."""
        (tiles,) = rows.tiles
        self._launcher.launch(
            self._prefill,
            self._prefill.grid(len(tiles.rows)),
            out,
            queries,
            pool,
            rows.block_tables,
            rows.seq_lens,
            rows.cu_query_lens,
            *tiles,
            scale * LOG2_E,
            queries.stride(0),
            rows.block_tables.shape[1],
            *_layer_of(pool, layer),
        )


def _layer_of(pool: Tensor, layer: int) -> tuple[int, int]:
    """Return a kernel's way to a layer of the pool, in elements: from block to block, to it."""
    return pool.stride(0), layer * pool.stride(1)
