"""A benchmark's result: one JSON object with its provenance, tables for people, a plot."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetero_infer.bench.provenance import now
from hetero_infer.bench.settings import OutputSettings
from planes.errors import ConfigError

SCHEMA = 1
"""Of the JSON object; another number means that readers must look again."""

Draw = Callable[[dict[str, Any], Path], None]
"""Draws a result, as its JSON object has it, into a file."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table for people; the first column is text, the others are figures."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """What a benchmark measured.

    `subject`: what it is of, in one line. `data`: goes into the JSON object as it is.
    """

    subject: str
    data: dict[str, Any]
    tables: Sequence[Table] = field(default_factory=tuple)


@dataclass(frozen=True, slots=True)
class Destination:
    """The files a result is written to; made before the benchmark runs, so that none is in vain."""

    json: Path | None
    plot: Path | None

    @classmethod
    def of(cls, name: str, settings: OutputSettings) -> Destination:
        """Find out the files, check that a plot can be drawn, make the directory.

        Raises ConfigError for a file that cannot be written, or without matplotlib.
        """
        json_file = Path(settings.json) if settings.json else None
        plot_file = Path(settings.plot) if settings.plot else None
        if settings.output or plot_file is not None:
            from hetero_infer.bench.plots import require_matplotlib

            require_matplotlib()
        if settings.output:
            directory = Path(settings.output)
            try:
                directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"output {directory}: {error.strerror}", field="output") from None
            json_file = json_file or directory / f"{name}.json"
            plot_file = plot_file or directory / f"{name}.png"
        for file, key in ((json_file, "json"), (plot_file, "plot")):
            if file is not None and not file.parent.is_dir():
                raise ConfigError(f"{key} {file}: there is no such directory", field=key)
        return cls(json_file, plot_file)


def to_object(
    name: str,
    result: Result,
    *,
    origin: dict[str, Any],
    settings: dict[str, Any],
    share_of_others: float | None,
) -> dict[str, Any]:
    """Return the whole JSON object.

    `origin`: `provenance.describe_origin` before the run. `share_of_others`: of the processors'
    time meanwhile; None where it is not known.
    """
    return {
        "benchmark": name,
        "schema": SCHEMA,
        **origin,
        "ended": now(),
        "cpu_share_of_others": share_of_others,
        "settings": settings,
        **result.data,
    }


def write(result: Result, whole: dict[str, Any], destination: Destination, draw: Draw) -> None:
    """Print the tables, write the files. Raises ConfigError if a file cannot be written."""
    sys.stdout.write(to_text(result))
    try:
        if destination.json is not None:
            text = json.dumps(finite(whole), ensure_ascii=False, indent=1, allow_nan=False)
            destination.json.write_text(text + "\n", encoding="utf-8")
        if destination.plot is not None:
            draw(whole, destination.plot)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}", field="output") from None


def to_text(result: Result) -> str:
    """Return what is printed for people."""
    lines = [result.subject]
    for table in result.tables:
        lines += ["", *([table.title] if table.title else []), *_aligned(table)]
    return "\n".join(lines) + "\n"


def finite(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return a JSON value with null for numbers that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _aligned(table: Table) -> Iterable[str]:
    rows = [list(table.headers), *map(list, table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, row in enumerate(rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield "  ".join(cells).rstrip()
        if number == 0:
            yield "  ".join("-" * width for width in widths)
