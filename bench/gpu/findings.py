"""What a part of the report has found so far, kept in a file as it goes on.

A part runs in a process of its own (`part_process`): one that raises, hangs or takes the device's
context down with it leaves what it had written last, and the parts after it a device.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class PartOptions:
    """What every part is told.

    `kernel_cache`: as a compute plane's flag of that name. `seconds`: what it may take from now on;
    a part that has more to measure than that ends earlier. `kv_cache_dtype`: what the engine keeps
    keys and values in, as its flag says it. `begin_at`: the first of its cases, shapes or folders
    that an earlier process has not come to. `has_rivals`: other libraries are timed beside ours.
    """

    kernel_cache: Path
    seconds: float
    kv_cache_dtype: str = "auto"
    begin_at: int = 0
    has_rivals: bool = True
    made_at: float = field(default_factory=time.monotonic, compare=False)

    @property
    def ends(self) -> float:
        """When its time is over, by the monotonic clock."""
        return self.made_at + self.seconds

    @property
    def machine_code(self) -> Path:
        """Where a plane with that kernel cache has the machine code of CUDA kernels."""
        return self.kernel_cache / "cuda"

    def to_json(self) -> str:
        """Return it for `from_json`."""
        told = (self.seconds, self.kv_cache_dtype, self.begin_at, self.has_rivals)
        return json.dumps((str(self.kernel_cache), *told))

    @classmethod
    def from_json(cls, text: str) -> PartOptions:
        """Read what `to_json` returned; the seconds begin anew."""
        kernel_cache, *others = json.loads(text)
        return cls(Path(kernel_cache), *others)


@dataclass(slots=True)
class Findings:
    """Figures by their place in the report, what is wrong, and targets met or missed.

    `values`: top-level keys of the report. `failures`: a line for each thing that is wrong.
    `targets`: a name, a figure, the most or the least that it should be. `doing`: what is
    under way. `go_on_at`: where another process is to begin; None: nothing is left to do.
    """

    path: Path | None = None
    values: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    targets: list[dict[str, Any]] = field(default_factory=list)
    doing: str = ""
    go_on_at: int | None = None

    def say(self, line: str) -> None:
        """Print a line, and keep what there is."""
        print(line, flush=True)
        self.save()

    def begin(self, what: str) -> None:
        """Note what is begun: it is named if the part ends there."""
        self.doing = what
        self.save()

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Begin something; what it raises is a fault, and no end of what comes after."""
        self.begin(what)
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs in the report
            traceback.print_exc()
            self.failures.append(f"{self.doing}: {line_of(error)}")
            self.say(self.failures[-1])
        self.doing = ""

    def target(
        self,
        name: str,
        value: float,
        *,
        at_most: float | None = None,
        at_least: float | None = None,
    ) -> None:
        """Note whether a figure is what it should be. To miss one is no fault."""
        met = (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
        limit = {"at_most": at_most} if at_least is None else {"at_least": at_least}
        self.targets.append({"name": name, "value": value, **limit, "met": met})
        what = f"at most {at_most:g}" if at_most is not None else f"at least {at_least:g}"
        self.say(f"    {name}: {value:.3g}, {what}: {'met' if met else 'MISSED'}")

    def save(self) -> None:
        """Write everything to the file, whole or not at all."""
        if self.path is None:
            return
        part = self.path.with_suffix(".part")
        content = {
            "values": self.values,
            "failures": self.failures,
            "targets": self.targets,
            "doing": self.doing,
            "go_on_at": self.go_on_at,
        }
        part.write_text(json.dumps(content))
        os.replace(part, self.path)


def line_of(error: Exception) -> str:
    """Return an exception as a line: its class and the first line of what it says."""
    line = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {line}"
