"""Compile kernels to machine code and report what they use: `python -m kernels.cuda.check [--all]`.

Needs no GPU and no driver. One line a variant and architecture; the exit code is 1 if any variant
fails to compile, spills, keeps an array in local memory, calculates in float64, takes more
registers or shared memory than it should, or lacks an instruction it is built on. With `nvdisasm`
at hand (a wheel of that name has it) the machine instructions are counted as well.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TextIO

from kernels.cuda import build
from kernels.cuda.disassembly import count_instructions, find_disassembler
from kernels.cuda.errors import CudaKernelError
from kernels.cuda.fitted_ptx import EARLY_LAUNCHES
from kernels.cuda.operations import OPERATIONS
from kernels.cuda.variant import Variant

CAPABILITIES = ((8, 0), (9, 0))

# The register file of a multiprocessor: what a block of threads takes must fit.
REGISTER_FILE = 65536
MAX_REGISTERS = 255

# Of a block whose arrays have their sizes in the code; the assembler takes more, the driver does
# not launch it. Its own report counts what the system keeps of a block, too, from 9.0 on.
MAX_SHARED_BYTES = 48 << 10
_SHARED_ARRAY = re.compile(r"\.shared\s[^;\[]*\[(\d+)\];")

# Variants that are disassembled together: more would only let their lines wait.
AT_ONCE = 16

# What lets the next launch begin, and what waits for the one ahead.
EARLY_INSTRUCTIONS = ("PREEXIT", "ACQBULK")

# Instructions worth a column; local memory (LDL, STL) must not occur.
INSTRUCTIONS = (
    "HMMA", "IMMA", "FFMA", "LDG", "LDG.128", "STG", "STG.128", "LDGSTS", "LDSM", "LDS", "STS",
    "ATOMS", "DMUL", "SHFL", "MUFU", "BAR", "LDL", "STL",
)  # fmt: skip


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
    shared_bytes = sum(map(int, _SHARED_ARRAY.findall(ptx)))
    if shared_bytes > MAX_SHARED_BYTES:
        found.append(f"{shared_bytes} bytes of shared memory, the ceiling is {MAX_SHARED_BYTES}")
    expected = variant.expectation
    if ".f64" in ptx and not expected.uses_float64:
        found.append("float64 arithmetic")
    ceiling = min(MAX_REGISTERS, REGISTER_FILE // variant.threads)
    if arch == "sm_90":
        ceiling = min(ceiling, expected.registers)
    if usage.registers > ceiling:
        found.append(f"{usage.registers} registers, the ceiling is {ceiling}")
    if counts:
        wanted = expected.instructions
        if expected.begins_early and _number(arch) >= _number(build.architecture(EARLY_LAUNCHES)):
            wanted = (*wanted, *EARLY_INSTRUCTIONS)
        found += [f"no {name}" for name in wanted if not counts[name]]
    return found


def _number(arch: str) -> int:
    """Return 90 of sm_90."""
    return int(arch.removeprefix("sm_"))


@dataclass(frozen=True, slots=True)
class Verdict:
    """One variant on one architecture: its line of the report, and whether it is good."""

    line: str
    is_good: bool


@dataclass(frozen=True, slots=True)
class _Built:
    """One variant's machine code for one architecture, and the seconds that it took."""

    variant: Variant
    arch: str
    ptx: str
    cubin: bytes
    usage: build.ResourceUsage
    seconds: float

    def verdict(self, counts: Counter[str]) -> Verdict:
        usage = self.usage
        wrong = faults(self.variant, usage, self.ptx, self.arch, counts)
        columns = [
            f"{self.variant.name:<38} {self.arch}",
            f"{usage.registers:>4} regs {usage.shared_bytes:>6} B shared",
            f"{usage.stack_bytes} B stack {usage.spill_bytes} B spills",
            " ".join(f"{name} {counts[name]}" for name in INSTRUCTIONS if counts[name]),
            f"{self.seconds:.1f} s",
            "FAULT: " + ", ".join(wrong) if wrong else "ok",
        ]
        return Verdict("  ".join(column for column in columns if column), not wrong)


def check_variants(
    variants: Sequence[Variant],
    capabilities: Sequence[tuple[int, int]],
    save_dir: Path | None = None,
) -> Iterator[Verdict]:
    """Compile variants, assemble each for some capabilities; keep the code in `save_dir`."""
    built = [one for variant in variants for one in _build(variant, capabilities, save_dir)]
    counts: dict[str, Iterator[Counter[str]]] = {}
    for arch in map(build.architecture, capabilities):
        cubins = [one.cubin for one in built if one.arch == arch]
        counts[arch] = iter(count_instructions(cubins, arch))
    return (one.verdict(next(counts[one.arch])) for one in built)


def _build(
    variant: Variant, capabilities: Sequence[tuple[int, int]], save_dir: Path | None
) -> Iterator[_Built]:
    start = time.perf_counter()
    ptx = build.compile_ptx(variant)
    for capability in capabilities:
        cubin, usage = build.link(variant.name, ptx, capability)
        if save_dir is not None:
            build.store(variant, capability, save_dir, cubin)
        now = time.perf_counter()
        yield _Built(variant, build.architecture(capability), ptx, cubin, usage, now - start)
        start = now


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check and return the exit code."""
    options = _parse(arguments)
    variants = [
        variant
        for name in options.only or OPERATIONS
        for variant in OPERATIONS[name].variants(every=options.all)
    ]
    size = min(AT_ONCE, -(-len(variants) // options.jobs))
    jobs = [
        (variants[start : start + size], options.capabilities, options.save)
        for start in range(0, len(variants), size)
    ]
    bad = total = 0
    try:
        build.require_toolchain()
        if find_disassembler() is None:
            _say("no nvdisasm: instructions are not counted")
        if options.save is not None:
            build.private_directory(options.save)
        for verdict in _check_all(jobs, options.jobs):
            _say(verdict.line)
            bad += not verdict.is_good
            total += 1
    except CudaKernelError as error:
        _say(f"error: {error}", sys.stderr)
        return 1
    _say(f"{total - bad} of {total} good")
    return 1 if bad else 0


_Job = tuple[Sequence[Variant], Sequence[tuple[int, int]], Path | None]


def _check_all(jobs: Sequence[_Job], num_processes: int) -> Iterator[Verdict]:
    """Yield the verdicts in order as they come."""
    if num_processes == 1:
        for job in jobs:
            yield from check_variants(*job)
        return
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        for verdicts in pool.map(_check_some, jobs):
            yield from verdicts


def _check_some(job: _Job) -> list[Verdict]:
    return list(check_variants(*job))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kernels.cuda.check", description=__doc__)
    parser.add_argument("--all", action="store_true", help="every variant, not a spread of them")
    parser.add_argument(
        "--only", choices=list(OPERATIONS), nargs="+", metavar="OPERATION",
        help="these operations instead of all: %(choices)s",
    )  # fmt: skip
    parser.add_argument(
        "--for", dest="capabilities", type=capability, nargs="+", metavar="CAPABILITY",
        default=CAPABILITIES, help="compute capabilities, like 8.9 (default: 8.0 9.0)",
    )  # fmt: skip
    parser.add_argument(
        "--save",
        type=Path,
        metavar="DIR",
        help="keep the machine code in this cache directory, for a machine without the compiler",
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N",
        help="processes that compile at once (default: the number of CPUs)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"argument --jobs: must be at least 1, got {options.jobs}")
    return options


def capability(text: str) -> tuple[int, int]:
    """Read a compute capability as the command line writes it: "8.9" is (8, 9)."""
    major, _, minor = text.partition(".")
    if not (major.isdecimal() and minor.isdecimal()):
        message = f"{text!r} is not a compute capability like 8.9"
        raise argparse.ArgumentTypeError(message)
    return int(major), int(minor)


def _say(line: str, stream: TextIO | None = None) -> None:
    (stream or sys.stdout).write(line + "\n")
    (stream or sys.stdout).flush()


if __name__ == "__main__":
    sys.exit(main())
