"""Parts of a report for the tests of how a report is put together; each runs in a process."""

from __future__ import annotations

import math
import os
import signal
import tempfile
import threading
import time
import types
from dataclasses import replace

from bench.gpu import one_by_one
from bench.gpu.findings import Findings, PartOptions
from bench.gpu.part_process import Part

LETTERS = ("a", "b", "c", "d", "e")


def part(name: str, seconds: float = 60) -> Part:
    """Return one of those below as a part of a report."""
    return Part(name, f"{__name__}:{name}", seconds)


def finds(found: Findings, options: PartOptions) -> None:
    found.values["engine_steps"] = {"kv_cache_dtype": options.kv_cache_dtype}
    found.values["numerics"] = ["one case"]
    found.target("a share", 0.2, at_most=0.1)


def finds_a_fault(found: Findings, _: PartOptions) -> None:
    found.values["numerics"] = ["another case"]
    found.failures.append("a kernel is wrong")
    found.target("a speed", 4.0, at_least=3.0)


def raises(found: Findings, _: PartOptions) -> None:
    found.values["suites"] = {"begun": True}
    found.begin("the third case")
    raise ValueError("no\nsuch thing")


def dies(found: Findings, _: PartOptions) -> None:
    found.values["throughput"] = 3
    found.save()
    os.abort()


def hangs(found: Findings, _: PartOptions) -> None:
    found.values["copy"] = 7
    found.save()
    time.sleep(600)


def looks_at_its_file(found: Findings, _: PartOptions) -> None:
    found.save()
    assert found.path is not None
    files = sorted(path.name for path in found.path.parent.iterdir() if path.suffix == ".json")
    found.values["copy"] = {"files": files}


def loses_the_device_twice(found: Findings, options: PartOptions) -> None:
    names = found.values["numerics"] = []
    places = found.values["kernels"] = {}
    lost = False

    def do(name: str) -> None:
        nonlocal lost
        lost = name in "bd"
        if not lost:
            names.append(name)
            places[name] = LETTERS.index(name)

    one_by_one.device_is_lost = lambda: lost
    one_by_one.one_by_one(found, options, LETTERS, str, do)


def waits_for_ever_at_b(found: Findings, options: PartOptions) -> None:
    names = found.values["numerics"] = []

    def do(name: str) -> None:
        if name == "b":
            threading.Event().wait()
        names.append(name)

    one_by_one.EACH_S = 1.0
    one_by_one.one_by_one(found, options, LETTERS[:3], str, do)


def waits_before_a(found: Findings, options: PartOptions) -> None:
    """Begin with something that takes more than half of the time, by a clock of its own."""
    names = found.values["numerics"] = []
    now = options.made_at
    one_by_one.time = types.SimpleNamespace(monotonic=lambda: now)

    def before(number: int) -> None:
        nonlocal now
        now += 0.0 if number else 0.6 * options.seconds

    one_by_one.one_by_one(found, options, LETTERS, str, names.append, before)


def comes_half_way(found: Findings, options: PartOptions) -> None:
    """Two letters, for time is over then; in another run what is left of them."""
    names = found.values["numerics"] = []
    if options.begin_at == 0:
        one_by_one.one_by_one(found, options, LETTERS[:2], str, names.append)
        options = replace(options, begin_at=2, seconds=0.0)
    one_by_one.one_by_one(found, options, LETTERS, str, names.append)


def finds_infinity(found: Findings, _: PartOptions) -> None:
    found.values["numerics"] = [{"error": math.inf}, math.nan]


def leaves_a_model(found: Findings, _: PartOptions) -> None:
    """Make a temporary file, say where, and die."""
    with tempfile.NamedTemporaryFile(delete=False) as file:
        found.values["copy"] = file.name
        found.save()
        os.kill(os.getpid(), signal.SIGKILL)
