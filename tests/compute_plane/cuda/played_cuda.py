"""A CUDA runtime that is played, and notes which accesses to memory nothing has put in order.

`CudaDriver` itself runs on it, over torch's CPU device: `torch.cuda`'s streams, events and graphs
are replaced, and a `TorchFunctionMode` sees every tensor operation. Each is run at once, but counts
as queued: it happens behind what its stream had, what that stream was told to wait for, and what
the host did before. What was in no order is a race (`memory_order`); so counts a thread that speaks
to a device which is not its current one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from compute_plane.cuda import cuda_driver
from compute_plane.cuda.cuda_driver import CudaDriver
from compute_plane.cuda.drivers import part_of
from compute_plane.cuda.operations import DeviceOperations
from compute_plane.cuda.reference_operations import ReferenceOperations
from tests.compute_plane.cuda.memory_order import HOST, Clock, MemoryOrder

MEMORY_BYTES = 1 << 33

WRITTEN = dict.fromkeys(
    ("add_rms_norm", "delta_net", "gated_convolution", "mamba2", "rope_write_kv", "sample"), 2
)
"""Operations that write more than their first argument: how many."""
WITHOUT_CONTENT = ("empty", "empty_like")
"""Operations that make memory and write nothing to it."""


class Stream:
    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.device = torch.device("cuda", 1)

    def wait_stream(self, other: Stream) -> None:
        event = Event(self.world)
        event.record(other)
        self.wait_event(event)

    def wait_event(self, event: Event) -> None:
        self.world.join(self.name, event.clock)

    def record_event(self) -> Event:
        event = Event(self.world)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.world.join(HOST, self.world.clock(self.name))


class Event:
    def __init__(self, world: World) -> None:
        self.world = world
        self.clock: Clock = {}

    def record(self, stream: Stream) -> None:
        self.world.queue(stream.name)
        self.clock = dict(self.world.clock(stream.name))

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.world.check_device()
        if threading.get_ident() == self.world.thread:  # what others wait for orders nothing here
            self.world.join(HOST, self.clock)


class Pool:
    """Memory that graphs are captured into; torch gives it up with the last graph in it."""

    def __init__(self) -> None:
        self.num_graphs: int | None = None

    def join(self) -> None:
        if self.num_graphs == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self.num_graphs = (self.num_graphs or 0) + 1


class Graph:
    """Keeps what is queued while it is captured; a replay does it again, into the same memory.

    `nodes`: what to do again, and the tensors that were made by it.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.pool: Pool | None = None
        self.nodes: list[tuple[Callable[[], Any], list[Tensor]]] = []

    def replay(self) -> None:
        for again, made in self.nodes:
            found = [leaf for leaf in tree_leaves(again()) if isinstance(leaf, Tensor)]
            for target, source in zip(made, found, strict=False):
                if target is not source:
                    target.copy_(source)

    def reset(self) -> None:
        self.nodes.clear()
        if self.pool is not None and self.pool.num_graphs is not None:
            self.pool.num_graphs -= 1
        self.pool = None


class World(MemoryOrder, TorchFunctionMode):
    """The played runtime."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()
        self.threads_with_device: set[int] = set()
        self.capturing: Graph | None = None
        self.become(self.new_stream("default"))

    def become(self, stream: Stream) -> None:
        """Make a stream the current one."""
        self.current, self.owner = stream, stream.name

    def new_stream(self, name: str | None = None) -> Stream:
        stream = Stream(self, name or f"stream {len(self.clocks)}")
        self.clocks[stream.name] = {}
        return stream

    # --- operations ---

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if self.is_paused or name == "__get__":
            return func(*args, **named)
        if name in ("numpy", "tolist", "cpu"):
            return self._read_by_host(name, func, args[0])
        is_pinned = bool(named.pop("pin_memory", False))
        found = func(*args, **named)
        made = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        if name == "to" and any(isinstance(value, torch.device) for value in args):
            self.current.synchronize()  # of memory that is not pinned: the host waits
        if is_pinned:
            self.memory(made[0], is_pinned=True)
        elif made or name == "__setitem__":
            self._note(name, lambda: func(*args, **named), (args, named), made)
        return found

    def _read_by_host(self, name: str, func: Callable[..., Any], tensor: Tensor) -> Any:
        """Note what the host gets of a tensor: of pinned memory at once, else when it is there."""
        memory = self.memories.get(tensor.untyped_storage()._cdata)
        if memory is None:
            return func(tensor)
        if memory.is_pinned:
            self.tick(HOST)
            # It may be written as well.
            self.touch(tensor, HOST, writes=True, what=f"the host's {name}")
            return func(tensor)
        if name == "numpy":
            self.races.append("the host takes memory of the device for its own")
        self.run(name, [tensor], [], lambda: None)
        self.current.synchronize()
        return func(tensor.clone())

    def _note(
        self, name: str, again: Callable[[], Any], arguments: Any, made: list[Tensor]
    ) -> None:
        """Note what a torch operation reads and writes."""
        given = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        named = arguments[1]
        if isinstance(named.get("out"), Tensor):
            written = [named["out"]]
        elif name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            written = given[:1]
        else:
            mine = {tensor.untyped_storage()._cdata for tensor in given}
            written = [one for one in made if one.untyped_storage()._cdata not in mine]
            for tensor in written:
                self.memory(tensor)  # owned by the current stream
            if not written or name in WITHOUT_CONTENT:
                return
        read = [tensor for tensor in given if not any(tensor is one for one in written)]
        self.run(name, read, written, again, made)
        if name == "copy_" and not named.get("non_blocking"):
            pinned = {self.memory(tensor).is_pinned for tensor in given[:2]}
            if len(pinned) > 1:
                self.current.synchronize()

    def run(
        self,
        name: str,
        read: list[Tensor],
        written: list[Tensor],
        again: Callable[[], Any],
        made: Sequence[Tensor] = (),
    ) -> None:
        """Queue an operation on the current stream; in a capture, keep it for the replays."""
        if self.capturing is not None:
            self.capturing.nodes.append((again, list(made)))
            return
        who = self.current.name
        self.queue(who)
        for tensor in read:
            self.touch(tensor, who, writes=False, what=name)
        for tensor in written:
            self.touch(tensor, who, writes=True, what=name)

    # --- torch.cuda ---

    def synchronize(self, *_: object) -> None:
        if self.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        for stream in self.clocks:
            self.join(HOST, self.clocks[stream])

    def set_device(self, _: object) -> None:
        self.threads_with_device.add(threading.get_ident())

    def check_device(self) -> None:
        if threading.get_ident() not in self.threads_with_device:
            self.races.append("a thread speaks to a device that is not its current one")

    def copy_bytes(
        self,
        target: Tensor,
        first: int,
        source: Tensor,
        begin: int,
        num_bytes: int,
        stream: Stream,
    ) -> None:
        """Play a copy by the driver itself, which torch does not see."""
        with self.paused():
            to, of = part_of(target, first, num_bytes), part_of(source, begin, num_bytes)
            to.copy_(of)
        self.queue(stream.name)
        self.touch(of, stream.name, writes=False, what="a copy")
        self.touch(to, stream.name, writes=True, what="a copy")

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        self.memory(tensor).recorded.add(stream.name)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.check_device()
        before = self.current
        self.become(stream)
        try:
            yield
        finally:
            self.become(before)

    @contextlib.contextmanager
    def graph(self, graph: Graph, pool: Pool) -> Iterator[None]:
        self.synchronize()
        pool.join()
        graph.pool = pool
        before = self.current
        self.become(self.new_stream())
        self.capturing = graph
        try:
            yield
        finally:
            self.capturing = None
        self.become(before)  # unless the capture failed: torch leaves its stream current


class WatchedOperations:
    """Reference operations, each a kernel on the current stream."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._reference = ReferenceOperations()

    def repeated(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        return work

    def num_product_parts(self, *_: object) -> int:
        return 1

    def decode_scratch_bytes(self, *_: object) -> int:
        return 64

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._reference, name)
        if not callable(found):
            return found

        def run(*arguments: Any, **named: Any) -> None:
            count = WRITTEN.get(name, 1)
            read, written = tensors_of(arguments[count:]), tensors_of(arguments[:count])
            self._world.run(name, read, written, lambda: run(*arguments, **named))
            if self._world.capturing is None:
                with self._world.paused():
                    found(*arguments, **named)

        return run


def tensors_of(values: Any) -> list[Tensor]:
    """Return the tensors in arguments, also those in dataclasses."""
    if isinstance(values, Tensor):
        return [values]
    if is_dataclass(values):
        values = [getattr(values, item.name) for item in fields(values)]
    if isinstance(values, list | tuple):
        return [tensor for value in values for tensor in tensors_of(value)]
    return []


@contextlib.contextmanager
def played_cuda() -> Iterator[World]:
    """Play `torch.cuda` for as long as this lasts."""
    world = World()
    played: dict[str, Any] = {
        "set_device": world.set_device,
        "Stream": lambda *_: world.new_stream(),
        "Event": lambda **_: Event(world),
        "stream": world.stream,
        "current_stream": lambda *_: world.current,
        "synchronize": world.synchronize,
        "graph_pool_handle": Pool,
        "CUDAGraph": lambda: Graph(world),
        "graph": world.graph,
        "mem_get_info": lambda *_: (MEMORY_BYTES, MEMORY_BYTES),
        "empty_cache": lambda: None,
        "memory_reserved": lambda *_: 0,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, function in played.items():
            patch.setattr(torch.cuda, name, function)
        # A function, so that it is bound to the tensor.
        patch.setattr(Tensor, "record_stream", lambda *given: world.record_stream(*given))
        patch.setattr(cuda_driver, "copy_bytes", world.copy_bytes)
        with world:
            yield world


def played_device(world: World) -> tuple[CudaDriver, DeviceOperations]:
    """Return the driver of a CUDA device, played, and operations for it."""
    operations: Any = WatchedOperations(world)
    return CudaDriver(torch.device("cpu")), operations
