"""Check and measure kernels and engine on this GPU: `python -m bench.gpu --out report.json`.

Exit code 0: everything ran and is right; 1: something is wrong, or a part did not come to its end
(`--continue` does what is missing); 2: no CUDA device, or a package is missing. A target that is
missed stands in the report and is no fault.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from bench.gpu import expected_logits
from bench.gpu.device import why_no_device
from bench.gpu.findings import PartOptions, line_of
from bench.gpu.part_process import Part, run_part
from bench.gpu.report import Report
from kernels.cuda.build_ahead import take_over
from kernels.cuda.quantized_kv import QUANTIZED_DTYPES

SECONDS: Final = 570.0
"""Machines are lent by ten minutes, in which Python must start and the report be copied, too."""

PARTS: Final = (
    Part("numerics", "bench.gpu.kernel_parts:numerics", 120),
    Part("architectures", "bench.gpu.architectures:architectures", 90),
    Part("decode_attention", "bench.gpu.kernel_parts:decode_attention", 75),
    Part("dense_matmul", "bench.gpu.kernel_parts:dense_matmul", 45),
    Part("engine_steps", "bench.gpu.engine_steps:engine_steps", 140),
    Part("engine_serving", "bench.gpu.engine_serving:engine_serving", 150),
    Part("prefill_attention", "bench.gpu.kernel_parts:prefill_attention", 75),
    Part("engine_steps_8b", "bench.gpu.engine_steps:engine_steps_8b", 180),
    Part("quantized_matmul", "bench.gpu.kernel_parts:quantized_matmul", 90),
    Part("experts", "bench.gpu.kernel_parts:experts", 60),
    Part("recurrences", "bench.gpu.recurrence_parts:recurrences", 60),
    Part("sanitizers", "bench.gpu.sanitizers:sanitizers", 120),
    Part("suites", "bench.gpu.suites:suites", 600),
    Part("every_variant", "bench.gpu.kernel_parts:every_variant", 600),
)
"""In this order, until time runs out: what is most to be known comes first. Times are what a part
may take, not what it should: the last two fill what is left."""

NEEDED: Final = (
    "cuda.bindings", "gguf", "google.protobuf", "google.rpc", "grpc", "grpc_health",
    "grpc_reflection", "grpc_status", "jinja2", "llguidance", "llvmlite", "numba", "numba_cuda",
    "numpy", "rich", "structlog", "tokenizers", "typer", "uvloop",
)  # fmt: skip
"""Modules of others that the parts import. What only tests need is missed by them."""
STARTS: Final = ("compute_plane.cuda.cuda_driver", "control_plane.app", "bench.gpu.needed_kernels")
"""Modules of ours whose import shows whether those of others are new enough."""


def main(arguments: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Run and return the exit code."""
    began = time.monotonic()
    options = _parse(arguments, parts)
    hindrances = list(what_hinders())
    if hindrances:
        print("\n".join(hindrances), file=sys.stderr)
        return 2
    options.out.parent.mkdir(parents=True, exist_ok=True)
    run = _describe_run(options.commit)
    try:
        report = _report_of(options, run)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    device = run["device"]
    print(f"{device['name']}, capability {device['capability']}", flush=True)
    print(f"kernel compiler: {run['software']['compiler']}", flush=True)
    told = PartOptions(
        _kernel_cache(options), 0.0, options.kv_cache_dtype, has_rivals=options.has_rivals
    )
    if options.prebuilt is not None:
        run["taken_over"] = take_over(options.prebuilt, told.machine_code)
        expected_logits.take_over(options.prebuilt, told.kernel_cache)
        print(_say_of_taken_over(run, told.machine_code), flush=True)
    by_name = {part.name: part for part in parts}
    wanted = [by_name[name] for name in dict.fromkeys(options.only)] or parts
    if options.goes_on and not options.only:
        wanted = [part for part in wanted if not report.is_done(part.name)]
    fill_report(report, wanted, told, options.out, began + options.seconds)
    print("\n".join(report.summary()))
    print(f"report: {options.out}", flush=True)
    return 1 if report.failures() else 0


def what_hinders() -> Iterator[str]:
    """Yield a line for each reason why nothing can run here."""
    reason = why_no_device()
    if reason is not None:
        yield f"no CUDA device: {reason}"
    missing = missing_modules(NEEDED)
    if missing:
        yield (
            f"{sys.executable} lacks {', '.join(missing)}: pip install '.[cuda,test]', or name a "
            "folder that has them in PYTHONPATH"
        )
        return
    if not takes_numba_cuda():
        yield (
            f"numba.cuda is numba's own for {sys.executable}, not numba-cuda's, which takes its "
            "place by a .pth file: those in folders of PYTHONPATH are not read"
        )
        return
    for name in STARTS:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - whatever versions do that do not go together
            yield f"{name} cannot be imported by {sys.executable}: {line_of(error)}"


def takes_numba_cuda() -> bool:
    """Whether what is imported as `numba.cuda` is numba-cuda's."""
    found = importlib.util.find_spec("numba.cuda")
    return found is not None and "numba_cuda" in Path(found.origin or "").parts


def missing_modules(names: Sequence[str]) -> list[str]:
    """Return those that cannot be found."""
    return [name for name in names if not _is_there(name)]


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # what it would lie in is not there
        return False


def fill_report(
    report: Report, parts: Sequence[Part], told: PartOptions, out: Path, ends: float
) -> None:
    """Run parts one after the other; the file holds after each what is known by then.

    `ends`: when all their time is over, by the monotonic clock.
    """
    report.write()
    for part in parts:
        print(f"-- {part.name}", flush=True)
        here = replace(told, begin_at=report.begin_at(part.name))
        file = out.with_suffix(f".{part.name}.json")
        report.add(part.name, run_part(part, here, ends - time.monotonic(), file))
        report.write()


def _say_of_taken_over(run: dict[str, Any], machine_code: Path) -> str:
    """Say what came from elsewhere, and what has to be compiled here all the same."""
    from bench.gpu.needed_kernels import missing_variants
    from kernels.cuda.check import capability

    missing = missing_variants(capability(run["device"]["capability"]), machine_code)
    run["not_taken_over"] = [variant.name for variant in missing]
    said = f"{run['taken_over']} kernels were built elsewhere"
    if missing:
        said += (
            f"; {len(missing)} that are needed are not among them ({missing[0].name}, …): were "
            "they built from these sources and for this device?"
        )
    return said


def _report_of(options: argparse.Namespace, run: dict[str, Any]) -> Report:
    """Return the report to fill. Raises ValueError where the one that is there cannot go on."""
    if options.starts_anew:
        return Report(options.out, run)
    if not options.out.exists():
        if options.goes_on:  # on a machine that was given back it must be brought again
            print(
                f"{options.out} is not there: nothing to go on from, all parts are run", flush=True
            )
        return Report(options.out, run)
    try:
        earlier = Report.read(options.out)
    except ValueError as error:
        raise ValueError(f"{error}: --fresh begins anew") from None
    if not options.goes_on:
        if earlier.has_parts:  # of minutes that nobody may have again
            raise ValueError(
                f"{options.out} has parts: --continue goes on from it, --fresh begins anew"
            )
        return Report(options.out, run)
    if earlier.devices != {run["device"]["name"]}:
        raise ValueError(f"{options.out} is of another device: {', '.join(earlier.devices)}")
    return Report(options.out, run, earlier=earlier)


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
    known = parser.add_mutually_exclusive_group()
    known.add_argument(
        "--continue", dest="goes_on", action="store_true",
        help="keep what FILE has of parts that came to their end, and do the others",
    )  # fmt: skip
    known.add_argument(
        "--fresh", dest="starts_anew", action="store_true",
        help="begin FILE anew; without this one that has parts is left as it is",
    )  # fmt: skip
    parser.add_argument(
        "--no-rivals", dest="has_rivals", action="store_false",
        help="leave out what other libraries do of the same: torch, FlashInfer, transformers",
    )  # fmt: skip
    parser.add_argument(
        "--commit", metavar="HASH", help="what was checked out, of a copy; git is not asked then"
    )
    parser.add_argument(
        "--only", action="extend", default=[], metavar="PARTS",
        type=lambda names: _known_names(names, [part.name for part in parts]),
        help="run these parts only, with commas between them, in this order: "
        + ", ".join(part.name for part in parts),
    )  # fmt: skip
    return parser.parse_args(arguments)


def _known_names(text: str, names: Sequence[str]) -> list[str]:
    """Return names that have commas between them. Raises ArgumentTypeError for one that is none."""
    wanted = text.split(",")
    for name in wanted:
        if name not in names:
            raise argparse.ArgumentTypeError(f"no part {name!r}; there is {', '.join(names)}")
    return wanted


def _describe_run(commit: str | None) -> dict[str, Any]:
    from bench.gpu.provenance import (
        describe_commit,
        describe_device,
        describe_machine,
        describe_software,
    )

    return {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([sys.executable, *sys.orig_argv[1:]]),
        **describe_commit(commit),
        "device": describe_device(),
        "machine": describe_machine(),
        "software": describe_software(),
    }


if __name__ == "__main__":
    sys.exit(main())
