"""Whether other processes used the processors while something was measured; Linux only.

A repetition that was disturbed is taken again, a few times; if none is quiet, the last one is kept
and marked, so that a busy machine is seen in the table rather than in the figures.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

PROC = Path("/proc")
TICKS = os.sysconf("SC_CLK_TCK")

RESOLUTION_S = 0.03
"""How far the sums of ticks may be off."""

PAUSE_S = 1.0
"""After a disturbed repetition."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Attempt(Generic[T]):
    """One repetition. `others`: cores that other processes kept busy meanwhile, on average."""

    value: T
    others: float
    is_quiet: bool


@dataclass(frozen=True, slots=True)
class QuietRule:
    """At most `limit` of a core may go to others; `tries` repetitions are made for a quiet one."""

    limit: float = 0.05
    tries: int = 4

    def allows(self, busy_s: float, wall_s: float) -> bool:
        """Whether so many seconds of others' work in that time are none worth speaking of."""
        return busy_s <= self.limit * wall_s + RESOLUTION_S


def repeat_until_quiet(
    measure: Callable[[], T], pids: Iterable[int], rule: QuietRule
) -> list[Attempt[T]]:
    """Measure until a repetition is quiet; return all of them, the last one being the best.

    `pids`: processes whose work, and that of their descendants, is part of what is measured; this
    process itself is too, but not its other children.
    """
    roots = set(pids)
    attempts: list[Attempt[T]] = []
    for number in range(rule.tries):
        if number:
            time.sleep(PAUSE_S)
        busy, own, began = busy_seconds(), own_seconds(roots), time.perf_counter()
        value = measure()
        wall = time.perf_counter() - began
        others = (busy_seconds() - busy) - (own_seconds(roots) - own)
        is_quiet = rule.allows(others, wall)
        attempts.append(Attempt(value, max(others, 0.0) / wall, is_quiet))
        if is_quiet:
            break
    return attempts


def busy_seconds() -> float:
    """Return for how long the processors have been at work, all together, since the start."""
    line = (PROC / "stat").read_text(encoding="ascii").partition("\n")[0]
    # user, nice, system, idle, iowait, irq, softirq, steal; guests are part of user.
    ticks = [int(word) for word in line.split()[1:9]]
    return (sum(ticks) - sum(ticks[3:5])) / TICKS


def own_seconds(roots: set[int]) -> float:
    """Return the processor time of this process, of `roots`, and of everything below those."""
    parents: dict[int, int] = {}
    used: dict[int, int] = {}
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # it has ended
        pid = int(entry.name)
        parents[pid], used[pid] = parse_stat(text)
    own = os.getpid()
    return sum(
        ticks for pid, ticks in used.items() if pid == own or is_below(pid, roots, parents)
    ) / TICKS  # fmt: skip


def parse_stat(text: str) -> tuple[int, int]:
    """Return the parent and the ticks of a process and its ended children, of `/proc/PID/stat`."""
    # The name may hold blanks and parentheses; the fields behind it do not.
    fields = text[text.rindex(")") + 2 :].split()
    return int(fields[1]), sum(map(int, fields[11:15]))


def is_below(pid: int, roots: set[int], parents: dict[int, int]) -> bool:
    """Whether a process is one of `roots` or descends from one."""
    while pid and pid not in roots:
        pid = parents.get(pid, 0)
    return pid in roots
