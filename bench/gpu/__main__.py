"""Check and measure kernels and engine on this GPU: `python -m bench.gpu --out report.json`.

Exit code 0: everything right; 1: something is wrong, or a part did not come to its end; 2: no CUDA
device. A target that is missed stands in the report and is no fault.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from bench.gpu.device import why_no_device
from bench.gpu.findings import PartOptions
from bench.gpu.part_process import Part, run_part
from kernels.cuda.build import DEFAULT_CACHE_DIR

REPORT_VERSION = 2
SECONDS: Final = 600.0

PARTS: Final = (
    Part("numerics", "bench.gpu.kernel_parts:numerics", 150),
    Part("decode_attention", "bench.gpu.kernel_parts:decode_attention", 60),
    Part("engine_steps", "bench.gpu.engine_steps:engine_steps", 90),
    Part("engine_serving", "bench.gpu.engine_serving:engine_serving", 120),
    Part("suites", "bench.gpu.suites:suites", 240),
    Part("prefill_attention", "bench.gpu.kernel_parts:prefill_attention", 60),
    Part("quantized_matmul", "bench.gpu.kernel_parts:quantized_matmul", 60),
    Part("sanitizers", "bench.gpu.sanitizers:sanitizers", 120),
)
"""In this order, until time runs out: what is most to be known comes first."""


def main(arguments: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Run and return the exit code."""
    options = _parse(arguments, parts)
    reason = why_no_device()
    if reason is not None:
        print(f"no CUDA device: {reason}", file=sys.stderr)
        return 2
    report = _begin_report()
    device = report["device"]
    print(f"{device['name']}, capability {device['capability']}", flush=True)
    wanted = [part for part in parts if part.name in options.only] if options.only else parts
    fill_report(report, wanted, options)
    for failure in report["failures"]:
        print(f"FAULT: {failure}")
    missed = sum(not target["met"] for target in report["targets"])
    print(
        f"report: {options.out}, {report['seconds']:.0f} s, {len(report['failures'])} faults, "
        f"{missed} of {len(report['targets'])} targets missed"
    )
    return 1 if report["failures"] else 0


def fill_report(report: dict[str, Any], parts: Sequence[Part], options: argparse.Namespace) -> None:
    """Run parts one after the other; the file holds after each what is known by then."""
    started = time.perf_counter()
    told = PartOptions(options.cache_dir, options.spread, 0.0)
    for part in parts:
        left = options.seconds - (time.perf_counter() - started)
        print(f"-- {part.name}", flush=True)
        run_part(part, told, left).merge_into(report, part.name)
        report["seconds"] = time.perf_counter() - started
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def _parse(arguments: Sequence[str] | None, parts: Sequence[Part]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the JSON report")
    parser.add_argument(
        "--cache-dir",
        type=Path,
        default=DEFAULT_CACHE_DIR,
        help="machine-code cache; may hold code from `kernels.cuda.check --save`",
    )
    parser.add_argument(
        "--spread", action="store_true", help="check a spread of the variants, not every one"
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="what all parts may take together"
    )
    parser.add_argument(
        "--only", action="append", choices=[part.name for part in parts], metavar="PART",
        help="run this part only; again for another one: "
        + ", ".join(part.name for part in parts),
    )  # fmt: skip
    return parser.parse_args(arguments)


def _begin_report() -> dict[str, Any]:
    from bench.gpu.provenance import describe_commit, describe_device, describe_software

    return {
        "report_version": REPORT_VERSION,
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([sys.executable, *sys.orig_argv[1:]]),
        **describe_commit(),
        "device": describe_device(),
        "software": describe_software(),
        "parts": {},
        "targets": [],
        "kernels": {},
        "numerics": [],
        "copy": None,
        "decode_attention": [],
        "prefill_attention": [],
        "quantized_matmul": [],
        "engine_steps": None,
        "engine_serving": [],
        "throughput": None,
        "suites": {},
        "failures": [],
    }


if __name__ == "__main__":
    sys.exit(main())
