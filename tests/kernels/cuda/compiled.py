"""Runs a case's launches from the PTX that the compiler makes of its kernels, or broken ones.

The compiler takes seconds for a kernel, and files of tests share kernels: its PTX is kept beside
the product's own machine code, a file for each variant and what it was made from: every source
below `kernels` but those of the CPU, and the compiler, so that several trees keep theirs side by
side. Nothing is kept of sources that may have been written while this process read them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import time
from collections.abc import Hashable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

import kernels
from bench.gpu.case import Array, Case
from compute_plane.config import ComputePlaneConfig
from compute_plane.cpu.kernel_cache import make_private_directory
from kernels.cuda import build
from kernels.cuda.fitted_ptx import fitted
from kernels.cuda.variant import Variant
from tests.ptx import Meter, launch

PACKAGE = Path(str(kernels.__file__)).parent


def _started_at() -> float:
    """Return when this process began, in seconds since the epoch."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    booted_at = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return booted_at + ticks / os.sysconf("SC_CLK_TCK")


SETTLED_SINCE = _started_at() - 1.0
"""Sources that were written later may not be what this process has imported."""

KEPT = 4
"""Files of one name, the latest: of that many trees, or states of one."""

compile_ptx, link = build.compile_ptx, build.link  # themselves, whatever a test puts there


def _sources() -> list[Path]:
    """Return all that PTX is made from; no kernel imports one of the CPU (pyproject.toml)."""
    return sorted(set(PACKAGE.rglob("*.py")) - set((PACKAGE / "cpu").rglob("*.py")))


def text_of(variant: Variant) -> str:
    """Return the PTX of a variant of the product, compiled once for the sources as they are."""
    return _text_of(cast("Hashable", variant))


@cache
def _text_of(variant: Any) -> str:
    if any(source.stat().st_mtime > SETTLED_SINCE for source in _sources()):
        return compile_ptx(variant)
    return kept_text(variant, ComputePlaneConfig().kernel_cache_root / "ptx", sources_hash())


def kept_text(variant: Variant, directory: Path, made_from: str) -> str:
    """Return a variant's PTX from its file, or compile it if none was made from that."""
    make_private_directory(directory)
    label = f"// {made_from} {variant!r}"
    file = directory / f"{variant.name}.{_digest(label)[:16]}.ptx"
    with contextlib.suppress(FileNotFoundError):
        first, _, text = file.read_text(encoding="utf-8").partition("\n")
        if first == label:
            return text
    text = compile_ptx(variant)
    _keep(file, f"{label}\n{text}".encode())
    return text


def kept_link(
    name: str, ptx: str, capability: tuple[int, int], directory: Path | None = None
) -> tuple[bytes, build.ResourceUsage]:
    """Do what `build.link` does, once for a PTX, an architecture and a compiler."""
    directory = directory or ComputePlaneConfig().kernel_cache_root / "ptx"
    make_private_directory(directory)
    made_from = f"{build.toolchain_hash()} {capability} {fitted(ptx, capability)}"
    label = _digest(made_from)
    file = directory / f"{name}.{label[:16]}.{build.architecture(capability)}.cubin"
    with contextlib.suppress(FileNotFoundError):
        first, _, rest = file.read_bytes().partition(b"\n")
        if first.decode() == label:
            usage, _, cubin = rest.partition(b"\n")
            return cubin, build.ResourceUsage(*json.loads(usage))
    cubin, made = link(name, ptx, capability)
    usage = json.dumps(dataclasses.astuple(made)).encode()
    _keep(file, b"\n".join([label.encode(), usage, cubin]))
    return cubin, made


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _keep(file: Path, content: bytes) -> None:
    """Write a file, and remove the oldest of its name where there are too many."""
    build.write_whole(file, content)
    name, _, suffix = file.name.split(".", 2)
    others = [other for other in file.parent.glob(f"{name}.*.{suffix}") if other != file]
    with contextlib.suppress(FileNotFoundError):  # another process removes them too
        others.sort(key=lambda other: other.stat().st_mtime)
        for old in others[: 1 - KEPT]:
            old.unlink()


@cache
def sources_hash() -> str:
    """Return a hash of all that PTX is made from: those sources, and the compiler."""
    digest = hashlib.sha256(build.toolchain_hash().encode())
    for source in _sources():
        digest.update(f"{source.relative_to(PACKAGE)}\0".encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def run_compiled(
    case: Case,
    *,
    texts: Mapping[str, str] | None = None,
    meters: Mapping[str, Meter] | None = None,
) -> dict[str, Array]:
    """Run a case; return its written arrays.

    `texts` replaces the PTX of variants by name; `meters` count what those variants do.
    """
    arrays = {
        name: array.copy() if name in case.written else array for name, array in case.arrays.items()
    }
    for one in case.launches:
        launch(
            (texts or {}).get(one.variant.name) or text_of(one.variant),
            one.grid,
            [arrays[a] if isinstance(a, str) else a for a in one.arguments],
            written=[i for i, name in enumerate(one.arguments) if name in case.written],
            begins_early=one.variant.expectation.begins_early,
            reads_early=one.variant.expectation.reads_early,
            meter=(meters or {}).get(one.variant.name),
        )
    return {name: arrays[name] for name in case.written}


def without(text: str, opcode: str) -> Iterator[str]:
    """Return the text without one of the instructions of an opcode, each in turn."""
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if line.strip().startswith(opcode):
            yield "\n".join([*lines[:i], "", *lines[i + 1 :]])


def replaced(variant: Variant, pattern: str, replacement: str) -> dict[str, str]:
    """Return a variant's PTX with each place of a pattern replaced, as `texts`."""
    text, count = re.subn(pattern, replacement, text_of(variant))
    assert count, f"{pattern} is nowhere in {variant.name}"
    return {variant.name: text}
