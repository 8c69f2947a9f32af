"""Check and measure kernels and engine on this GPU: `python -m bench.gpu --out report.json`.

Exit code 0: everything right; 1: something is wrong, or a part did not come to its end; 2: no CUDA
device, or a package is missing. A target that is missed stands in the report and is no fault.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from bench.gpu.device import why_no_device
from bench.gpu.findings import PartOptions
from bench.gpu.part_process import Part, run_part
from kernels.cuda.build_ahead import take_over
from kernels.cuda.quantized_kv import QUANTIZED_DTYPES

REPORT_VERSION = 3
SECONDS: Final = 600.0

PARTS: Final = (
    Part("numerics", "bench.gpu.kernel_parts:numerics", 120),
    Part("decode_attention", "bench.gpu.kernel_parts:decode_attention", 75),
    Part("engine_steps", "bench.gpu.engine_steps:engine_steps", 90),
    Part("engine_serving", "bench.gpu.engine_serving:engine_serving", 150),
    Part("prefill_attention", "bench.gpu.kernel_parts:prefill_attention", 75),
    Part("quantized_matmul", "bench.gpu.kernel_parts:quantized_matmul", 90),
    Part("sanitizers", "bench.gpu.sanitizers:sanitizers", 120),
    Part("suites", "bench.gpu.suites:suites", 600),
    Part("every_variant", "bench.gpu.kernel_parts:every_variant", 600),
)
"""In this order, until time runs out: what is most to be known comes first. Times are what a part
may take, not what it should: the last two fill what is left."""

NEEDED: Final = (
    "cuda.bindings", "gguf", "google.protobuf", "google.rpc", "grpc", "grpc_health",
    "grpc_reflection", "grpc_status", "jinja2", "llvmlite", "numba", "numpy", "rich", "structlog",
    "tokenizers", "typer", "uvloop",
)  # fmt: skip
"""Modules of others that the parts import. What only tests need is missed by them."""

SHOWN: Final = 25
"""Faults that are printed; the report has them all."""
WIDTH: Final = 160


def main(arguments: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Run and return the exit code."""
    options = _parse(arguments, parts)
    reason = why_no_device()
    if reason is not None:
        print(f"no CUDA device: {reason}", file=sys.stderr)
        return 2
    missing = missing_modules(NEEDED)
    if missing:
        print(
            f"{sys.executable} lacks {', '.join(missing)}: pip install '.[cuda,test]', or name a "
            "folder that has them in PYTHONPATH",
            file=sys.stderr,
        )
        return 2
    report = _begin_report(options.commit)
    device = report["device"]
    print(f"{device['name']}, capability {device['capability']}", flush=True)
    print(f"kernel compiler: {report['software']['compiler']}", flush=True)
    told = PartOptions(_kernel_cache(options), 0.0, options.kv_cache_dtype)
    if options.prebuilt is not None:
        report["taken_over"] = take_over(options.prebuilt, told.machine_code)
        print(f"{report['taken_over']} kernels were built elsewhere", flush=True)
    wanted = [part for part in parts if part.name in options.only] if options.only else parts
    fill_report(report, wanted, told, options.out, options.seconds)
    print("\n".join(summary_of(report)))
    print(f"report: {options.out}", flush=True)
    return 1 if report["failures"] else 0


def missing_modules(names: Sequence[str]) -> list[str]:
    """Return those that cannot be found."""
    return [name for name in names if not _is_there(name)]


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # what it would lie in is not there
        return False


def fill_report(
    report: dict[str, Any], parts: Sequence[Part], told: PartOptions, out: Path, seconds: float
) -> None:
    """Run parts one after the other; the file holds after each what is known by then."""
    started = time.perf_counter()
    for part in parts:
        left = seconds - (time.perf_counter() - started)
        print(f"-- {part.name}", flush=True)
        run_part(part, told, left, out.with_suffix(f".{part.name}.json")).merge_into(
            report, part.name
        )
        report["seconds"] = time.perf_counter() - started
        out.write_text(json.dumps(report, indent=1) + "\n")


def summary_of(report: dict[str, Any]) -> Iterator[str]:
    """Yield lines for people: parts, targets, faults; the last lines of all."""
    yield "== parts"
    for name, ending in report["parts"].items():
        why = f": {ending['why']}" if "why" in ending else ""
        yield f"{name:<20} {ending['status']:<9} {ending['seconds']:6.1f} s{why}"[:WIDTH]
    missed = [target for target in report["targets"] if not target["met"]]
    yield f"== targets: {len(missed)} of {len(report['targets'])} missed"
    for target in report["targets"]:
        word, limit = ("≤", "at_most") if "at_most" in target else ("≥", "at_least")
        verdict = "met" if target["met"] else "MISSED"
        figures = f"{target['value']:9.3g} {word} {target[limit]:<6g} {verdict:<7}"
        yield f"{figures} {target['name']}"[:WIDTH]
    yield f"== faults: {len(report['failures'])}"
    yield from (failure[:WIDTH] for failure in report["failures"][:SHOWN])
    if len(report["failures"]) > SHOWN:
        yield f"… and {len(report['failures']) - SHOWN} more in the report"


def _kernel_cache(options: argparse.Namespace) -> Path:
    """Return the kernel cache of a compute plane that is told the same."""
    from compute_plane.config import ComputePlaneConfig

    return ComputePlaneConfig(kernel_cache=options.kernel_cache).kernel_cache_root


def _parse(arguments: Sequence[str] | None, parts: Sequence[Part]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the JSON report")
    parser.add_argument(
        "--kernel-cache", metavar="DIR",
        help="as of a compute plane, whose machine code it is too; the suites use the default one",
    )  # fmt: skip
    parser.add_argument(
        "--prebuilt", type=Path, metavar="DIR",
        help="take machine code from here, as of `python -m bench.gpu.needed_kernels DIR`",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="what all parts may take together"
    )
    parser.add_argument(
        "--kv-cache-dtype", default="auto", choices=("auto", *QUANTIZED_DTYPES),
        help="what the engine's parts keep keys and values in",
    )  # fmt: skip
    parser.add_argument(
        "--commit", metavar="HASH", help="what is checked out, where there is no git to ask"
    )
    parser.add_argument(
        "--only", action="append", choices=[part.name for part in parts], metavar="PART",
        help="run this part only; again for another one: "
        + ", ".join(part.name for part in parts),
    )  # fmt: skip
    return parser.parse_args(arguments)


def _begin_report(commit: str | None) -> dict[str, Any]:
    from bench.gpu.provenance import (
        describe_commit,
        describe_device,
        describe_machine,
        describe_software,
    )

    return {
        "report_version": REPORT_VERSION,
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([sys.executable, *sys.orig_argv[1:]]),
        **describe_commit(commit),
        "device": describe_device(),
        "machine": describe_machine(),
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
