"""The loop in which a kernel spends its time: in its PTX, as it ran, and in its machine code.

In both it is the shortest jump back over the most products on tensor cores.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter

from kernels.cuda.disassembly import find_disassembler, instructions_of
from tests.ptx.meter import Meter, Traffic
from tests.ptx.program import Program

_MACHINE_INSTRUCTION = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)([^;]*);", re.MULTILINE
)


def loop_of(program: Program) -> list[int]:
    """Return the indices of the PTX instructions of the loop; none without products."""
    loops = []
    for index, one in enumerate(program.instructions):
        first = program.labels.get(one.label, index)
        if first < index:
            body = program.instructions[first : index + 1]
            products = sum(one.opcode.startswith("mma.") for one in body)
            loops.append((products, first - index, list(range(first, index + 1))))
    best = max(loops, default=(0, 0, []))
    return best[2] if best[0] else []


def instructions_for_a_product(program: Program, meter: Meter) -> float:
    """Return how many PTX instructions of the loop ran for one product on tensor cores."""
    ran = Counter[bool]()
    for index in loop_of(program):
        is_product = program.instructions[index].opcode.startswith("mma.")
        ran[is_product] += meter.executed[index]
    return ran.total() / ran[True]


def traffic_of(program: Program, meter: Meter, space: str, indices: set[int] | None) -> Traffic:
    """Add up the accesses to a space, of some instructions or of all.

    A copy from global to shared memory counts in both.
    """
    total = Traffic()
    for index, traffic in meter.traffic.items():
        is_source = index < 0  # of an asynchronous copy
        place = ~index if is_source else index
        opcode = program.instructions[place].opcode
        is_global = is_source or (".global" in opcode and not opcode.startswith("cp.async"))
        if is_global == (space == "global") and (indices is None or place in indices):
            total.warps += traffic.warps
            total.num_bytes += traffic.num_bytes
            total.units += traffic.units
            total.least += traffic.least
    return total


def machine_loop(cubin: bytes, arch: str) -> Counter[str] | None:
    """Count the machine instructions of the loop with the most products, for sm_90 and the like.

    What is jumped over counts, too. None where there is no disassembler, or no such loop.
    """
    disassembler = find_disassembler()
    if disassembler is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(instructions_of(cubin))
        file.flush()
        command = [disassembler, "--binary", arch.replace("_", "").upper(), file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    code = [
        (int(address, 16), name, rest)
        for address, name, rest in _MACHINE_INSTRUCTION.findall(listing)
    ]
    loops = []
    for address, name, rest in code:
        target = re.search(r"0x([0-9a-f]+)", rest) if name == "BRA" else None
        if target is not None and int(target[1], 16) < address:
            first = int(target[1], 16)
            loops.append(Counter(name for at, name, _ in code if first <= at <= address))
    best = max(loops, key=lambda loop: (loop["HMMA"], -loop.total()), default=None)
    return best if best is not None and best["HMMA"] else None
