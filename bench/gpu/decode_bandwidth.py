"""How fast decode attention reads the pool, beside a device copy and torch's attention.

A shape's pool has as many layers as make it several gigabytes, and a run visits each once, so no
cache holds what the next launch reads. Bytes are those that must move: attention reads the keys and
values of all tokens once; the copy reads and writes its buffer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from bench.gpu.case import TOLERANCES
from bench.gpu.cases.block_pool import layer_strides
from bench.gpu.device import Say, summary
from kernels.cuda.attention_decode import LOG2_E, DecodeVariant
from kernels.cuda.launch import LoadedKernel

Tensor: TypeAlias = Any  # torch.Tensor; torch is imported where a device is known to be there

WORKING_SET_BYTES = 3 * 2**30
REPEATS = 20

# Runs queued work and returns its milliseconds, repeated.
Timer = Callable[[Callable[[], object], int], list[float]]


@dataclass(frozen=True, slots=True)
class Shape:
    """`rows` sequences of `context` tokens."""

    rows: int
    context: int
    variant: DecodeVariant
    num_kv_heads: int = 8

    @property
    def name(self) -> str:
        """Rows × context and the kernel."""
        return f"{self.rows} × {self.context}, {self.num_kv_heads} kv heads, {self.variant.name}"


_USUAL = DecodeVariant("bfloat16", 128, 4, 16)
SHAPES = (
    Shape(64, 4096, _USUAL),
    Shape(128, 2048, _USUAL),
    Shape(8, 8192, _USUAL),
    Shape(1, 32768, _USUAL),
    Shape(64, 4096, DecodeVariant("bfloat16", 64, 4, 16)),
    Shape(64, 4096, DecodeVariant("bfloat16", 128, 8, 16)),
    Shape(64, 4096, DecodeVariant("float16", 128, 4, 32)),
    Shape(64, 2048, DecodeVariant("float32", 128, 4, 16)),
)


def measure_copy(timer: Timer, *, device: str = "cuda") -> dict[str, Any]:
    """Copy a buffer of the working set's size; return bytes a second, reads plus writes."""
    import torch

    source = torch.randint(0, 255, (WORKING_SET_BYTES,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = timer(lambda: target.copy_(source), REPEATS)
    return _with_rate(times, 2 * WORKING_SET_BYTES)


def measure_decode(
    shape: Shape, kernel: LoadedKernel, timer: Timer, say: Say, *, device: str = "cuda"
) -> dict[str, Any]:
    """Measure one shape; return times, rates, the error of some rows, and torch's figures."""
    import torch

    problem = _Problem(shape, device)
    scalars = problem.scalars
    stream = torch.cuda.current_stream().cuda_stream if device == "cuda" else 0
    pointers = problem.pointers()

    def visit_layers() -> None:
        for arguments in scalars:
            kernel.launch(problem.grid, stream, *pointers, *arguments)

    times = timer(visit_layers, REPEATS)
    error = problem.error_of_last_layer()
    result = {
        "shape": shape.name,
        "kernel": shape.variant.name,
        "layers": problem.layers,
        "working_set_bytes": problem.pool.numel() * problem.pool.element_size(),
        **_with_rate(times, problem.bytes_read),
        "microseconds_per_launch": summary(times)["median_ms"] * 1e3 / problem.layers,
        "max_error_of_checked_rows": error,
        "faults": [],
    }
    if not error <= TOLERANCES[shape.variant.dtype]:
        result["faults"] = [f"error {error:.3g} exceeds {TOLERANCES[shape.variant.dtype]:.3g}"]
    try:
        result["torch_sdpa"] = problem.measure_torch(timer)
    except (RuntimeError, TypeError) as error_of_torch:  # no kernel for it, or no memory for it
        result["torch_sdpa"] = {"unavailable": str(error_of_torch).splitlines()[0]}
        say(f"torch SDPA: {result['torch_sdpa']['unavailable']}")
    return result


class _Problem:
    """The tensors of one shape."""

    def __init__(self, shape: Shape, device: str) -> None:
        import torch

        variant = shape.variant
        dtype = getattr(torch, variant.dtype)
        self._shape = shape
        self._scale = variant.head_size**-0.5
        blocks_of_row = -(-shape.context // variant.block_size)
        num_blocks = shape.rows * blocks_of_row
        self.seq_lens = shape.context - torch.arange(shape.rows, device=device) % 16
        self.seq_lens = self.seq_lens.int()
        token_elements = 2 * shape.num_kv_heads * variant.head_size
        layer_bytes = num_blocks * variant.block_size * token_elements * dtype.itemsize
        self.layers = max(1, math.ceil(WORKING_SET_BYTES / layer_bytes))
        self.bytes_read = int(self.seq_lens.sum()) * token_elements * dtype.itemsize * self.layers
        pool_shape = (
            num_blocks, self.layers, 2, shape.num_kv_heads, variant.block_size, variant.head_size,
        )  # fmt: skip
        self.pool: Tensor = torch.randn(pool_shape, dtype=dtype, device=device)
        self.tables = torch.randperm(num_blocks, device=device).int().view(shape.rows, -1)
        num_heads = shape.num_kv_heads * variant.group
        self.query = torch.randn(
            shape.rows, num_heads, variant.head_size, dtype=dtype, device=device
        )
        self.out = torch.full_like(self.query, math.nan)
        self.grid = variant.grid(shape.rows, shape.num_kv_heads)
        self.scalars = [
            (
                self._scale * LOG2_E,
                self.query[0].numel(),
                self.tables.shape[1],
                *layer_strides(pool_shape, layer),
            )
            for layer in range(self.layers)
        ]

    def pointers(self) -> tuple[int, ...]:
        """Return the kernel's five device pointers."""
        tensors = (self.out, self.query, self.pool, self.tables, self.seq_lens)
        return tuple(tensor.data_ptr() for tensor in tensors)

    def gathered(self, row: int, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a row, [G, tokens, D], copied out of the pool."""
        blocks = self.pool[self.tables[row].long(), layer]  # [M, 2, G, B, D]
        length = int(self.seq_lens[row])
        keys, values = (blocks[:, i].transpose(0, 1).flatten(1, 2)[:, :length] for i in (0, 1))
        return keys, values

    def error_of_last_layer(self) -> float:
        """Return the largest error of the first and the last row against float64."""
        import torch

        worst = 0.0
        rows = {0, self._shape.rows - 1}
        for row in rows:
            keys, values = (x.double() for x in self.gathered(row, self.layers - 1))
            query = self.query[row].double().unflatten(0, (self._shape.num_kv_heads, -1))
            weights = torch.softmax(query @ keys.transpose(1, 2) * self._scale, dim=-1)
            difference = (self.out[row].double() - (weights @ values).flatten(0, 1)).abs()
            worst = max(worst, float(difference.nan_to_num(nan=math.inf).max()))
        return worst

    def measure_torch(self, timer: Timer) -> dict[str, Any]:
        """Measure scaled_dot_product_attention on keys and values gathered beforehand.

        All rows are cut to the shortest, since torch takes one length; its bytes are counted so.
        """
        import torch

        sdpa = torch.nn.functional.scaled_dot_product_attention
        length = int(self.seq_lens.min())
        gathered = []
        for layer in range(self.layers):
            rows = [self.gathered(row, layer) for row in range(self._shape.rows)]
            gathered.append(
                [torch.stack([row[i][:, :length] for row in rows]).contiguous() for i in (0, 1)]
            )
        query = self.query[:, :, None]

        def visit_layers() -> None:
            for keys, values in gathered:
                sdpa(query, keys, values, scale=self._scale, enable_gqa=True)

        keys = gathered[0][0]
        moved = 2 * keys.numel() * keys.element_size() * self.layers
        return _with_rate(timer(visit_layers, REPEATS), moved)


def _with_rate(times_ms: list[float], num_bytes: int) -> dict[str, Any]:
    figures = summary(times_ms)
    return {
        **figures,
        "bytes": num_bytes,
        "gb_per_s": num_bytes / 1e6 / figures["median_ms"],
    }
