"""Compile kernels to machine code and report what they use: `python -m kernels.cuda.check [--all]`.

Needs no GPU and no driver. One line a variant and architecture; the exit code is 1 if any variant
fails to compile, spills, keeps an array in local memory, calculates in float64, takes more
registers than it should, or lacks an instruction it is built on. With `nvdisasm` at hand (a wheel
of that name has it) the machine instructions are counted as well.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from kernels.cuda import build
from kernels.cuda.errors import CompileError, CudaKernelError
from kernels.cuda.operations import OPERATIONS
from kernels.cuda.variant import Variant

CAPABILITIES = ((8, 0), (9, 0))

# The register file of a multiprocessor: what a block of threads takes must fit.
REGISTER_FILE = 65536
MAX_REGISTERS = 255

# Instructions worth a column; local memory (LDL, STL) must not occur.
INSTRUCTIONS = (
    "HMMA", "IMMA", "FFMA", "LDG", "LDG.128", "STG", "STG.128", "LDGSTS", "LDSM", "LDS", "STS",
    "SHFL", "MUFU", "BAR", "LDL", "STL",
)  # fmt: skip
_INSTRUCTION = re.compile(
    r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)((?:\.\w+)*)", re.MULTILINE
)


def faults(
    variant: Variant, usage: build.ResourceUsage, ptx: str, arch: str, counts: Counter[str]
) -> list[str]:
    """Return what is wrong with one variant's machine code; empty if nothing is.

    `counts` is empty where there is no disassembler. The variant's own ceiling of registers is that
    of capability 9.0: before, the assembler keeps a second copy of a loop for warps that parted.
    """
    found = []
    if usage.spill_bytes:
        found.append(f"{usage.spill_bytes} bytes of spills")
    if usage.stack_bytes or counts["LDL"] or counts["STL"]:
        found.append(f"{usage.stack_bytes} bytes of local memory")
    if ".f64" in ptx:
        found.append("float64 arithmetic")
    expected = variant.expectation
    ceiling = min(MAX_REGISTERS, REGISTER_FILE // variant.threads)
    if arch == "sm_90":
        ceiling = min(ceiling, expected.registers)
    if usage.registers > ceiling:
        found.append(f"{usage.registers} registers, the ceiling is {ceiling}")
    if counts:
        found += [f"no {name}" for name in expected.instructions if not counts[name]]
    return found


def count_instructions(cubin: bytes) -> Counter[str]:
    """Count machine instructions by name; empty where there is no disassembler.

    A 16-byte access counts under its name and under its name with ".128".
    """
    disassembler = find_disassembler()
    if disassembler is None:
        return Counter()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run(
            [disassembler, file.name], capture_output=True, text=True, check=False
        )
    if listing.returncode != 0:
        raise CompileError(f"{disassembler}: {listing.stderr.strip()}")
    counts: Counter[str] = Counter()
    for name, modifiers in _INSTRUCTION.findall(listing.stdout):
        counts[name] += 1
        if ".128" in modifiers:
            counts[f"{name}.128"] += 1
    return counts


def find_disassembler() -> str | None:
    """Return the path of `nvdisasm`: from its wheel, or on PATH."""
    try:
        import cuda.pathfinder as pathfinder

        found = pathfinder.find_nvidia_binary_utility("nvdisasm")
    except (ImportError, AttributeError):  # AttributeError: a pathfinder from before the function
        found = None
    return found or shutil.which("nvdisasm")


def check_variant(
    variant: Variant, capability: tuple[int, int], save_dir: Path | None
) -> tuple[str, bool]:
    """Compile one variant; return its line of the report and whether it is good."""
    start = time.perf_counter()
    arch = build.architecture(capability)
    ptx = build.compile_ptx(variant, capability)
    cubin, usage = build.link(variant.name, ptx, capability)
    counts = count_instructions(cubin)
    wrong = faults(variant, usage, ptx, arch, counts)
    if save_dir is not None:
        build.store(variant, capability, save_dir, cubin)
    columns = [
        f"{variant.name:<38} {arch}",
        f"{usage.registers:>4} regs {usage.shared_bytes:>6} B shared",
        f"{usage.stack_bytes} B stack {usage.spill_bytes} B spills",
        " ".join(f"{name} {counts[name]}" for name in INSTRUCTIONS if counts[name]),
        f"{time.perf_counter() - start:.1f} s",
        "FAULT: " + ", ".join(wrong) if wrong else "ok",
    ]
    return "  ".join(column for column in columns if column), not wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kernels.cuda.check", description=__doc__)
    parser.add_argument("--all", action="store_true", help="every variant, not a spread of them")
    parser.add_argument(
        "--only",
        choices=list(OPERATIONS),
        nargs="+",
        metavar="OPERATION",
        help="these operations instead of all: %(choices)s",
    )
    parser.add_argument(
        "--save",
        type=Path,
        metavar="DIR",
        help="keep the machine code in this cache directory, for a machine without the compiler",
    )
    options = parser.parse_args(arguments)
    bad = 0
    total = 0
    try:
        build.require_toolchain()
        if find_disassembler() is None:
            _say("no nvdisasm: instructions are not counted")
        for name in options.only or OPERATIONS:
            for variant in OPERATIONS[name].variants(every=options.all):
                for capability in CAPABILITIES:
                    line, good = check_variant(variant, capability, options.save)
                    _say(line)
                    bad += not good
                    total += 1
    except CudaKernelError as error:
        _say(f"error: {error}", sys.stderr)
        return 1
    _say(f"{total - bad} of {total} good")
    return 1 if bad else 0


def _say(line: str, stream: TextIO | None = None) -> None:
    (stream or sys.stdout).write(line + "\n")
    (stream or sys.stdout).flush()


if __name__ == "__main__":
    sys.exit(main())
