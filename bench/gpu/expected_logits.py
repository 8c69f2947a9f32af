"""What the CPU executor says of the tiny models: made where time is cheap, and carried along.

A GPU's minutes are not for compiling the CPU's kernels, which takes longer than all that is checked
there. The answers are of models and steps alone, so `python -m bench.gpu.needed_kernels` makes them
beside the machine code, and a report that takes that over (`--prebuilt`) takes them, too.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from bench.gpu import drawn_models, teacher_steps

if TYPE_CHECKING:
    from bench.gpu.architecture_shapes import Architecture
    from compute_plane.executor.interface import Float32Array

FILE: Final = "expected_logits.npz"
SOURCES: Final = (drawn_models, teacher_steps)
"""Modules that decide what is expected of a shape."""

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
    shutil.copyfile(source / FILE, directory / FILE)
    return True


def read(directory: Path, shape: Architecture) -> Logits | None:
    """Return what is expected of a shape; None if that was not written, or of other sources."""
    try:
        with np.load(directory / FILE) as arrays:
            names = sorted(name for name in arrays if name.startswith(f"{_digest(shape)}/"))
            return [arrays[name] for name in names] or None
    except (OSError, ValueError, EOFError):
        return None


def _digest(shape: Architecture) -> str:
    told = repr((shape.spec, sorted((name, of.label) for name, of in shape.formats.items())))
    digest = hashlib.sha256(told.encode())
    for module in SOURCES:
        digest.update(Path(module.__file__ or "").read_bytes())
    return digest.hexdigest()[:24]
