"""The kernels under compute-sanitizer: no access out of bounds, no race in shared memory.

A part of the report that starts itself once a tool: `compute-sanitizer … -m bench.gpu.sanitizers`
runs a spread of the variants on drawn cases, which the tool watches. Their answers are the
numerics' affair. A tool says what it found when the program ends, so it ends by itself in time, and
says how far it came.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
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
TO_END_S: Final = 15.0
"""What tool and program need to end once the last kernel has run."""
_CAME_TO = re.compile(r"^ran (\d+) of (\d+) variants$", re.MULTILINE)


def sanitizers(found: Findings, options: PartOptions) -> None:
    """Run the spread under each tool; what one finds is a fault, one that cannot run is named."""
    results: dict[str, Any] = {}
    found.values["sanitizers"] = results
    program = find_program()
    if program is None:
        results["missing"] = f"{PROGRAM} is neither on the PATH nor in a CUDA toolkit"
        found.say(f"sanitizers: {results['missing']}")
        return
    watched = [sys.executable, "-m", "bench.gpu.sanitizers", str(options.machine_code)]
    for number, tool in enumerate(TOOLS):
        found.begin(tool)
        seconds = max((options.ends - time.monotonic()) / (len(TOOLS) - number), 1.0)
        told = [*watched, str(seconds - TO_END_S)]
        results[tool] = result = watch(program, tool, told, seconds)
        if result["status"] in ("found something", "failed"):
            found.failures.append(f"{tool}: {result['status']}: {result['summary']}")
        variants = " of ".join(map(str, result["variants"] or ["no word"]))
        found.say(f"{tool}: {result['status']}: {result['summary']} ({variants} variants)")
    found.doing = ""


def find_program() -> str | None:
    """Return where the tool is: toolkits have it, and are not always on the PATH."""
    program = shutil.which(PROGRAM)
    if program is None:
        from cuda import pathfinder

        with contextlib.suppress(AttributeError, RuntimeError):  # an older one does not look for it
            program = pathfinder.find_nvidia_binary_utility(PROGRAM)
    return program


def watch(program: str, tool: str, watched: Sequence[str], seconds: float) -> dict[str, Any]:
    """Run a program under a tool; return `status`, `summary`, `findings` and `variants`.

    The status is `clean`, `found something`, `not supported` here, `cut` when its time was over, or
    `failed`: the watched program did, and nothing is known. `variants`: how many ran, and of how
    many; None if the program did not come to say it.
    """
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        command = [
            *OWN_ALLOCATIONS, program, f"--tool={tool}", *TOOLS[tool],
            f"--error-exitcode={EXIT_FOUND}", f"--log-file={log}", *watched,
        ]  # fmt: skip
        code: int | None = None
        # A group of its own: the watched program must not outlive its tool.
        with subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        ) as process:  # fmt: skip
            try:
                said, _ = process.communicate(timeout=seconds)
                code = process.returncode
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                said, _ = process.communicate()
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
    came_to = _CAME_TO.search(said)
    variants = None if came_to is None else [int(number) for number in came_to.groups()]
    return {"status": status, "summary": summary, "findings": lines[:40], "variants": variants}


def main(arguments: Sequence[str]) -> int:
    """Run kernels of the spread on their cases, for so many seconds; the exit code."""
    began = time.monotonic()
    from bench.gpu.cases import draw_cases
    from bench.gpu.device import KernelLoader
    from kernels.cuda.operations import all_variants

    machine_code, seconds = Path(arguments[0]), float(arguments[1])
    loader = KernelLoader(machine_code, print)
    variants = list(enumerate(all_variants(every=False)))
    random.Random(0).shuffle(variants)  # those that time cuts off should be of all operations
    ran = 0
    for seed, variant in variants:
        if time.monotonic() - began > seconds:
            break
        for case in draw_cases(variant, seed=seed):
            loader.run_case(case)
        ran += 1
    print(f"ran {ran} of {len(variants)} variants", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
