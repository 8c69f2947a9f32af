"""What the CPU executor says of the tiny models: made where time is cheap, and carried along.

A GPU's minutes are not for compiling the CPU's kernels, which takes longer than all that is checked
there. The answers are of models and steps alone, so `python -m bench.gpu.needed_kernels` makes them
beside the machine code, and a report that takes that over (`--prebuilt`) takes them, too.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

import compute_plane
import kernels
from bench.gpu import drawn_models, teacher_steps

if TYPE_CHECKING:
    from bench.gpu.architecture_shapes import Architecture
    from compute_plane.executor.interface import Float32Array

FILE: Final = "expected_logits.npz"
SOURCES: Final = (drawn_models, teacher_steps)
PACKAGES: Final = (compute_plane, kernels)
"""Whose sources decide what is expected of a shape."""

Logits = list["Float32Array"]


def write(
    directory: Path, shapes: Iterable[Architecture], answer: Callable[[Architecture], Logits]
) -> None:
    """Write what `answer` says of each shape, step by step, [K, V] each."""
    arrays = {
        f"{_digest(shape)}/{step:03}": logits
        for shape in shapes
        for step, logits in enumerate(answer(shape))
    }
    with (directory / FILE).open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type] # names are no flags


def take_over(source: Path, directory: Path) -> bool:
    """Take what was written elsewhere; whether there was anything."""
    if not (source / FILE).exists():
        return False
    directory.mkdir(parents=True, exist_ok=True)
    part = directory / f"{FILE}.part"
    shutil.copyfile(source / FILE, part)
    os.replace(part, directory / FILE)
    return True


def read(directory: Path, shape: Architecture) -> Logits | None:
    """Return what is expected of a shape; None if that was not written, or of other sources."""
    try:
        with (directory / FILE).open("rb") as file, np.load(file) as arrays:
            names = sorted(name for name in arrays if name.startswith(f"{_digest(shape)}/"))
            return [arrays[name] for name in names] or None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error):
        return None


def _digest(shape: Architecture) -> str:
    told = repr((shape.spec, sorted((name, of.label) for name, of in shape.formats.items())))
    return hashlib.sha256(told.encode() + _digest_of_sources()).hexdigest()[:24]


@cache
def _digest_of_sources() -> bytes:
    files = [Path(module.__file__ or "") for module in SOURCES]
    for package in PACKAGES:
        files += sorted(Path(package.__file__ or "").parent.rglob("*.py"))
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.digest()
