"""Kernels on the CUDA device: building, loading, running a case, timing."""

from __future__ import annotations

import os
import statistics
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from bench.gpu.case import Array, Case
from kernels.cuda import build
from kernels.cuda.errors import CompileError, MissingToolchainError
from kernels.cuda.launch import LoadedKernel
from kernels.cuda.variant import Variant

Say = Callable[[str], None]

# Behind each array on the device; an output's must be there after the launch.
GUARD_BYTES, GUARD_BYTE = 256, 0xA5

_SIGNED = {"uint16": np.int16, "uint32": np.int32, "uint64": np.int64}


def why_no_device() -> str | None:
    """Return why there is no CUDA device to use, in one line; None if there is one."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns where it could not start the driver
        if torch.cuda.is_available():
            return None
    return f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no driver or no device"


class KernelLoader:
    """Builds and loads variants for the current device.

    Machine code comes from the compiler or, where that is missing or fails, from the cache, where
    another machine's may lie; as a last resort the driver is given PTX to compile. `made_by` says
    for each loaded variant which it was.
    """

    def __init__(self, cache_dir: Path, say: Say) -> None:
        import torch

        torch.cuda.init()
        torch.empty(1, device="cuda")  # makes the context current in this thread
        self.capability: tuple[int, int] = torch.cuda.get_device_capability()
        self.made_by: dict[str, str] = {}
        self._cache_dir = cache_dir
        self._say = say
        self._loaded: dict[Variant, LoadedKernel] = {}

    def prepare(self, variants: Sequence[Variant]) -> None:
        """Fill the cache with many variants on all cores; a failure here shows up in `load`."""
        workers = min(os.cpu_count() or 1, len(variants))
        build.private_directory(self._cache_dir)
        self._say(f"building {len(variants)} variants with {workers} processes")
        jobs = [(variant, self.capability, self._cache_dir) for variant in variants]
        try:
            with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
                missing = [text for text in pool.map(_build_one, jobs, chunksize=4) if text]
        except BrokenProcessPool as error:
            missing = [str(error)]
        if missing:
            self._say(f"{len(missing)} not built ahead: {missing[0]}")

    def load(self, variant: Variant) -> LoadedKernel:
        """Return the variant, loaded. Raises CudaKernelError."""
        if variant not in self._loaded:
            self._loaded[variant] = LoadedKernel(variant, self._image(variant))
        return self._loaded[variant]

    def _image(self, variant: Variant) -> bytes:
        try:
            image = build.build(variant, self.capability, self._cache_dir, progress=self._say)
            self.made_by[variant.name] = "nvJitLink"
        except (MissingToolchainError, CompileError):
            made_elsewhere = build.prebuilt(variant, self.capability, self._cache_dir)
            self.made_by[variant.name] = "the driver" if made_elsewhere is None else "prebuilt"
            image = made_elsewhere or build.compile_ptx(variant).encode()
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


def _build_one(job: tuple[Variant, tuple[int, int], Path]) -> str:
    """Build one variant into the cache; return what went wrong, if anything."""
    try:
        build.build(*job)
    except Exception as error:  # noqa: BLE001 - a worker's every failure is reported by `load` again
        return f"{type(error).__name__}: {error}"
    return ""


def _guarded(array: Array) -> Array:
    """Return the array flat with a guard behind it, in a type that every torch can hold."""
    guard = np.full(GUARD_BYTES, GUARD_BYTE, np.uint8).view(array.dtype)
    flat = np.concatenate([np.ascontiguousarray(array).reshape(-1), guard])
    return flat.view(_SIGNED.get(flat.dtype.name, flat.dtype))


def milliseconds(queue_work: Callable[[], object], repeats: int) -> list[float]:
    """Return how long the device took for each of `repeats` runs, after two to warm up."""
    import torch

    times = []
    for run in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        queue_work()
        end.record()
        end.synchronize()
        if run >= 2:
            times.append(float(start.elapsed_time(end)))
    return times


def summary(times_ms: Sequence[float]) -> dict[str, float]:
    """Return median and spread of some times."""
    return {
        "median_ms": statistics.median(times_ms),
        "min_ms": min(times_ms),
        "max_ms": max(times_ms),
        "repeats": len(times_ms),
    }
