"""The CUDA executor on torch's CPU device with tiny models, and a driver that plays a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from compute_plane.cuda.block_pools import BlockPools
from compute_plane.cuda.drivers import CpuDriver, Driver, Event, Graph, part_of
from compute_plane.cuda.executor import CudaExecutor
from compute_plane.cuda.operations import DeviceOperations
from compute_plane.cuda.reference_operations import ReferenceOperations
from compute_plane.cuda.weight_plan import WeightPlan, plan_weights
from compute_plane.cuda.weights import DTYPES
from compute_plane.model.assets import ModelAssets
from compute_plane.model.loader import LoadedModel
from compute_plane.model.spec import ModelSpec
from compute_plane.model.tensor import TensorFormat
from tests.compute_plane.executor.tiny_llama import tiny_spec
from tests.compute_plane.executor.tiny_sources import ArraySource
from tests.compute_plane.executor.tiny_weights import tiny_weights
from tests.golden.batch_driver import NUM_STATES

SPEC = tiny_spec()
NUM_BLOCKS, BLOCK_SIZE = 260, 4


def tiny_model(spec: ModelSpec, formats: Mapping[str, TensorFormat] | None = None) -> LoadedModel:
    """Return a model of made-up weights as a plane loads it, but for its text side."""
    assets = ModelAssets.__new__(ModelAssets)
    source = ArraySource(spec, tiny_weights(spec), formats)
    return LoadedModel(spec, assets, source, Path("memory"), None)


def tiny_plan(
    spec: ModelSpec, dtype: torch.dtype, formats: Mapping[str, TensorFormat] | None = None
) -> WeightPlan:
    """Return the plan of such a model's weights; what is quantised stays so."""
    (name,) = (name for name, known in DTYPES.items() if known == dtype)
    return plan_weights(spec, tiny_model(spec, formats).source, name)


def torch_executor(
    spec: ModelSpec = SPEC,
    driver: Driver | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    pool_dtype: torch.dtype | None = None,
    num_blocks: int = NUM_BLOCKS,
    block_size: int = BLOCK_SIZE,
    num_host_blocks: int = 0,
    operations: DeviceOperations | None = None,
    keep_logits: bool = False,
    formats: Mapping[str, TensorFormat] | None = None,
    plan: WeightPlan | None = None,
) -> CudaExecutor:
    """Return the executor over a pool of NaN, as previous owners might have left it; states, too.

    `pool_dtype`: of keys and values, if not `dtype`. `plan`: of weights that are not the tiny ones.
    """
    driver = driver or CpuDriver()
    pools = BlockPools(
        spec, driver, dtype=pool_dtype or dtype, block_size=block_size, num_blocks=num_blocks,
        num_host_blocks=num_host_blocks, num_states=0 if spec.recurrence is None else NUM_STATES,
    )  # fmt: skip
    states = [] if pools.states is None else [pools.states.device]
    for pool in (pools.device, pools.host, *states):
        pool.view(torch.uint8).fill_(0xFF)
    weights = (plan or tiny_plan(spec, dtype, formats)).place(driver.device)
    operations = operations or ReferenceOperations(spec.activation)
    return CudaExecutor(spec, weights, pools, operations, driver, keep_logits=keep_logits)


@dataclass
class PendingCopy:
    """A copy to the host that the device has not made yet."""

    driver: RecordingDriver
    target: Tensor
    content: Tensor
    is_made: bool = False

    def is_done(self) -> bool:
        return self.is_made

    def wait(self) -> None:
        self.driver.check()
        self.target.copy_(self.content)
        self.is_made = True


@dataclass
class ReplayedGraph:
    """A graph that repeats what it was captured from, on the same memory."""

    driver: RecordingDriver
    work: Callable[[], None]
    num_bytes: int

    def replay(self) -> None:
        self.driver.calls.append("replay")
        if self.driver.replay_failure is not None:
            raise RuntimeError(self.driver.replay_failure)
        self.work()

    def release(self) -> None:
        self.driver.calls.append("release")
        if self.driver.keeps_released:
            self.driver.unused_bytes += self.num_bytes
        else:
            self.driver.graph_bytes -= self.num_bytes


@dataclass
class RecordingDriver(CpuDriver):
    """A device with graphs whose results arrive only when they are waited for.

    `memory`: in bytes; None: the device has none of its own. `bytes_of_capture`: what the next
    graphs take, in turn; 0 when that is used up. `keeps_released`: the memory of released graphs
    stays held, and the next graphs find room in it. `fault`: what the device reports to whoever
    waits for it, and does nothing.
    """

    calls: list[str] = field(default_factory=list)
    watched: list[bool] = field(default_factory=list)
    host_buffers: list[int] = field(default_factory=list)
    bytes_of_capture: list[int] = field(default_factory=list)
    capture_failure: str | None = None
    replay_failure: str | None = None
    unused_bytes: int = 0
    graph_bytes: int = 0
    memory: int | None = 1 << 40
    keeps_released: bool = False
    fault: str | None = None
    has_graphs = True

    def __post_init__(self) -> None:
        super().__init__()

    def host_buffer(self, num_bytes: int) -> Tensor:
        self.host_buffers.append(num_bytes)
        return super().host_buffer(num_bytes)

    def device_buffer(self, num_bytes: int) -> Tensor:
        return super().device_buffer(num_bytes).fill_(0xFF)  # as previous owners might have left it

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.calls.append("copy")
        super().copy(target, source)

    def copy_part(
        self, target: Tensor, first: int, source: Tensor, begin: int, num_bytes: int
    ) -> None:
        if source.dtype == torch.uint8:
            super().copy_part(target, first, source, begin, num_bytes)
            return
        # Both stay on the device.
        self.calls.append("tokens" if source.dtype == torch.int64 else "states")
        part_of(target, first, num_bytes).copy_(part_of(source, begin, num_bytes))

    def download(self, target: Tensor, source: Tensor, *, is_watched: bool = False) -> Event:
        self.calls.append("download")
        self.watched.append(is_watched)
        return PendingCopy(self, target, source.clone())

    def capture(self, work: Callable[[], None]) -> Graph:
        self.calls.append("capture")
        if self.capture_failure is not None:
            raise RuntimeError(self.capture_failure)
        work()
        num_bytes = self.bytes_of_capture.pop(0) if self.bytes_of_capture else 0
        found = min(self.unused_bytes, num_bytes)
        self.unused_bytes -= found
        self.graph_bytes += num_bytes - found
        return ReplayedGraph(self, work, num_bytes)

    def total_bytes(self) -> int:
        return self.memory or 0

    def free_bytes(self) -> int | None:
        return None if self.memory is None else self.memory - self.graph_bytes

    def held_bytes(self) -> int:
        return self.graph_bytes

    def synchronize(self) -> None:
        self.calls.append("synchronize")
        self.check()

    def check(self) -> None:
        if self.fault is not None:
            raise RuntimeError(self.fault)

    def take_calls(self) -> list[str]:
        """Return the calls since the last time."""
        calls, self.calls = self.calls, []
        return calls
