"""Machine code → how often each instruction occurs in it, with NVIDIA's `nvdisasm`.

The disassembler takes a third of a second to start and a hundredth for a kernel, so it is given
the code of many kernels at once: their sections of instructions, end to end, as one raw binary.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from kernels.cuda.errors import CompileError

_INSTRUCTION = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)((?:\.\w+)*)", re.MULTILINE
)

# Of an ELF file's header: where the table of sections is; its entries' size and number, and which
# of them holds the names. Of an entry: name, flags, offset and size.
_TABLE_OFFSET = struct.Struct("<40xQ")
_TABLE_SHAPE = struct.Struct("<58xHHH")
_SECTION = struct.Struct("<I4xQ8xQQ")


def count_instructions(cubins: Sequence[bytes], arch: str) -> list[Counter[str]]:
    """Count the machine instructions of cubins for one architecture, like sm_90, by name.

    A 16-byte access counts under its name and under its name with ".128". All counts are empty
    where there is no disassembler. Raises CompileError if it refuses the code.
    """
    counts: list[Counter[str]] = [Counter() for _ in cubins]
    disassembler = find_disassembler()
    if disassembler is None or not cubins:
        return counts
    codes = [instructions_of(cubin) for cubin in cubins]
    ends = list(accumulate(len(code) for code in codes))
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(codes))
        file.flush()
        command = [disassembler, "--binary", arch.replace("_", "").upper(), file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=False)
    if listing.returncode != 0:
        raise CompileError(f"{disassembler}: {listing.stderr.strip()}")
    for address, name, modifiers in _INSTRUCTION.findall(listing.stdout):
        of_kernel = counts[bisect_right(ends, int(address, 16))]
        of_kernel[name] += 1
        if ".128" in modifiers:
            of_kernel[f"{name}.128"] += 1
    return counts


def instructions_of(cubin: bytes) -> bytes:
    """Return the bytes of all instructions in a cubin, the functions that a kernel calls too."""
    (table,) = _TABLE_OFFSET.unpack_from(cubin)
    entry_size, num_sections, names_section = _TABLE_SHAPE.unpack_from(cubin)
    sections = [
        _SECTION.unpack_from(cubin, table + index * entry_size) for index in range(num_sections)
    ]
    names = sections[names_section][2]
    return b"".join(
        cubin[offset : offset + size]
        for name, _, offset, size in sections
        if cubin.startswith(b".text.", names + name)
    )


def find_disassembler() -> str | None:
    """Return the path of `nvdisasm`: from its wheel, or on PATH."""
    try:
        import cuda.pathfinder as pathfinder

        found = pathfinder.find_nvidia_binary_utility("nvdisasm")
    except (ImportError, AttributeError):  # AttributeError: a pathfinder from before the function
        found = None
    return found or shutil.which("nvdisasm")
