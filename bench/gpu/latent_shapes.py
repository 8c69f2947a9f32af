"""Shapes of attention over latents for `decode_bandwidth` and `prefill_speed`: DeepSeek's.

Bytes are those of one row a token and layer, 1152 in 16 bits at 512 + 64 elements. Operations are
those of what is computed, in which latents stand for keys and values: two for each element of a row
and two for each of a latent, of each head, query token and token that it sees. Others' attention is
not measured on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from bench.gpu.cases.latent_attention import SCALE
from kernels.cuda.attention_decode import DecodePlan
from kernels.cuda.latent_attention import LatentDecodeVariant, LatentPrefillVariant
from kernels.cuda.latent_attention_layout import LatentAttentionVariant
from kernels.cuda.variant import Variant

Tensor: TypeAlias = Any  # torch.Tensor; torch is imported where a device is known to be there


class _LatentShape:
    """What both kinds have."""

    __slots__ = ()

    variant: LatentAttentionVariant
    num_kv_heads: ClassVar[int] = 1  # one row of a token is the keys of all heads
    window: ClassVar[int | None] = None
    has_rivals: ClassVar[bool] = False
    scale: ClassVar[float] = SCALE

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.variant.num_heads

    @property
    def query_elements(self) -> int:
        """Of a head of a query."""
        return self.variant.row_elements

    @property
    def out_elements(self) -> int:
        """Of a head of the output."""
        return self.variant.rank

    def keys_and_values(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return [1, tokens, R + P] and [1, tokens, R] of a row's blocks in a layer."""
        rows = blocks.flatten(0, 1)[None]
        return rows, rows[:, :, : self.variant.rank]


@dataclass(frozen=True, slots=True)
class LatentDecodeShape(_LatentShape):
    """`rows` sequences of `context` tokens. `least_fraction`: of the copy, what it should reach."""

    rows: int
    context: int
    variant: LatentDecodeVariant
    least_fraction: float | None = None

    @property
    def name(self) -> str:
        """Rows × context and the kernel."""
        return f"{self.rows} × {self.context}, {self.variant.name}"

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The kernels it may take."""
        return (self.variant,)

    @property
    def token_elements(self) -> int:
        """Of a token in a layer of the pool."""
        return self.variant.row_elements

    def pool_shape(self, num_blocks: int, layers: int) -> tuple[int, ...]:
        """Return how the pool lies, [N, L, B, R + P]."""
        return _pool_shape(self.variant, num_blocks, layers)

    def own_arguments(self, pool_shape: Sequence[int], layer: int, _: int) -> tuple[int, ...]:
        """Return the kernel's last arguments: where a layer lies."""
        return _way_to_layer(pool_shape, layer)

    def plan(self, num_multiprocessors: int) -> DecodePlan:
        """Return how it is launched on a device."""
        return self.variant.plan(self.rows, self.context, num_multiprocessors)

    def whole_plan(self) -> DecodePlan:
        """Return how it is launched with no row split."""
        return self.variant.plan_of(self.rows, self.context)


@dataclass(frozen=True, slots=True)
class LatentPrefillShape(_LatentShape):
    """`rows` sequences of `query_len` query tokens behind `context` cached ones.

    `least_tflop_per_s`: what it should reach.
    """

    rows: int
    query_len: int
    context: int
    variant: LatentPrefillVariant
    least_tflop_per_s: float | None = None

    @property
    def name(self) -> str:
        """Rows × query tokens, what is cached, and the kernel."""
        cached = f" behind {self.context}" if self.context else ""
        return f"{self.rows} × {self.query_len}{cached}, {self.variant.name}"

    @property
    def seq_len(self) -> int:
        """Tokens of a row."""
        return self.context + self.query_len

    @property
    def flop(self) -> int:
        """Operations that the answer needs."""
        seen = self.query_len * self.context + self.query_len * (self.query_len + 1) // 2
        of_head = 2 * (self.variant.row_elements + self.variant.rank)
        return self.rows * seen * self.num_heads * of_head

    def pool_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Return how the pool of one layer lies, [N, 1, B, R + P]."""
        return _pool_shape(self.variant, num_blocks, 1)

    def own_arguments(self, pool_shape: Sequence[int], _: int) -> tuple[int, ...]:
        """Return the kernel's last arguments: where the layer lies."""
        return _way_to_layer(pool_shape, 0)

    def grid(self, num_tiles: int) -> tuple[int, int, int]:
        """Return the launch grid of a tile list."""
        return self.variant.grid(num_tiles)


def _pool_shape(
    variant: LatentAttentionVariant, num_blocks: int, layers: int
) -> tuple[int, int, int, int]:
    return num_blocks, layers, variant.block_size, variant.row_elements


def _way_to_layer(pool_shape: Sequence[int], layer: int) -> tuple[int, int]:
    """Return elements from block to block, and to a layer."""
    _, layers, *of_layer = pool_shape
    elements = of_layer[0] * of_layer[1]
    return layers * elements, layer * elements


# DeepSeek V2 Lite and V3.
_LITE = "bfloat16", 16, 512, 64, 16
_LARGE = "bfloat16", 128, 512, 64, 16
DECODE_SHAPES = (
    LatentDecodeShape(64, 4096, LatentDecodeVariant(*_LITE)),
    LatentDecodeShape(1, 32768, LatentDecodeVariant(*_LITE)),
    LatentDecodeShape(64, 4096, LatentDecodeVariant(*_LARGE)),
    LatentDecodeShape(1, 32768, LatentDecodeVariant(*_LARGE)),
)
PREFILL_SHAPES = (
    LatentPrefillShape(1, 8192, 0, LatentPrefillVariant(*_LITE)),
    LatentPrefillShape(1, 512, 32768, LatentPrefillVariant(*_LITE)),
    LatentPrefillShape(1, 4096, 0, LatentPrefillVariant(*_LARGE)),
    LatentPrefillShape(1, 512, 32768, LatentPrefillVariant(*_LARGE)),
)
