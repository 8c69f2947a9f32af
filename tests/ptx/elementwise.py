"""Instructions whose result in a lane depends on that lane alone, as steps."""

from __future__ import annotations

import numpy as np

from tests.ptx.faults import Undefined, Unsupported
from tests.ptx.floats import float_forms
from tests.ptx.integers import Form, integer_forms, lop3
from tests.ptx.lanes import Crowd, Mask, Step
from tests.ptx.program import SIZES, Constant, Group, Instruction, Operand, Pair, Symbol

FORMS: dict[str, Form] = dict([*integer_forms(), *float_forms()])

_SHIFTS = {"shl": np.left_shift, "shr": np.right_shift}
_HALF = {"b64": "b32", "b32": "b16"}


def make_elementwise(one: Instruction, crowd: Crowd) -> Step | None:
    """Return an instruction as a step; None if it is none of these."""
    if one.opcode.startswith("mov."):
        move = _make_special_move(one, crowd)
        if move is not None:
            return move
    if one.opcode == "lop3.b32":
        *operands, table = one.operands
        if not isinstance(table, Constant):
            raise Unsupported(str(one))
        lookup = Form("b32", ("b32",) * 3, lop3(table.value))
        return _apply(one, crowd, lookup, operands[1:])
    form = FORMS.get(one.opcode)
    if form is None:
        return None
    operands = list(one.operands[1:])
    if len(operands) != len(form.operands):
        raise Unsupported(str(one))
    name = one.opcode.split(".")[0]
    if name in _SHIFTS:
        amount = operands[1]
        if isinstance(amount, Constant) and 0 <= amount.value < 8 * SIZES[form.result]:
            form = Form(form.result, (form.result, form.result), _SHIFTS[name])
    step = _apply(one, crowd, form, operands)
    if name in ("div", "rem") and form.result[0] in "su":
        return _refuse_zero(one, crowd, form, step)
    return step


def _apply(one: Instruction, crowd: Crowd, form: Form, operands: list[Operand]) -> Step:
    registers = crowd.registers
    sources = [
        registers.read(operand, kind, one)
        for operand, kind in zip(operands, form.operands, strict=True)
    ]
    if isinstance(one.operands[0], Pair):
        raise Unsupported(str(one))
    target, function = registers.write(one.operands[0], form.result, one), form.function
    is_direct = isinstance(function, np.ufunc) and target.dtype == np.result_type(
        *(source.dtype for source in sources)
    )
    if is_direct:

        def step(mask: Mask) -> None:
            function(*sources, out=target, where=mask)

    else:

        def step(mask: Mask) -> None:
            np.copyto(target, function(*sources), where=mask)

    return step


def _refuse_zero(one: Instruction, crowd: Crowd, form: Form, step: Step) -> Step:
    divisor = crowd.registers.read(one.operands[2], form.operands[1], one)

    def checked(mask: Mask) -> None:
        if ((divisor == 0) & mask).any():
            raise Undefined(f"{one}: a division by zero")
        step(mask)

    return checked


def _make_special_move(one: Instruction, crowd: Crowd) -> Step | None:
    """Moves of addresses and special registers, and of halves: {low, high}."""
    kind = one.opcode.removeprefix("mov.")
    if len(one.operands) != 2:
        raise Unsupported(str(one))
    target, source = one.operands
    if isinstance(source, Symbol):
        values = crowd.specials.get(source.name)
        if values is None and source.name in crowd.addresses:
            values = crowd.registers.constant(crowd.addresses[source.name], kind)
        if values is None:
            raise Unsupported(str(one))
        place = crowd.registers.write(target, kind, one)
        return lambda mask: np.copyto(place, values, where=mask)
    half = _HALF.get(kind, "")
    if isinstance(source, Group) and half and len(source.items) == 2:
        low, high = (crowd.registers.read(item, half, one) for item in source.items)
        place, bits = crowd.registers.write(target, kind, one), 8 * SIZES[half]

        def join(mask: Mask) -> None:
            whole = high.astype(place.dtype) << place.dtype.type(bits) | low
            np.copyto(place, whole, where=mask)

        return join
    if isinstance(target, Group) and half and len(target.items) == 2:
        whole = crowd.registers.read(source, kind, one)
        places = [crowd.registers.write(item, half, one) for item in target.items]

        def split(mask: Mask) -> None:
            parts = np.ascontiguousarray(whole).view(places[0].dtype).reshape(-1, 2)
            for i, place in enumerate(places):
                np.copyto(place, parts[:, i], where=mask)

        return split
    if isinstance(source, Group) or isinstance(target, Group):
        raise Unsupported(str(one))
    return None
