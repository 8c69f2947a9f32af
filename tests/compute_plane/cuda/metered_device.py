"""A device whose memory is counted: torch's CPU device, and a limit on the tensors in it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from compute_plane.cuda.drivers import CpuDriver, Event, Graph
from compute_plane.cuda.reference_operations import ReferenceOperations

WHOLE_TOKENS = 2
"""Of rows that are not split: as long as those of the largest step that have one token each."""


class MemoryMeter(TorchFunctionMode):
    """Counts the bytes of all tensors that are made while it is on.

    `reserved`: the most there were since `release`, as an allocator keeps what it has once taken.
    """

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.num_bytes = num_bytes
        self.is_paused = False
        self.live: dict[int, int] = {}
        self.ignored: set[int] = set()
        self.reserved = 0
        self.peak = 0
        """The most that was ever reserved."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if not self.is_paused:
            for tensor in tree_leaves(found):
                if isinstance(tensor, Tensor):
                    self._note(tensor)
        return found

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.live or key in self.ignored or not storage.nbytes():
            return
        self.live[key] = storage.nbytes()
        weakref.finalize(storage, self.live.pop, key, None)
        self.reserved = max(self.reserved, sum(self.live.values()))
        self.peak = max(self.peak, self.reserved)
        if self.reserved > self.num_bytes:
            raise torch.OutOfMemoryError(f"out of {self.num_bytes} bytes")

    def ignore(self, tensor: Tensor) -> None:
        """Do not count a tensor, which lies somewhere else, nor views of it."""
        storage = tensor.untyped_storage()
        self.ignored.add(storage._cdata)
        weakref.finalize(storage, self.ignored.discard, storage._cdata)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self.is_paused, before = True, self.is_paused
        try:
            yield
        finally:
            self.is_paused = before


class _Graph:
    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work

    def release(self) -> None:
        self.replay = lambda: None


class MeteredDriver(CpuDriver):
    """A device with graphs and `num_bytes` of memory, of which others hold `foreign_bytes`."""

    has_graphs = True

    def __init__(self, num_bytes: int, foreign_bytes: int = 0) -> None:
        super().__init__()
        self.num_bytes = num_bytes
        self.foreign_bytes = foreign_bytes
        self.meter = MemoryMeter(num_bytes - foreign_bytes)

    def host_buffer(self, num_bytes: int) -> Tensor:
        with self.meter.paused():
            buffer = super().host_buffer(num_bytes)
        self.meter.ignore(buffer)
        return buffer

    def download(self, target: Tensor, source: Tensor, *, is_watched: bool = False) -> Event:
        with self.meter.paused():
            return super().download(target, source, is_watched=is_watched)

    def capture(self, work: Callable[[], None]) -> Graph:
        work()
        return _Graph(work)

    def total_bytes(self) -> int:
        return self.num_bytes

    def free_bytes(self) -> int | None:
        return self.num_bytes - self.foreign_bytes - self.meter.reserved

    def held_bytes(self) -> int:
        return self.meter.reserved

    def release_unused(self) -> None:
        self.meter.reserved = sum(self.meter.live.values())


class MeteredOperations:
    """Reference operations, of whose memory only the scratch of two kernels counts.

    Of sampling, and of decode attention, which takes `decode_scratch` bytes where rows are longer
    than `WHOLE_TOKENS`.
    """

    def __init__(self, driver: MeteredDriver, decode_scratch: int = 0) -> None:
        self._driver = driver
        self._decode_scratch = decode_scratch
        self._reference = ReferenceOperations()

    def decode_scratch_bytes(self, *_: object) -> int:
        return self._decode_scratch

    def num_product_parts(self, *_: object) -> int:
        return 1

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._reference, name)
        if not callable(found):
            return found

        def run(*arguments: Any, **named: Any) -> None:
            scratch = None
            if name == "sample":
                out, _, logits, _ = arguments
                scratch = torch.empty((len(out), logits.shape[1]), dtype=torch.int64)
            elif name == "attention_decode" and arguments[6] > WHOLE_TOKENS:
                scratch = torch.empty(self._decode_scratch, dtype=torch.uint8)
            with self._driver.meter.paused():
                found(*arguments, **named)
            del scratch

        return run
