"""Parts of a report for the tests of how a report is put together; each runs in a process."""

from __future__ import annotations

import os
import time

from bench.gpu.findings import Findings, PartOptions


def finds(found: Findings, options: PartOptions) -> None:
    found.values["engine_steps"] = {"kv_cache_dtype": options.kv_cache_dtype}
    found.values["numerics"] = ["one case"]
    found.values["kernels"] = {"first": 1}
    found.target("a share", 0.2, at_most=0.1)


def finds_a_fault(found: Findings, _: PartOptions) -> None:
    found.values["kernels"] = {"second": 2}
    found.values["numerics"] = ["another case"]
    found.failures.append("a kernel is wrong")
    found.target("a speed", 4.0, at_least=3.0)


def raises(found: Findings, _: PartOptions) -> None:
    found.values["suites"] = {"begun": True}
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
    files = [path.name for path in found.path.parent.iterdir() if path.suffix == ".json"]
    found.values["copy"] = {"files": files}
