"""Parts of a report for the tests of how a report is put together; each runs in a process."""

from __future__ import annotations

import os
import time

from bench.gpu.findings import Findings, PartOptions


def finds(found: Findings, options: PartOptions) -> None:
    found.values["engine_steps"] = {"spread": options.spread}
    found.values["kernels"] = {"first": 1}
    found.target("a share", 0.2, at_most=0.1)


def finds_a_fault(found: Findings, _: PartOptions) -> None:
    found.values["kernels"] = {"second": 2}
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
