"""How long launches take that stand between a layer's products in few architectures, and copies.

    relu2         of the MLPs of Nemotron Nano 9B v2
    joint_norms   of the heads of OLMo 2 7B, all together
    latent_write  of DeepSeek V2 Lite's latents and what turns of its heads
    state copies  of whole states of Qwen3.5 4B, one after the other, as the plane makes them

Many launches of one follow each other in a graph, on the same tensors, which the product ahead
would have left in the second cache too: what is measured of few rows is what a launch costs a step.
Bytes are those that a launch reads and writes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from bench.gpu import recurrence_speed
from bench.gpu.device import as_graph, summary
from bench.gpu.matmul_bandwidth import REPEATS
from bench.gpu.recurrence_speed import FLOAT_BYTES
from kernels.cuda.fetched_weights import NOTHING
from kernels.cuda.joint_norms import JointNormsVariant
from kernels.cuda.latent_write import LatentWriteVariant
from kernels.cuda.relu2 import Relu2Variant

if TYPE_CHECKING:
    from bench.gpu.decode_bandwidth import Timer
    from compute_plane.cuda.launchers import Launcher
    from compute_plane.model.spec import ModelSpec
    from kernels.cuda.variant import Variant

Tensor: TypeAlias = Any  # torch.Tensor; torch is imported where a device is known to be there
Grid: TypeAlias = tuple[int, int, int]
Arguments: TypeAlias = tuple[Any, ...]

LAUNCHES: Final = 64
"""Of a graph."""
DTYPE: Final = "bfloat16"
ITEM_BYTES: Final = 2
EPS: Final = 1e-5
INNER_SIZE: Final = 15680
HEADS: Final = (4096, 4096)
"""Elements of all query heads, and of all key heads."""
LATENT_HEADS: Final = 16
RANK, TURNING, PLAIN, BLOCK_SIZE = 512, 64, 128, 16
NUM_LAYERS: Final = 24
"""Of a state: of Qwen3.5 4B's 32 layers those without attention."""


@dataclass(frozen=True, slots=True)
class SmallShape:
    """`num_rows` rows through a kernel, of which `what` is an operation."""

    what: str
    num_rows: int

    @property
    def name(self) -> str:
        """Operation and rows."""
        return f"{self.what}, {self.num_rows} rows"

    @property
    def variant(self) -> Variant:
        """The kernel."""
        return VARIANTS[self.what]

    def drawn(self, device: str) -> tuple[Grid, Arguments, int]:
        """Return grid and arguments of a launch, and the bytes it moves."""
        return DRAWN[self.what](self.num_rows, device)


def _relu2(num_rows: int, device: str) -> tuple[Grid, Arguments, int]:
    values = _normal(num_rows, INNER_SIZE, device=device)
    grid = RELU2.grid(num_rows, INNER_SIZE, NOTHING)
    return grid, (values, INNER_SIZE, values, *NOTHING.arguments), 2 * values.nbytes


def _joint_norms(num_rows: int, device: str) -> tuple[Grid, Arguments, int]:
    qkv = _normal(num_rows, HEADS[0] + 2 * HEADS[1], device=device)
    norms = [_normal(size, device=device) for size in HEADS]
    num_bytes = ITEM_BYTES * sum(HEADS) * (2 * num_rows + 1)
    return JOINT_NORMS.grid(num_rows), (qkv, *norms, EPS), num_bytes


def _latent_write(num_rows: int, device: str) -> tuple[Grid, Arguments, int]:
    import torch

    row = RANK + TURNING
    num_blocks = -(-num_rows // BLOCK_SIZE)
    queries = _normal(num_rows, LATENT_HEADS, row, device=device)
    pool = _normal(num_blocks, 1, 1, 1, BLOCK_SIZE, row, device=device)
    inputs = _normal(num_rows, row, device=device)
    made = _normal(num_rows, LATENT_HEADS, PLAIN + TURNING, device=device)
    turning = made[:, :, PLAIN:]
    angles = torch.rand(2, num_rows, TURNING // 2, device=device)
    positions = torch.arange(num_rows, dtype=torch.int32, device=device)
    weight = _normal(RANK, device=device)
    arguments = (
        queries, pool, inputs, turning, angles[0], angles[1], positions, positions.long(), weight,
        EPS, LATENT_HEADS, pool.stride(0), 0, inputs.stride(0), *turning.stride()[:2],
    )  # fmt: skip
    moved = ITEM_BYTES * (row + LATENT_HEADS * TURNING)
    num_bytes = num_rows * (2 * moved + FLOAT_BYTES * TURNING) + weight.nbytes
    return LATENT_WRITE.grid(num_rows, LATENT_HEADS), arguments, num_bytes


RELU2: Final = Relu2Variant(DTYPE)
JOINT_NORMS: Final = JointNormsVariant(DTYPE, *HEADS)
LATENT_WRITE: Final = LatentWriteVariant(DTYPE, RANK, TURNING, BLOCK_SIZE)
VARIANTS: Final[dict[str, Variant]] = {
    "relu2": RELU2, "joint_norms": JOINT_NORMS, "latent_write": LATENT_WRITE,
}  # fmt: skip
DRAWN: Final[dict[str, Callable[[int, str], tuple[Grid, Arguments, int]]]] = {
    "relu2": _relu2, "joint_norms": _joint_norms, "latent_write": _latent_write,
}  # fmt: skip
SHAPES: Final = tuple(SmallShape(what, rows) for what in VARIANTS for rows in (1, 64, 2048))


@dataclass(frozen=True, slots=True)
class CopyShape:
    """The copies of a step in which so many rows have filled a block."""

    num_copies: int

    @property
    def name(self) -> str:
        """Of states, how many."""
        return f"copies of states, {self.num_copies}"


COPIES: Final = (CopyShape(1), CopyShape(8))


def measure_launch(
    shape: SmallShape, launcher: Launcher, timer: Timer, *, device: str = "cuda"
) -> dict[str, Any]:
    """Measure one shape."""
    launcher.prepare([shape.variant])
    grid, arguments, num_bytes = shape.drawn(device)

    def visit() -> None:
        for _ in range(LAUNCHES):
            launcher.launch(shape.variant, grid, *arguments)

    return _figures(shape.name, timer(as_graph(visit, device), REPEATS), LAUNCHES, num_bytes)


def measure_copies(shape: CopyShape, timer: Timer, *, device: str = "cuda") -> dict[str, Any]:
    """Measure copies from one half of a pool of states to the other."""
    import torch

    from compute_plane.cuda.cuda_driver import CudaDriver
    from compute_plane.cuda.drivers import CpuDriver, Driver
    from compute_plane.cuda.state_pool import StatePool
    from compute_plane.executor.interface import StateCopy

    driver: Driver = CpuDriver()
    if device == "cuda":
        driver = CudaDriver(torch.device("cuda", torch.cuda.current_device()))
    count = shape.num_copies
    pool = StatePool(_model_with_states(), driver, 2 * count)
    copies = [StateCopy(state, count + state) for state in range(count)]
    with driver.computing():  # so that the timer's events are in the stream of the copies
        times = timer(lambda: pool.run(copies), REPEATS)
    return _figures(shape.name, times, count, pool.num_bytes // count)


def _model_with_states() -> ModelSpec:
    """Return the first of the models whose layers are measured, with all its layers."""
    shape = recurrence_speed.SHAPES[0]
    layers = frozenset(range(NUM_LAYERS))
    return replace(
        shape.spec(), num_layers=NUM_LAYERS, recurrence=replace(shape.sizes, layers=layers)
    )


def _figures(name: str, times_ms: list[float], count: int, num_bytes: int) -> dict[str, Any]:
    """Return times of `count` launches or copies of `num_bytes` each, and of one."""
    figures = summary(times_ms)
    each_us = figures["median_ms"] * 1e3 / count
    return {
        "shape": name, **figures, "bytes": num_bytes, "microseconds": each_us,
        "gb_per_s": num_bytes / 1e3 / each_us,
    }  # fmt: skip


def _normal(*shape: int, device: str) -> Tensor:
    import torch

    return torch.randn(shape, dtype=torch.bfloat16, device=device)
