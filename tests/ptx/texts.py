"""Small PTX texts for tests: a kernel around some lines, or around one instruction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.ptx.launcher import launch
from tests.ptx.program import SIZES
from tests.ptx.registers import DTYPES

Array = npt.NDArray[Any]

_REGISTERS = """\
.reg .pred %p<9>; .reg .b16 %rs<40>; .reg .b32 %r<40>; .reg .b64 %rd<40>; .reg .f32 %f<40>;
.reg .f64 %fd<40>;"""


def kernel_text(
    body: str, *, parameters: int = 1, shared: Sequence[int] = (), threads: int = 32
) -> str:
    """Return a kernel with pointers as parameters, loaded to %rd1, %rd2, …; %r0 is the thread.

    `shared` are the sizes of shared arrays tile0, tile1, …
    """
    names = [f"k_param_{i}" for i in range(parameters)]
    declared = [f".visible .shared .align 16 .b8 tile{i}[{size}];" for i, size in enumerate(shared)]
    loads = [f"ld.param.u64 %rd{i + 1}, [{name}];" for i, name in enumerate(names)]
    listed = [f".param .u64 {name}{',' * (i + 1 < parameters)}" for i, name in enumerate(names)]
    lines = [
        *declared, ".visible .entry k(", *listed, ")", f".maxntid {threads}, 1, 1", "{",
        *_REGISTERS.replace("; ", ";\n").splitlines(), *loads, "mov.u32 %r0, %tid.x;",
        *(line.strip() for line in body.splitlines()), "ret;", "}",
    ]  # fmt: skip
    return "\n".join(lines)


_CLASSES = {"pred": "p", 2: "rs", 4: "r", 8: "rd"}


def compute(opcode: str, result: str, *operands: tuple[str, Any], tail: str = "") -> Array:
    """Run one instruction on operands (type, values) and return what it gives, one a value.

    The values are loaded from memory and the results stored there; `tail` is put behind the
    operands as it is. A predicate comes as 0 or 1.
    """
    columns = [np.ascontiguousarray(values, DTYPES[kind]) for kind, values in operands]
    count = max(len(column) for column in columns)
    threads = -(-count // 32) * 32
    padded = [np.resize(column, threads) for column in columns]
    lines, names = [], []
    for i, (kind, _) in enumerate(operands):
        size = SIZES[kind]
        name = f"%{_CLASSES[size]}{20 + i}"
        lines += [
            f"mul.wide.s32 %rd10, %r0, {size};",
            f"add.s64 %rd10, %rd{i + 2}, %rd10;",
            f"ld.global.u{8 * size} {name}, [%rd10];",
        ]
        names.append(name)
    size = 4 if result == "pred" else SIZES[result]
    to = f"%{_CLASSES['pred' if result == 'pred' else size]}{8 if result == 'pred' else 39}"
    lines.append(f"{opcode} {to}, {', '.join(names)}{tail};")
    if result == "pred":
        lines.append("selp.u32 %r39, 1, 0, %p8;")
    stored = "%r39" if result == "pred" else to
    lines += [
        f"mul.wide.s32 %rd10, %r0, {size};",
        "add.s64 %rd10, %rd1, %rd10;",
        f"st.global.u{8 * size} [%rd10], {stored};",
    ]
    dtype = np.dtype(np.uint32) if result == "pred" else DTYPES[result]
    out = np.zeros(threads, dtype)
    text = kernel_text("\n".join(lines), parameters=1 + len(operands), threads=threads)
    launch(text, (1, 1, 1), [out, *padded])
    return out[:count]
