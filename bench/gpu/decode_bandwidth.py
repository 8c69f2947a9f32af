"""How fast decode attention reads the pool, beside a device copy and others' attention.

A shape's pool has as many layers as make it several gigabytes, and a run visits each once, so no
cache holds what the next launch reads. Bytes are those that must move: attention reads the keys and
values of all tokens once; the copy reads and writes its buffer. Where the plan splits rows, the
merge is part of the time, and what blocks write and read for it is not counted as bytes. Launches
are replayed from a CUDA graph, ours and others', as a decode step is: where rows are few they take
less time than queueing them does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from bench.gpu.case import TOLERANCES
from bench.gpu.cases.block_pool import layer_strides
from bench.gpu.decode_rivals import RIVALS, Rival
from bench.gpu.device import Say, as_graph, current_stream, summary
from bench.gpu.latent_shapes import DECODE_SHAPES, LatentDecodeShape
from kernels.cuda.attention_chunks import most_tokens_read
from kernels.cuda.attention_decode import DecodePlan, DecodeVariant
from kernels.cuda.attention_variant import HEAD_SIZES, LOG2_E, NO_CAP, NO_WINDOW
from kernels.cuda.attention_wide import WideDecodeVariant
from kernels.cuda.launch import LoadedKernel
from kernels.cuda.variant import Variant

Tensor: TypeAlias = Any  # torch.Tensor; torch is imported where a device is known to be there

WORKING_SET_BYTES = 3 * 2**30
REPEATS = 20
ROUNDS = 100
"""So often rows that are split are compared with the same rows unsplit."""

# Runs queued work and returns its milliseconds, repeated.
Timer = Callable[[Callable[[], object], int], list[float]]


@dataclass(frozen=True, slots=True)
class Shape:
    """`rows` sequences of `context` tokens. `least_fraction`: of the copy, what it should reach.

    `window`: tokens that a query sees, of a variant that has one.
    """

    rows: int
    context: int
    variant: DecodeVariant
    num_kv_heads: int = 8
    least_fraction: float | None = None
    window: int | None = None

    @property
    def name(self) -> str:
        """Rows × context and the kernel."""
        seen = "" if self.window is None else f" ({self.window} seen)"
        sizes = f"{self.rows} × {self.context}{seen}, {self.num_kv_heads} kv heads"
        return f"{sizes}, {self.variant.name}"

    @property
    def has_rivals(self) -> bool:
        """Whether others' attention is measured on it: of larger heads there is hardly any."""
        return self.window is None and self.variant.head_size in HEAD_SIZES

    @property
    def scale(self) -> float:
        """Of the softmax."""
        return float(self.variant.head_size**-0.5)

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The kernels it may take."""
        return (self.variant,)

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.num_kv_heads * self.variant.group

    @property
    def query_elements(self) -> int:
        """Of a head of a query."""
        return self.variant.head_size

    @property
    def out_elements(self) -> int:
        """Of a head of the output."""
        return self.variant.head_size

    @property
    def token_elements(self) -> int:
        """Of a token in a layer of the pool."""
        return 2 * self.num_kv_heads * self.variant.head_size

    def pool_shape(self, num_blocks: int, layers: int) -> tuple[int, ...]:
        """Return how the pool lies, [N, L, 2, G, B, D]."""
        variant = self.variant
        of_layer = 2, self.num_kv_heads, variant.block_size, variant.head_size
        return num_blocks, layers, *of_layer

    def own_arguments(
        self, pool_shape: Sequence[int], layer: int, any_pointer: int
    ) -> tuple[float, ...]:
        """Return the kernel's last arguments: where a layer lies, the window, no sinks, no cap."""
        window = NO_WINDOW if self.window is None else self.window
        return *layer_strides(pool_shape, layer), window, any_pointer, NO_CAP

    def keys_and_values(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return [G, tokens, D] each of a row's blocks in a layer, [M, 2, G, B, D]."""
        keys, values = (blocks[:, i].transpose(0, 1).flatten(1, 2) for i in (0, 1))
        return keys, values

    def plan(self, num_multiprocessors: int) -> DecodePlan:
        """Return how it is launched on a device."""
        return self.variant.plan(
            self.rows, self.num_kv_heads, self.context, num_multiprocessors, self.window
        )

    def whole_plan(self) -> DecodePlan:
        """Return how it is launched with no row split."""
        most_tokens = most_tokens_read(self.context, self.window)
        return self.variant.plan_of(self.rows, self.num_kv_heads, most_tokens)


AnyShape: TypeAlias = Shape | LatentDecodeShape

_USUAL = DecodeVariant("bfloat16", 128, 4, 16)
_GEMMA = WideDecodeVariant("bfloat16", 512, 8, 16)  # of 31B, layers without windows
SHAPES: tuple[AnyShape, ...] = (
    Shape(64, 4096, _USUAL, least_fraction=0.85),
    Shape(128, 2048, _USUAL, least_fraction=0.85),
    Shape(8, 8192, _USUAL),
    Shape(1, 32768, _USUAL, least_fraction=0.55),
    Shape(64, 4096, DecodeVariant("bfloat16", 64, 4, 16)),
    Shape(64, 4096, DecodeVariant("bfloat16", 128, 8, 16)),
    Shape(64, 4096, DecodeVariant("float16", 128, 4, 32)),
    Shape(64, 4096, DecodeVariant("bfloat16", 256, 2, 16)),
    Shape(64, 4096, _GEMMA, num_kv_heads=4),
    Shape(1, 32768, _GEMMA, num_kv_heads=4),
    Shape(64, 2048, DecodeVariant("float32", 128, 4, 16)),
    Shape(64, 8192, replace(_USUAL, has_window=True), window=4096),
    Shape(8, 16384, replace(_USUAL, has_window=True), window=1024),
    *DECODE_SHAPES,
)


def measure_copy(timer: Timer, *, device: str = "cuda") -> dict[str, Any]:
    """Copy a buffer of the working set's size; return bytes a second, reads plus writes."""
    import torch

    source = torch.randint(0, 255, (WORKING_SET_BYTES,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = timer(lambda: target.copy_(source), REPEATS)
    return _with_rate(times, 2 * WORKING_SET_BYTES)


def measure_decode(
    shape: AnyShape,
    load: Callable[[Variant], LoadedKernel],
    timer: Timer,
    say: Say,
    *,
    num_multiprocessors: int,
    device: str = "cuda",
    rivals: Mapping[str, Rival] = RIVALS,
) -> dict[str, Any]:
    """Measure one shape as it is planned for a device.

    Return times, rates, the error of some rows, and the rivals' figures as `measure_rivals`.
    """
    problem = Problem(shape, device)
    plan = shape.plan(num_multiprocessors)
    visit_layers = as_graph(problem.launcher(load, plan), device)
    times = timer(visit_layers, REPEATS)
    error = problem.error_of_last_layer()
    result = {
        "shape": shape.name,
        "kernel": shape.variant.name,
        "splits": plan.splits,
        "split_rows": plan.split_rows,
        "layers": problem.layers,
        "working_set_bytes": problem.pool.numel() * problem.pool.element_size(),
        **_with_rate(times, problem.bytes_read),
        "microseconds_per_layer": summary(times)["median_ms"] * 1e3 / problem.layers,
        "max_error_of_checked_rows": error,
        "faults": [],
        "rivals": measure_rivals(problem, timer, say, rivals=rivals),
    }
    if not error <= TOLERANCES[shape.variant.dtype]:
        result["faults"] = [f"error {error:.3g} exceeds {TOLERANCES[shape.variant.dtype]:.3g}"]
    elif plan.split_rows:
        result["faults"] = problem.faults_of_merging(visit_layers, load)
    return result


def measure_rivals(
    problem: Problem, timer: Timer, say: Say, *, rivals: Mapping[str, Rival] = RIVALS
) -> dict[str, Any]:
    """Return the figures of each rival on the same rows, or the reason where there are none.

    Of some shapes there are none.
    """
    figures: dict[str, Any] = {}
    for name, make in rivals.items() if problem.shape.has_rivals else ():
        try:
            visit, num_bytes = make(problem)
            times = timer(as_graph(visit, problem.device), REPEATS)
            figures[name] = _with_rate(times, num_bytes)
        except Exception as error:  # noqa: BLE001 - whatever another's library fails with
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            figures[name] = {"unavailable": reason}
            say(f"{name}: {reason}")
    return figures


class Problem:
    """The tensors of one shape.

    `pool` as the shape says, `tables` int32 [S, M], `seq_lens` int32 [S] up to 15 short of the
    context, `query` and `out` [S, H, elements of a head].
    """

    def __init__(self, shape: AnyShape, device: str) -> None:
        import torch

        variant = shape.variant
        dtype = getattr(torch, variant.dtype)
        self.shape = shape
        self.device = device
        self.scale = shape.scale
        blocks_of_row = -(-shape.context // variant.block_size)
        num_blocks = shape.rows * blocks_of_row
        self.seq_lens: Tensor = shape.context - torch.arange(shape.rows, device=device) % 16
        self.seq_lens = self.seq_lens.int()
        self.token_bytes = shape.token_elements * dtype.itemsize
        layer_bytes = num_blocks * variant.block_size * self.token_bytes
        self.layers = max(1, math.ceil(WORKING_SET_BYTES / layer_bytes))
        tokens_seen = self.seq_lens.clamp(max=shape.window or shape.context)
        self.bytes_read = int(tokens_seen.sum()) * self.token_bytes * self.layers
        pool_shape = shape.pool_shape(num_blocks, self.layers)
        self.pool: Tensor = torch.randn(pool_shape, dtype=dtype, device=device)
        self.tables: Tensor = torch.randperm(num_blocks, device=device).int().view(shape.rows, -1)
        heads = shape.rows, shape.num_heads
        self.query: Tensor = torch.randn(*heads, shape.query_elements, dtype=dtype, device=device)
        self.out: Tensor = torch.full(
            (*heads, shape.out_elements), math.nan, dtype=dtype, device=device
        )

    def launcher(
        self, load: Callable[[Variant], LoadedKernel], plan: DecodePlan
    ) -> Callable[[], None]:
        """Return what queues the attention of every layer."""
        import torch

        # Kept by the problem, because a pointer keeps nothing.
        device, num_tickets = self.out.device, plan.split_rows * plan.grid[0]
        self.partials = torch.full(
            (plan.num_partials,), math.nan, dtype=torch.float32, device=device
        )
        self.tickets = torch.zeros(num_tickets, dtype=torch.int32, device=device)
        decode = load(self.shape.variant)
        tensors = (
            self.out, self.query, self.pool, self.tables, self.seq_lens, self.partials,
            self.tickets,
        )  # fmt: skip
        pointers = [tensor.data_ptr() for tensor in tensors]
        constants = (
            plan.split_rows,
            self.scale * LOG2_E,
            self.query[0].numel(),
            self.tables.shape[1],
        )
        own_arguments = [
            self.shape.own_arguments(self.pool.shape, layer, pointers[0])  # sinks are not looked at
            for layer in range(self.layers)
        ]

        def visit_layers() -> None:
            stream = current_stream(self.device)
            for own in own_arguments:
                decode.launch(plan.grid, stream, *pointers, *constants, *own)

        return visit_layers

    def faults_of_merging(
        self, visit_layers: Callable[[], object], load: Callable[[Variant], LoadedKernel]
    ) -> list[str]:
        """Run split rows many times; say in what they are not as unsplit ones.

        `visit_layers` queues what the last launcher does. A block that does not see what another
        has just written finds NaN, or what is another layer's.
        """
        partials, tickets = self.partials, self.tickets  # these are the launcher's
        self.launcher(load, self.shape.whole_plan())()
        unsplit = self.out.clone()
        wrong = 0
        for _ in range(ROUNDS):
            partials.fill_(math.nan)
            self.out.fill_(math.nan)
            visit_layers()
            wrong += (self.out != unsplit).any()  # on the device: the host does not wait
        faults = []
        if wrong:
            faults.append(
                f"{int(wrong)} of {ROUNDS} runs gave split rows other bits than unsplit ones"
            )
        if tickets.any():
            faults.append("split rows left tickets that are not zeros")
        return faults

    def gathered(self, row: int, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a row that it sees, [G, tokens, D], copied out of the pool."""
        keys, values = self.shape.keys_and_values(self.pool[self.tables[row].long(), layer])
        length = int(self.seq_lens[row])
        first = 0 if self.shape.window is None else max(0, length - self.shape.window)
        seen = slice(first, length)
        return keys[:, seen], values[:, seen]

    def error_of_last_layer(self) -> float:
        """Return the largest error of the first and the last row against float64."""
        import torch

        worst = 0.0
        rows = {0, self.shape.rows - 1}
        for row in rows:
            keys, values = (x.double() for x in self.gathered(row, self.layers - 1))
            query = self.query[row].double().unflatten(0, (self.shape.num_kv_heads, -1))
            weights = torch.softmax(query @ keys.transpose(1, 2) * self.scale, dim=-1)
            difference = (self.out[row].double() - (weights @ values).flatten(0, 1)).abs()
            worst = max(worst, float(difference.nan_to_num(nan=math.inf).max()))
        return worst


def _with_rate(times_ms: list[float], num_bytes: int) -> dict[str, Any]:
    figures = summary(times_ms)
    return {
        **figures,
        "bytes": num_bytes,
        "gb_per_s": num_bytes / 1e6 / figures["median_ms"],
    }
