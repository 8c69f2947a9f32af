"""Many kernels at once: built on all cores, or taken over from where they were built before.

A kernel takes one core for seconds, and a model needs some twenty: one after the other they would
be most of a first start.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Final

from kernels.cuda import build
from kernels.cuda.errors import CudaKernelError, MissingToolchainError
from kernels.cuda.variant import Variant

MAX_PROCESSES: Final = 16
"""Each imports the compiler for itself and holds some 300 MB."""


def build_ahead(
    variants: Sequence[Variant],
    capability: tuple[int, int],
    cache_dir: Path,
    *,
    progress: Callable[[str], None] | None = None,
) -> list[str]:
    """Build what the cache lacks, on all cores; return a line for each variant that failed.

    None of that is final: whoever loads a variant builds it again and is told why it fails. Where
    there is no compiler nothing is done, for the cache may hold another machine's code. `progress`
    gets one line, if there is anything to build. Raises CacheDirectoryError.
    """
    missing = [
        variant
        for variant in dict.fromkeys(variants)
        if not build.is_built(variant, capability, cache_dir)
    ]
    try:
        build.require_toolchain()
    except MissingToolchainError:
        return []
    workers = min(len(missing), len(os.sched_getaffinity(0)), MAX_PROCESSES)
    if workers <= 1:  # nothing, or nobody to share it with: it is built where it is loaded
        return []
    if progress is not None:
        arch = build.architecture(capability)
        progress(f"compiling {len(missing)} kernels for {arch} with {workers} processes")
    jobs = [(variant, capability, cache_dir) for variant in missing]
    try:
        with ProcessPoolExecutor(workers, get_context("spawn"), _end_with_the_parent) as pool:
            return [line for line in pool.map(_build_one, jobs) if line]
    except BrokenProcessPool as error:
        return [str(error)]


def take_over(source_dir: Path, cache_dir: Path) -> int:
    """Take machine code made elsewhere into a cache as if it were made here; return how many files.

    It is for a machine whose time is too dear to compile on: what another compiler made of the very
    same source counts there as this one's, and is used in its place. Raises CacheDirectoryError.
    """
    directory = build.private_directory(cache_dir)
    toolchain = build.toolchain_hash()
    files = sorted(source_dir.glob("*.cubin"))
    for file in files:
        stem = file.name.rsplit(".", 2)[0]  # without the toolchain it was made with
        build.write_whole(directory / f"{stem}.{toolchain}.cubin", file.read_bytes())
    return len(files)


def _build_one(job: tuple[Variant, tuple[int, int], Path]) -> str:
    """Build one variant into the cache; return what went wrong, if anything."""
    variant = job[0]
    try:
        build.build(*job)
    except CudaKernelError as error:
        return f"{variant.name}: {error}"
    return ""


def _end_with_the_parent() -> None:
    """Have this process end when the one that started it does, were it killed."""
    parent = parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
