"""The kernels under compute-sanitizer: no access out of bounds, no race in shared memory.

A part of the report that starts itself once a tool: `compute-sanitizer … -m bench.gpu.sanitizers`
runs a spread of the variants on drawn cases, which the tool watches. Their answers are the
numerics' affair.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.gpu.findings import Findings, PartOptions

PROGRAM: Final = "compute-sanitizer"
TOOLS: Final = {"memcheck": ("--report-api-errors=no",), "racecheck": ()}
"""Each with flags of its own. Libraries ask the driver for functions that it may not have, which
are API errors; our own calls are checked where they are made."""
EXIT_FOUND: Final = 86
"""What the program is told to exit with where a tool has found something."""
# torch hands out pieces of large allocations, in which a tool sees no bounds.
OWN_ALLOCATIONS: Final = ("env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1")
REFUSAL: Final = "not supported"
"""In what it prints where the machine does not let it watch a device."""
ROOT: Final = Path(__file__).parents[2]


def sanitizers(found: Findings, options: PartOptions) -> None:
    """Run the spread under each tool; what one finds is a fault, one that cannot run is named."""
    results: dict[str, Any] = {}
    found.values["sanitizers"] = results
    program = shutil.which(PROGRAM)
    if program is None:
        results["missing"] = f"{PROGRAM} is not on the PATH"
        found.say(f"sanitizers: {results['missing']}")
        return
    ends = time.monotonic() + options.seconds
    watched = [sys.executable, "-m", "bench.gpu.sanitizers", str(options.machine_code)]
    for number, tool in enumerate(TOOLS):
        seconds = (ends - time.monotonic()) / (len(TOOLS) - number)
        results[tool] = result = watch(program, tool, watched, max(seconds, 1.0))
        if result["status"] in ("found something", "failed"):
            found.failures.append(f"{tool}: {result['status']}: {result['summary']}")
        found.say(f"{tool}: {result['status']}: {result['summary']}")


def watch(program: str, tool: str, watched: Sequence[str], seconds: float) -> dict[str, Any]:
    """Run a program under a tool; return `status`, the tool's `summary` and its `findings`.

    The status is `clean`, `found something`, `not supported` here, `cut` when its time was over, or
    `failed`: the watched program did, and nothing is known.
    """
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        command = [
            *OWN_ALLOCATIONS, program, f"--tool={tool}", *TOOLS[tool],
            f"--error-exitcode={EXIT_FOUND}", f"--log-file={log}", *watched,
        ]  # fmt: skip
        code: int | None = None
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL) as process:
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    lines = [line.lstrip("= ") for line in text.splitlines() if line.strip("= ")]
    summary = next((line for line in reversed(lines) if "SUMMARY" in line), "no summary")
    errors = re.search(r"SUMMARY: (\d+)", summary)
    if REFUSAL in text.lower():
        status = "not supported"
    elif code == EXIT_FOUND or (errors is not None and errors[1] != "0"):
        status = "found something"
    elif code is None:
        status = "cut"
    else:
        status = "clean" if code == 0 and errors is not None else "failed"
    return {"status": status, "summary": summary, "findings": lines[:40]}


def main(arguments: Sequence[str]) -> int:
    """Run every kernel of the spread on its cases; the exit code."""
    from bench.gpu.cases import draw_cases
    from bench.gpu.device import KernelLoader
    from kernels.cuda.operations import all_variants

    loader = KernelLoader(Path(arguments[0]), print)
    for seed, variant in enumerate(all_variants(every=False)):
        for case in draw_cases(variant, seed=seed):
            loader.run_case(case)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
