"""A replay's findings for people, and as JSON for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from hetero_infer.replay.comparison import Difference
from hetero_infer.replay.replayer import ReplayReport


def to_text(report: ReplayReport, *, name: str, compute: str, is_truncated: bool) -> str:
    """Return the findings as lines; `name` is the file's, `compute` the plane's address."""
    return "".join(f"{line}\n" for line in _lines(report, name, compute, is_truncated=is_truncated))


def to_json(report: ReplayReport, *, is_truncated: bool) -> str:
    """Return the findings as one JSON object on one line."""
    fields: dict[str, Any] = dataclasses.asdict(report)
    return json.dumps({**fields, "is_truncated": is_truncated}) + "\n"


def _lines(report: ReplayReport, name: str, compute: str, *, is_truncated: bool) -> Iterator[str]:
    for difference in report.differences:
        yield from _difference(difference)
    missing = report.num_differences - len(report.differences)
    if missing:
        yield f"and {missing} more differences"
    yield (
        f"{name} on {compute}: {report.num_sessions} session{'s' * (report.num_sessions != 1)}, "
        f"{report.num_steps} steps, "
        f"{report.num_rows} rows, {report.num_tokens} tokens, {report.num_compared} "
        f"log-probabilities, {report.num_blocks} KV blocks"
    )
    rules = report.rules
    if rules is not None and rules.is_exact and not rules.tolerance:
        yield "The numerics are the same: everything must be equal to the bit."
    elif rules is not None:
        yield (
            f"Log-probabilities may differ by {rules.tolerance:g}; "
            f"at most they do by {report.largest_gap:.3g}."
        )
        if not rules.is_exact:
            yield (
                f"The numerics are others: KV blocks are not compared, and {report.num_near_ties} "
                "tokens are others by near ties."
            )
    if report.num_unanswered:
        yield f"Steps without a recorded answer, run and not compared: {report.num_unanswered}."
    if report.num_skipped:
        yield f"Steps behind a refused one, not run: {report.num_skipped}."
    if is_truncated:
        yield "The recording ends within a record; what is whole was replayed."
    if report.is_stopped:
        yield "Stopped at the first step that differs; --all goes on."
    count = report.num_differences
    yield "No difference." if not count else f"{count} difference{'s' * (count > 1)}."


def _difference(found: Difference) -> Iterator[str]:
    where = f"session {found.session}, step {found.step}"
    if found.row is not None:
        where += f", row {found.row}, slot {found.slot}"
    what = found.what if found.block is None else f"{found.what} {found.block}"
    yield f"{where}: {what}: recorded {found.recorded}, replayed {found.replayed}"
    if found.note:
        yield f"    {found.note}"
