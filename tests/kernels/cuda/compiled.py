"""Runs a case's launches from the PTX that the compiler makes of its kernels, or broken ones."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping
from functools import cache
from typing import Any, cast

from bench.gpu.case import Array, Case
from kernels.cuda.build import compile_ptx
from kernels.cuda.variant import Variant
from tests.ptx import Meter, launch


def text_of(variant: Variant) -> str:
    """Return a variant's PTX, compiled once a process."""
    return _text_of(cast("Hashable", variant))


@cache
def _text_of(variant: Any) -> str:
    return compile_ptx(variant)


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
