"""How an instruction of ours is typed in Python and written as LLVM IR.

Each becomes a Numba intrinsic: typed when Numba meets the call, emitted in its place. PTX without a
spelling in LLVM is inline assembly; its constraint string gives the results first (`=f`), then the
operands: `f` a float32 register, `r` one of 32 bits, `l` of 64, `h` of 16.

What the compiler may do with a line of assembly is said by two marks. It moves, merges and drops
what has neither. `has_effects` is for what touches memory: it happens as often as it is written,
and with `~{memory}` among the constraints in its place among other accesses. `of_warp` is for what
all lanes of a warp do together: it is never moved to where fewer of them come by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

# Numba and llvmlite are untyped.
NumbaType: TypeAlias = Any
Value: TypeAlias = Any
Intrinsic: TypeAlias = Any

I16, I32, I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
F16, F32 = ir.HalfType(), ir.FloatType()
SHARED_SPACE = 3  # LLVM's number of the address space


class Emitter:
    """What writes one call: the builder, and the arguments with their Numba types."""

    def __init__(
        self,
        context: Value,
        builder: Value,
        types_: Sequence[NumbaType],
        arguments: Sequence[Value],
    ) -> None:
        self.builder = builder
        self.arguments = arguments
        self._context = context
        self._types = types_

    def integer(self, position: int) -> Value:
        """Return an argument as a 64-bit integer."""
        return self._context.cast(
            self.builder, self.arguments[position], self._types[position], types.int64
        )

    def items(self, position: int) -> list[Value]:
        """Return the items of an argument that is a tuple."""
        count = len(self._types[position])
        return [self.builder.extract_value(self.arguments[position], i) for i in range(count)]

    def element(self, array: int, index: int) -> Value:
        """Return the address of element `index` of a pointer or array, both by position."""
        return self.builder.gep(self._first(array), [self.integer(index)])

    def row(self, array: int, index: int, length: int) -> list[Value]:
        """Return the addresses of the elements of a row of an array [n, length]."""
        first = self.builder.mul(self.integer(index), ir.Constant(I64, length))
        return [
            self.builder.gep(self._first(array), [self.builder.add(first, ir.Constant(I64, i))])
            for i in range(length)
        ]

    def shared_address(self, array: int, index: int) -> Value:
        """Return the 32-bit address of an element of a shared array, as PTX wants it."""
        generic = self.element(array, index)
        pointer = ir.PointerType(generic.type.pointee, SHARED_SPACE)
        return self.builder.ptrtoint(self.builder.addrspacecast(generic, pointer), I32)

    def global_address(self, array: int, index: int) -> Value:
        """Return the 64-bit address of an element of global memory."""
        return self.builder.ptrtoint(self.element(array, index), I64)

    def assembly(
        self,
        text: str,
        constraints: str,
        result: ir.Type,
        operands: Sequence[Value],
        *,
        has_effects: bool = False,
        of_warp: bool = False,
    ) -> Value:
        """Write one line of PTX."""
        function = ir.FunctionType(result, [operand.type for operand in operands])
        assembly = ir.InlineAsm(function, text, constraints, side_effect=has_effects)
        return self.builder.call(assembly, operands, attrs=("convergent",) if of_warp else ())

    def nothing(self) -> Value:
        """Return the value of an instruction that gives none."""
        return self._context.get_dummy_value()

    def _first(self, array: int) -> Value:
        kind, value = self._types[array], self.arguments[array]
        if isinstance(kind, types.CPointer):
            return value
        return self._context.make_array(kind)(self._context, self.builder, value=value).data


def instruction(
    result: NumbaType, parameters: Sequence[NumbaType | None], emit: Callable[[Emitter], Value]
) -> Intrinsic:
    """Make the intrinsic that `emit` writes.

    Arguments are converted to the types of `parameters`; where that is None they stay what they
    are (pointers, arrays, tuples, and integers that `emit` widens itself). `result` is the type of
    what it gives, `types.void` for nothing.
    """

    def typed(*arguments: NumbaType) -> NumbaType:
        def codegen(context: Value, builder: Value, signature: Value, values: list[Value]) -> Value:
            return emit(Emitter(context, builder, signature.args, values))

        taken = [
            given if own is None else own for own, given in zip(parameters, arguments, strict=True)
        ]
        return result(*taken), codegen

    return intrinsic(_FORMS[len(parameters)](typed))


# Numba reads an intrinsic's parameters from its Python signature, and the first is its own.
_FORMS: dict[int, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    0: lambda f: lambda typingctx: f(),  # noqa: ARG005
    1: lambda f: lambda typingctx, a: f(a),  # noqa: ARG005
    2: lambda f: lambda typingctx, a, b: f(a, b),  # noqa: ARG005
    3: lambda f: lambda typingctx, a, b, c: f(a, b, c),  # noqa: ARG005
    4: lambda f: lambda typingctx, a, b, c, d: f(a, b, c, d),  # noqa: ARG005
    5: lambda f: lambda typingctx, a, b, c, d, e: f(a, b, c, d, e),  # noqa: ARG005
}
