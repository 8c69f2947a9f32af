"""The report as a whole: what each part found, and of which run it is.

    runs      what each command ran on: machine, device, software, commit
    parts     by name: status, seconds, run (its place in `runs`), why, go_on_at,
              values, failures, targets, as `PartResult` has them
    failures  all that is wrong or missing, a line each

A report that is continued keeps the parts that came to their end, and has the others again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from bench.gpu.part_process import PartResult

REPORT_VERSION: Final = 4
SHOWN: Final = 25
"""Faults that are printed; the report has them all."""
WIDTH: Final = 160


class Report:
    """A report that is put together part by part, and written after each."""

    def __init__(self, out: Path, run: dict[str, Any], *, earlier: Report | None = None) -> None:
        self._out = out
        self.runs: list[dict[str, Any]] = [*(earlier.runs if earlier is not None else []), run]
        self._parts: dict[str, dict[str, Any]] = dict(earlier._parts) if earlier else {}

    @classmethod
    def read(cls, path: Path) -> Report:
        """Read one that was written. Raises ValueError if it is of another kind."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            content = None
        if not isinstance(content, dict) or content.get("report_version") != REPORT_VERSION:
            raise ValueError(f"{path} is no report of version {REPORT_VERSION}")
        read = cls(path, {})
        read.runs, read._parts = content["runs"], content["parts"]
        return read

    @property
    def devices(self) -> set[str]:
        """Names of the devices that it is of."""
        return {run["device"]["name"] for run in self.runs}

    @property
    def has_parts(self) -> bool:
        """Whether it says anything of any part."""
        return bool(self._parts)

    def is_done(self, name: str) -> bool:
        """Whether a part has come to its end, in this run or an earlier one."""
        return name in self._parts and self._parts[name]["status"] == "done"

    def begin_at(self, name: str) -> int:
        """Return where a part is to go on; 0: at its beginning."""
        return self._parts.get(name, {}).get("go_on_at") or 0

    def add(self, name: str, result: PartResult) -> None:
        """Put what a part found in the place of what it had, or behind it if it has gone on.

        A part that there was no time for keeps what it had.
        """
        if result.status == "left out" and name in self._parts:
            return
        if self.begin_at(name):
            known = self._parts[name]
            result = result.behind(
                PartResult("", *(known[key] for key in ("seconds", "why", *_FOUND)))
            )
        part = asdict(result) | {"seconds": round(result.seconds, 1), "run": len(self.runs) - 1}
        self._parts[name] = part

    def write(self) -> None:
        """Write it whole, or not at all."""
        content = {
            "report_version": REPORT_VERSION,
            "runs": self.runs,
            "parts": self._parts,
            "failures": self.failures(),
        }
        text = json.dumps(_in_json(content), indent=1, allow_nan=False)
        part = self._out.with_suffix(".part")
        part.write_text(text + "\n", encoding="utf-8")
        part.replace(self._out)

    def failures(self) -> list[str]:
        """Return a line for all that is wrong, and for parts that are not done."""
        lines = []
        for name, part in self._parts.items():
            lines += part["failures"]
            if part["status"] != "done":
                lines.append(f"{name}: {part['status']}: {part['why']}")
        return lines

    def summary(self) -> Iterator[str]:
        """Yield lines for people: parts, targets, faults; the last lines of all."""
        yield "== parts"
        for name, part in self._parts.items():
            why = f": {part['why']}" if part["why"] else ""
            yield f"{name:<20} {part['status']:<10} {part['seconds']:6.1f} s{why}"[:WIDTH]
        targets = [target for part in self._parts.values() for target in part["targets"]]
        missed = [target for target in targets if not target["met"]]
        yield f"== targets: {len(missed)} of {len(targets)} missed"
        for target in targets:
            word, limit = ("≤", "at_most") if "at_most" in target else ("≥", "at_least")
            verdict = "met" if target["met"] else "MISSED"
            figures = f"{target['value']:9.3g} {word} {target[limit]:<6g} {verdict:<7}"
            yield f"{figures} {target['name']}"[:WIDTH]
        failures = self.failures()
        yield f"== faults: {len(failures)}"
        yield from (failure[:WIDTH] for failure in failures[:SHOWN])
        if len(failures) > SHOWN:
            yield f"… and {len(failures) - SHOWN} more in the report"


def _in_json(value: object) -> object:
    """Return a value with words for the numbers that JSON does not have: an error is infinite."""
    if isinstance(value, dict):
        return {key: _in_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_in_json(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


_FOUND: Final = ("values", "failures", "targets")
