"""How many operations a second prefill attention does, beside other implementations in one run.

Operations are those that causal attention needs, two products of two flops for each query head,
dimension, query token and token that it sees; what a kernel computes above the diagonal does not
count. Keys and values stay in the second cache between runs where they fit, for all alike: at these
shapes attention is bound by arithmetic.

The rivals are in `prefill_rivals`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from bench.gpu.case import TOLERANCES
from bench.gpu.cases.block_pool import layer_strides
from bench.gpu.decode_bandwidth import Timer
from bench.gpu.device import Say, current_stream, summary
from bench.gpu.latent_shapes import PREFILL_SHAPES, LatentPrefillShape
from bench.gpu.prefill_rivals import RIVALS, Rival
from kernels.cuda.attention_prefill import PrefillVariant
from kernels.cuda.attention_tiles import plan_tiles
from kernels.cuda.attention_variant import HEAD_SIZES, LOG2_E, NO_CAP, NO_WINDOW
from kernels.cuda.attention_wide import WidePrefillVariant
from kernels.cuda.launch import LoadedKernel

Tensor: TypeAlias = Any  # torch.Tensor; torch is imported where a device is known to be there

REPEATS = 10


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """`rows` sequences of `query_len` query tokens behind `context` cached ones.

    `least_tflop_per_s`: what it should reach.
    """

    rows: int
    query_len: int
    context: int
    variant: PrefillVariant
    num_kv_heads: int = 8
    least_tflop_per_s: float | None = None

    @property
    def name(self) -> str:
        """Rows × query tokens, what is cached, and the kernel."""
        cached = f" behind {self.context}" if self.context else ""
        return (
            f"{self.rows} × {self.query_len}{cached}, {self.num_kv_heads} kv heads, "
            f"{self.variant.name}"
        )

    @property
    def has_rivals(self) -> bool:
        """Whether others' attention is measured on it: of larger heads there is hardly any."""
        return self.variant.head_size in HEAD_SIZES

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.num_kv_heads * self.variant.group

    @property
    def scale(self) -> float:
        """Of the softmax."""
        return float(self.variant.head_size**-0.5)

    @property
    def query_elements(self) -> int:
        """Of a head of a query."""
        return self.variant.head_size

    @property
    def out_elements(self) -> int:
        """Of a head of the output."""
        return self.variant.head_size

    @property
    def seq_len(self) -> int:
        """Tokens of a row."""
        return self.context + self.query_len

    @property
    def flop(self) -> int:
        """Operations that the answer needs."""
        seen = self.query_len * self.context + self.query_len * (self.query_len + 1) // 2
        return 4 * self.rows * seen * self.num_heads * self.variant.head_size

    def pool_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Return how the pool of one layer lies, [N, 1, 2, G, B, D]."""
        variant = self.variant
        return num_blocks, 1, 2, self.num_kv_heads, variant.block_size, variant.head_size

    def own_arguments(self, pool_shape: Sequence[int], any_pointer: int) -> tuple[float, ...]:
        """Return the kernel's last arguments: where the layer lies, no window, no sinks, no cap."""
        return *layer_strides(pool_shape, 0), NO_WINDOW, any_pointer, NO_CAP

    def keys_and_values(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return [G, tokens, D] each of a row's blocks, [M, 2, G, B, D]."""
        keys, values = (blocks[:, i].transpose(0, 1).flatten(1, 2) for i in (0, 1))
        return keys, values

    def grid(self, num_tiles: int) -> tuple[int, int, int]:
        """Return the launch grid of a tile list."""
        return self.variant.grid(self.num_kv_heads, num_tiles)


AnyShape: TypeAlias = PrefillShape | LatentPrefillShape


_D128 = PrefillVariant("bfloat16", 128, 4, 16)
_D64 = PrefillVariant("bfloat16", 64, 4, 16)
_GEMMA = WidePrefillVariant("bfloat16", 512, 8, 16)  # of 31B, layers without windows
SHAPES: tuple[AnyShape, ...] = (
    PrefillShape(1, 8192, 0, _D128, least_tflop_per_s=250),
    PrefillShape(8, 2048, 0, _D128, least_tflop_per_s=250),
    PrefillShape(1, 512, 8192, _D128),
    PrefillShape(8, 512, 8192, _D128),
    PrefillShape(1, 8192, 0, PrefillVariant("bfloat16", 128, 8, 16), num_kv_heads=4),
    PrefillShape(1, 8192, 0, PrefillVariant("float16", 128, 4, 32)),
    PrefillShape(1, 8192, 0, _D64),
    PrefillShape(8, 512, 8192, _D64),
    PrefillShape(1, 8192, 0, PrefillVariant("bfloat16", 96, 4, 16)),
    PrefillShape(1, 8192, 0, PrefillVariant("bfloat16", 256, 2, 16)),
    PrefillShape(1, 8192, 0, _GEMMA, num_kv_heads=4),
    PrefillShape(1, 512, 32768, _GEMMA, num_kv_heads=4),
    PrefillShape(1, 2048, 0, PrefillVariant("float32", 128, 4, 16)),
    *PREFILL_SHAPES,
)


def measure_prefill(
    shape: AnyShape,
    kernel: LoadedKernel,
    timer: Timer,
    say: Say,
    *,
    device: str = "cuda",
    rivals: Mapping[str, Rival] = RIVALS,
) -> dict[str, Any]:
    """Measure one shape.

    Return times, rates, the error of some tokens, and the rivals' figures as `measure_rivals`.
    """
    problem = Problem(shape, device)
    stream = current_stream(device)
    pointers, scalars = problem.pointers(), problem.scalars
    times = timer(lambda: kernel.launch(problem.grid, stream, *pointers, *scalars), REPEATS)
    error = problem.error_of_some_tokens(problem.out)
    tolerance = TOLERANCES[shape.variant.dtype]
    return {
        "shape": shape.name,
        "kernel": shape.variant.name,
        "tiles": len(problem.tile_rows),
        **_with_rate(times, shape.flop),
        "max_error_of_checked_tokens": error,
        "faults": [] if error <= tolerance else [f"error {error:.3g} exceeds {tolerance:.3g}"],
        "rivals": measure_rivals(problem, timer, say, rivals=rivals),
    }


def measure_rivals(
    problem: Problem, timer: Timer, say: Say, *, rivals: Mapping[str, Rival] = RIVALS
) -> dict[str, Any]:
    """Return the figures of each rival on the same rows, or the reason where there are none.

    Of some shapes there are none.
    """
    figures: dict[str, Any] = {}
    for name, make in rivals.items() if problem.shape.has_rivals else ():
        try:
            attend = make(problem)
            figures[name] = _with_rate(timer(attend, REPEATS), problem.shape.flop)
            figures[name]["max_error_of_checked_tokens"] = problem.error_of_some_tokens(attend())
        except Exception as error:  # noqa: BLE001 - whatever another's library fails with
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            figures[name] = {"unavailable": reason}
            say(f"{name}: {reason}")
    return figures


class Problem:
    """The tensors of one shape.

    `pool` as the shape says, `tables` int32 [S, M], `query` and `out` [T, H, elements of a head].
    """

    def __init__(self, shape: AnyShape, device: str) -> None:
        import torch

        variant = shape.variant
        dtype = getattr(torch, variant.dtype)
        self.shape = shape
        self.device = device
        self.scale = shape.scale
        self.blocks_of_row = -(-shape.seq_len // variant.block_size)
        num_blocks = shape.rows * self.blocks_of_row
        pool_shape = shape.pool_shape(num_blocks)
        self.pool: Tensor = torch.randn(pool_shape, dtype=dtype, device=device)
        self.tables = torch.randperm(num_blocks, device=device).int().view(shape.rows, -1)
        num_tokens = shape.rows * shape.query_len
        heads = num_tokens, shape.num_heads
        self.query: Tensor = torch.randn(*heads, shape.query_elements, dtype=dtype, device=device)
        self.out = torch.full((*heads, shape.out_elements), math.nan, dtype=dtype, device=device)
        self.seq_lens = torch.full((shape.rows,), shape.seq_len, dtype=torch.int32, device=device)
        self.cu_query_lens = torch.arange(
            0, num_tokens + 1, shape.query_len, dtype=torch.int32, device=device
        )
        tiles = plan_tiles(
            [shape.query_len] * shape.rows, [shape.seq_len] * shape.rows, variant.tile_tokens
        )
        self.tile_rows, self.tile_tokens = (
            torch.from_numpy(entries).to(device) for entries in (tiles.rows, tiles.tokens)
        )
        self.grid = shape.grid(tiles.num_tiles)
        self.scalars = (
            self.scale * LOG2_E,
            self.query[0].numel(),
            self.tables.shape[1],
            *shape.own_arguments(pool_shape, self.out.data_ptr()),  # sinks are not looked at
        )

    def pointers(self) -> tuple[int, ...]:
        """Return the kernel's eight device pointers."""
        tensors = (
            self.out, self.query, self.pool, self.tables, self.seq_lens, self.cu_query_lens,
            self.tile_rows, self.tile_tokens,
        )  # fmt: skip
        return tuple(tensor.data_ptr() for tensor in tensors)

    def gathered(self) -> tuple[Tensor, Tensor]:
        """Return keys and values, [S, G, tokens, D] each, copied out of the pool."""
        blocks = self.pool[self.tables.long(), 0]  # [S, M, 2, G, B, D]
        rows = blocks.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[:, :, :, : self.shape.seq_len]
        return rows[0].contiguous(), rows[1].contiguous()

    def queries_by_row(self) -> Tensor:
        """Return the queries as [S, H, query tokens, D]."""
        return self.query.unflatten(0, (self.shape.rows, -1)).transpose(1, 2).contiguous()

    def error_of_some_tokens(self, out: Tensor) -> float:
        """Return the largest error of some tokens of the first and last row against float64.

        `out` is [T, H, D], or [S, H, query tokens, D].
        """
        import torch

        if out.dim() == 4:
            out = out.transpose(1, 2).flatten(0, 1)

        shape = self.shape
        worst = 0.0
        for row in {0, shape.rows - 1}:
            blocks = self.pool[self.tables[row].long(), 0]
            keys, values = (x.double() for x in shape.keys_and_values(blocks))
            for token in {0, shape.query_len // 2, shape.query_len - 1}:
                place = row * shape.query_len + token
                visible = shape.context + token + 1
                query = self.query[place].double().unflatten(0, (shape.num_kv_heads, -1))
                scores = query @ keys[:, :visible].transpose(1, 2) * self.scale
                exact = torch.softmax(scores, dim=-1) @ values[:, :visible]
                difference = (out[place].double() - exact.flatten(0, 1)).abs()
                worst = max(worst, float(difference.nan_to_num(nan=math.inf).max()))
        return worst


def _with_rate(times_ms: list[float], flop: int) -> dict[str, Any]:
    figures = summary(times_ms)
    return {**figures, "flop": flop, "tflop_per_s": flop / 1e9 / figures["median_ms"]}
