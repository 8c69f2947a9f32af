"""`python -m tests.kernels.cpu.object_files SET DIRECTORY [OPERATION …]`: load what a set uses.

All of it, or the operations named. What is not kept below the directory, where planes would look
for it, is compiled and kept there; where Numba cannot be imported, that is an error. The processor
need not have the set, nor be of its kind: nothing runs. The first line printed is where they are.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import llvmlite.binding

from compute_plane.cpu.kernel_cache import prepare_kernel_cache
from kernels.cpu import instruction_set
from kernels.cpu.instruction_set import INSTRUCTION_SETS
from kernels.cpu.operation import Operation


def force(name: str) -> None:
    """Choose a set for this process, whether its processor has it or not."""
    chosen = INSTRUCTION_SETS[name]
    if chosen.machine not in (None, platform.machine()):
        _pretend_to_be(chosen.machine)
    instruction_set._selected = chosen
    instruction_set._forced = instruction_set._target_of(chosen)


def _pretend_to_be(machine: str) -> None:
    """Let kernels be compiled for another kind of processor, and its object files be loaded."""
    llvmlite.binding.initialize_all_targets()
    llvmlite.binding.initialize_all_asmprinters()
    platform.machine = lambda: machine
    for module in (llvmlite.binding, llvmlite.binding.targets):
        for name in ("get_process_triple", "get_default_triple"):
            setattr(module, name, lambda: f"{machine}-unknown-linux-gnu")


def operations_of_the_set() -> Iterator[Operation]:
    """Yield every operation that a table or a team can name on the set of this process."""
    from compute_plane.cpu.row_buffers import gated_product_of, product_of, row_format_of
    from kernels.cpu import catalogue

    products = (
        catalogue.FLOAT_PRODUCTS, catalogue.INT8_PRODUCTS, catalogue.UNPACKED_PRODUCTS,
        catalogue.GATED_PRODUCTS, catalogue.product_bf16_rows,
    )  # fmt: skip
    for value in vars(catalogue).values():
        if not any(value is of_some_sets for of_some_sets in products):
            values = value.values() if isinstance(value, dict) else [value]
            yield from (item for item in values if isinstance(item, Operation))
    k, n = 64, 64  # every product takes these sizes
    for label in catalogue.EMBEDDINGS:
        for of_prompt in (False, True):
            row_format = row_format_of(label, of_prompt=of_prompt)
            yield product_of(label, k, row_format)[0]
            if (gated := gated_product_of(label, n, row_format)) is not None:
                yield gated[0]


def load(names: list[str]) -> None:
    """Load operations; all of the set if none is named. Print the names."""
    for operation in dict.fromkeys(operations_of_the_set()):
        if not names or operation.name in names:
            assert operation.address
            sys.stdout.write(f"{operation.name}\n")


if __name__ == "__main__":
    force(sys.argv[1])
    sys.stdout.write(f"{prepare_kernel_cache(Path(sys.argv[2]))}\n")
    load(sys.argv[3:])
