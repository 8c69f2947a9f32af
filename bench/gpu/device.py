"""Kernels on the CUDA device: building, loading, running a case, timing."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.gpu.case import Array, Case
from kernels.cuda import build
from kernels.cuda.build_ahead import build_ahead
from kernels.cuda.errors import CompileError, MissingToolchainError
from kernels.cuda.fitted_ptx import EARLY_LAUNCHES, fitted
from kernels.cuda.launch import LoadedKernel
from kernels.cuda.variant import Variant

Say = Callable[[str], None]

# Behind each array on the device; an output's must be there after the launch.
GUARD_BYTES, GUARD_BYTE = 256, 0xA5

WARM_UP_S, LONGEST_WARM_UP_S = 0.05, 1.0
LEAST_WARM_UP_RUNS = 4
FASTER = 0.99
"""Of the time before: a device whose runs still get that much shorter is raising its clock."""

_SIGNED = {"uint16": np.int16, "uint32": np.int32, "uint64": np.int64}


def why_no_device() -> str | None:
    """Return why there is no CUDA device to use, in one line; None if there is one."""
    try:
        import torch
    except ImportError:
        return (
            "torch is not installed (pip install '.[cuda,test]', or name the interpreter that "
            "has it: make gpu PYTHON=...)"
        )
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns where it could not start the driver
        if torch.cuda.is_available():
            return None
    return f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no driver or no device"


class KernelLoader:
    """Builds and loads variants for the current device.

    As a last resort the driver is given PTX to compile. `made_by` says for each loaded variant
    whose machine code it is: this machine's, or what it took over as that, another's, the driver's.

    `begins_early`: kernels that can are launched before what is ahead of them has ended, as in
    steps, where the device has that. Not so where a kernel alone is timed, many launches of it one
    behind the other, nor under compute-sanitizer, which looks into each launch by itself.
    """

    def __init__(self, cache_dir: Path, say: Say, *, begins_early: bool = False) -> None:
        import torch

        torch.cuda.init()
        torch.empty(1, device="cuda")  # makes the context current in this thread
        self.capability: tuple[int, int] = torch.cuda.get_device_capability()
        self.made_by: dict[str, str] = {}
        # In kernels for others nothing waits (`fitted_ptx`).
        self._begins_early = begins_early and self.capability >= EARLY_LAUNCHES
        self._cache_dir = cache_dir
        self._say = say
        self._loaded: dict[Variant, LoadedKernel] = {}

    def prepare(self, variants: Sequence[Variant]) -> None:
        """Fill the cache with many variants on all cores; a failure here shows up in `load`."""
        failed = build_ahead(variants, self.capability, self._cache_dir, progress=self._say)
        if failed:
            self._say(f"{len(failed)} not built ahead: {failed[0]}")

    def load(self, variant: Variant) -> LoadedKernel:
        """Return the variant, loaded. Raises CudaKernelError."""
        if variant not in self._loaded:
            is_early = self._begins_early and variant.expectation.begins_early
            image = self._image(variant)
            self._loaded[variant] = LoadedKernel(variant, image, begins_early=is_early)
        return self._loaded[variant]

    def _image(self, variant: Variant) -> bytes:
        try:
            image = build.build(variant, self.capability, self._cache_dir, progress=self._say)
        except (MissingToolchainError, CompileError):
            self.made_by[variant.name] = "the driver"
            return fitted(build.compile_ptx(variant), self.capability).encode()
        is_own = build.is_built(variant, self.capability, self._cache_dir)
        self.made_by[variant.name] = "nvJitLink" if is_own else "prebuilt"
        return image

    def run_case(self, case: Case) -> dict[str, Array]:
        """Run a case; raises AssertionError if anything behind a written array was written."""
        import torch

        kernels = [self.load(launch.variant) for launch in case.launches]
        tensors = {name: torch.from_numpy(_guarded(a)).cuda() for name, a in case.arrays.items()}
        stream = torch.cuda.current_stream().cuda_stream
        for kernel, launch in zip(kernels, case.launches, strict=True):
            arguments = [
                tensors[argument].data_ptr() if isinstance(argument, str) else argument
                for argument in launch.arguments
            ]
            kernel.launch(launch.grid, stream, *arguments)
        outputs = {}
        for name in case.written:
            found = tensors[name].cpu().numpy().view(case.arrays[name].dtype)
            size = case.arrays[name].size
            if not (found[size:].view(np.uint8) == GUARD_BYTE).all():
                message = f"{case.name} wrote behind {name}"
                raise AssertionError(message)
            outputs[name] = found[:size].reshape(case.arrays[name].shape)
        return outputs


def _guarded(array: Array) -> Array:
    """Return the array flat with a guard behind it, in a type that every torch can hold."""
    guard = np.full(GUARD_BYTES, GUARD_BYTE, np.uint8).view(array.dtype)
    flat = np.concatenate([np.ascontiguousarray(array).reshape(-1), guard])
    return flat.view(_SIGNED.get(flat.dtype.name, flat.dtype))


def as_graph(visit: Callable[[], None], device: str) -> Callable[[], None]:
    """Return what replays, in one graph, all that `visit` queues; on a CPU, `visit` itself."""
    import torch

    if device != "cuda":
        return visit
    torch.cuda.synchronize()  # kernels may read what is ahead of a step before they wait for it
    visit()  # whatever a library sets up at its first call is no part of the graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # A capture that fails leaves its own stream current; the outer context puts ours back.
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
        visit()
    replay: Callable[[], None] = graph.replay
    return replay


def current_stream(device: str) -> int:
    """Return the handle of torch's current stream, to be asked for at every launch."""
    import torch

    return int(torch.cuda.current_stream().cuda_stream) if device == "cuda" else 0


def milliseconds(queue_work: Callable[[], object], repeats: int) -> list[float]:
    """Return how long the device took for each of `repeats` runs, once it is warm.

    It is after a few runs and `WARM_UP_S`, and when runs get no shorter: an idle device raises its
    clock only by and by.
    """
    began = time.perf_counter()
    warming: list[float] = []
    while len(warming) < LEAST_WARM_UP_RUNS or _is_warming_up(warming, began):
        warming.append(_milliseconds_of(queue_work))
    return [_milliseconds_of(queue_work) for _ in range(repeats)]


def _is_warming_up(times_ms: Sequence[float], began: float) -> bool:
    """Whether there was no time yet, or the last three runs were shorter than those before."""
    took = time.perf_counter() - began
    if took < WARM_UP_S or took > LONGEST_WARM_UP_S:
        return took < WARM_UP_S
    return statistics.median(times_ms[-3:]) < FASTER * statistics.median(times_ms[-6:-3])


def _milliseconds_of(queue_work: Callable[[], object]) -> float:
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    queue_work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def compiled(function: Callable[..., Any], **options: object) -> Callable[..., Any]:
    """Return torch's compilation of a function, for one shape.

    What it has compiled before is forgotten: of one function it compiles eight at most, and would
    run the ninth shape uncompiled without saying so.
    """
    import torch

    torch.compiler.reset()
    made: Callable[..., Any] = torch.compile(function, dynamic=False, **options)
    return made


def summary(times_ms: Sequence[float]) -> dict[str, float]:
    """Return median and spread of some times."""
    return {
        "median_ms": statistics.median(times_ms),
        "min_ms": min(times_ms),
        "max_ms": max(times_ms),
        "repeats": len(times_ms),
    }
