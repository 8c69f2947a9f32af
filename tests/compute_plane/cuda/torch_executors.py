"""The CUDA executor on torch's CPU device with tiny models, and a driver that plays a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from compute_plane.cuda.block_pools import BlockPools
from compute_plane.cuda.drivers import CpuDriver, Driver, Event, Graph
from compute_plane.cuda.executor import CudaExecutor
from compute_plane.cuda.operations import DeviceOperations
from compute_plane.cuda.reference_operations import ReferenceOperations
from compute_plane.cuda.weights import place_weights
from compute_plane.model.assets import ModelAssets
from compute_plane.model.loader import LoadedModel
from compute_plane.model.spec import ModelSpec
from compute_plane.model.weights import LlamaWeights
from tests.compute_plane.executor.tiny_llama import ArraySource, tiny_spec, tiny_weights

SPEC = tiny_spec()
NUM_BLOCKS, BLOCK_SIZE = 260, 4


class TinyModel(LoadedModel):
    """A model whose weights are made up."""

    def load_weights(self, num_threads: int = 2) -> LlamaWeights:  # noqa: ARG002
        return tiny_weights(self.spec)


def tiny_model(spec: ModelSpec) -> LoadedModel:
    """Return a model as a plane loads it, but for its text side."""
    assets = ModelAssets.__new__(ModelAssets)
    return TinyModel(
        spec, assets, ArraySource(spec, tiny_weights(spec), None), Path("memory"), None
    )


def torch_executor(
    spec: ModelSpec = SPEC,
    driver: Driver | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    num_blocks: int = NUM_BLOCKS,
    block_size: int = BLOCK_SIZE,
    num_host_blocks: int = 0,
    operations: DeviceOperations | None = None,
    keep_logits: bool = False,
) -> CudaExecutor:
    """Return the executor over a pool of NaN, as previous owners might have left it."""
    driver = driver or CpuDriver()
    pools = BlockPools(
        spec, driver, dtype=dtype, block_size=block_size, num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
    )  # fmt: skip
    pools.device.fill_(float("nan"))
    pools.host.fill_(float("nan"))
    weights = place_weights(tiny_weights(spec), dtype, driver.device)
    operations = operations or ReferenceOperations()
    return CudaExecutor(spec, weights, pools, operations, driver, keep_logits=keep_logits)


@dataclass
class PendingCopy:
    """A copy to the host that the device has not made yet."""

    target: Tensor
    content: Tensor
    is_made: bool = False

    def is_done(self) -> bool:
        return self.is_made

    def wait(self) -> None:
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
        self.driver.graph_bytes -= self.num_bytes


@dataclass
class RecordingDriver(CpuDriver):
    """A device with graphs whose results arrive only when they are waited for.

    `bytes_of_capture`: what the next graphs take, in turn; 0 when that is used up.
    """

    calls: list[str] = field(default_factory=list)
    host_buffers: list[int] = field(default_factory=list)
    bytes_of_capture: list[int] = field(default_factory=list)
    capture_failure: str | None = None
    replay_failure: str | None = None
    graph_bytes: int = 0
    has_graphs = True

    def __post_init__(self) -> None:
        super().__init__()

    def host_buffer(self, num_bytes: int) -> Tensor:
        self.host_buffers.append(num_bytes)
        return super().host_buffer(num_bytes)

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.calls.append("copy")
        super().copy(target, source)

    def download(self, target: Tensor, source: Tensor) -> Event:
        self.calls.append("download")
        return PendingCopy(target, source.clone())

    def capture(self, work: Callable[[], None]) -> Graph:
        self.calls.append("capture")
        if self.capture_failure is not None:
            raise RuntimeError(self.capture_failure)
        work()
        num_bytes = self.bytes_of_capture.pop(0) if self.bytes_of_capture else 0
        self.graph_bytes += num_bytes
        return ReplayedGraph(self, work, num_bytes)

    def reserved_bytes(self) -> int:
        return self.graph_bytes

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def take_calls(self) -> list[str]:
        """Return the calls since the last time."""
        calls, self.calls = self.calls, []
        return calls
