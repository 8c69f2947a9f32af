"""Sums of products of bytes, four to a 32-bit lane: what each instruction set has for it.

    vectors of a tile      64 weights: 16 columns × 4 k's       (`kernels.cpu.int8_packing`)
    a row's next 4 k's     4 int8, the same in every lane
    lane c of the sum      += w[c, 0] · x[0] + w[c, 1] · x[1] + w[c, 2] · x[2] + w[c, 3] · x[3]

All sums are exact, so every instruction set gives the same integers. Weights are nibbles (0 to 15),
nibbles with one or two bits more (to 31 or 63), what nibbles stand for (to 28, or −127 to 113), or
int8 (−128 to 127), x is in −127 to 127, and a sum runs over one group of 32 k's at most.

    512 bits, VNNI   VPDPBUSD, unsigned · signed: signed weights get 128 added, in their table where
                     they are looked up, and the sum begins at −128 · Σ x (`weight_offset`)
    256 bits, VNNI   the same, on halves
    AVX2             VPMADDUBSW adds pairs of products into 16 bits. As many steps are added up
                     there as cannot pass 32767 before they are widened: of nibbles all 8, at most
                     8 · 2 · 15 · 127 = 30480, of five bits 4, of six 2. Signed: |w| · (x with the
                     sign of w), at most 2 · 128 · 127 = 32512, widened at every step
    NEON             SDOT, signed · signed
    generic          even and odd bytes as 16-bit lanes, multiplied and added as such
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from kernels.cpu.byte_tables import in_parts
from kernels.cpu.instruction_set import InstructionSet
from kernels.cpu.int8_packing import Int8Format
from kernels.cpu.vector_ir import (
    BYTES,
    I8,
    I16,
    I32,
    I32X,
    LANES,
    Builder,
    Value,
    call,
    constant,
)

I16_PAIRS = ir.VectorType(I16, 2 * LANES)
MOST_16_BITS = 2**15 - 1
MOST_INPUT = 127

Bias = Callable[[], Value]


@dataclass(frozen=True, slots=True)
class IntegerDot:
    """How a group's sums are formed; the steps of one set of instructions.

    `weight_offset`: what `prepare` adds to the weights, or whoever looks them up has added already;
    the caller takes weight_offset · Σ x off again, in the bias. prepare(builder, weights) → weights
    for `step`, once for all rows.
    start(bias) → sums of no products. step(builder, sums, weights, x) → sums with those of one
    vector; x: BYTES. finish(builder, sums, bias) → int32 lanes, bias included. `bias` returns it,
    emitted where it is first asked for.
    """

    weight_offset: int
    prepare: Callable[[Builder, Value], Any]
    start: Callable[[Bias], Any]
    step: Callable[[Builder, Any, Any, Value], Any]
    finish: Callable[[Builder, Any, Bias], Value]


@dataclass(frozen=True, slots=True)
class PartlyWidened:
    """Sums of which `pairs`, of so many steps, are still in 16 bits. None: there are none."""

    wide: Value | None = None
    pairs: Value | None = None
    steps: int = 0


def integer_dot(chosen: InstructionSet, fmt: Int8Format) -> IntegerDot:
    """Return the best way a set of instructions has for the weights of a format."""
    if chosen.vector_bits == 512 or chosen.name == "avx2_vnni":
        step = _vpdpbusd_512 if chosen.vector_bits == 512 else _vpdpbusd_256
        if not fmt.is_signed:
            return IntegerDot(0, _as_it_is, _from_bias, step, _is_done)
        prepare = _add_128 if fmt.codes is None else _as_it_is
        return IntegerDot(128, prepare, _from_bias, step, _is_done)
    if chosen.name == "avx2":
        if fmt.is_signed:
            return IntegerDot(0, _with_magnitude, _from_nothing, _signed_maddubs, _widened)
        most_steps = MOST_16_BITS // (2 * (2**fmt.bits - 1) * MOST_INPUT)
        step = functools.partial(_maddubs, most_steps)
        return IntegerDot(0, _as_it_is, _from_nothing, step, _widened)
    step = _sdot if chosen.name == "neon" else _by_halves
    return IntegerDot(0, _as_it_is, _from_bias, step, _is_done)


def _as_it_is(_: Builder, weights: Value) -> Value:
    return weights


def _add_128(builder: Builder, weights: Value) -> Value:
    return builder.xor(weights, constant(BYTES, 0x80))


def _with_magnitude(builder: Builder, weights: Value) -> tuple[Value, Value]:
    """Return |weights| as unsigned bytes, and the weights for their signs."""
    no_poison = ir.Constant(ir.IntType(1), 0)
    return call(builder, "llvm.abs.v64i8", BYTES, [weights, no_poison]), weights


def _from_bias(bias: Bias) -> Value:
    return bias()


def _from_nothing(_: Bias) -> PartlyWidened:
    return PartlyWidened()


def _is_done(_: Builder, sums: Value, __: Bias) -> Value:
    return sums


def _vpdpbusd_512(builder: Builder, sums: Value, weights: Value, x: Value) -> Value:
    return call(builder, "llvm.x86.avx512.vpdpbusd.512", I32X, [sums, weights, x])


def _vpdpbusd_256(builder: Builder, sums: Value, weights: Value, x: Value) -> Value:
    return in_parts(builder, "llvm.x86.avx512.vpdpbusd.256", 2, I32, [sums, weights, x])


def _maddubs(
    most_steps: int, builder: Builder, sums: PartlyWidened, weights: Value, x: Value
) -> PartlyWidened:
    pairs = in_parts(builder, "llvm.x86.avx2.pmadd.ub.sw", 2, I16, [weights, x])
    if sums.pairs is not None:
        pairs = builder.add(sums.pairs, pairs)
    added = PartlyWidened(sums.wide, pairs, sums.steps + 1)
    return added if added.steps < most_steps else _widen(builder, added)


def _signed_maddubs(
    builder: Builder, sums: PartlyWidened, weights: tuple[Value, Value], x: Value
) -> PartlyWidened:
    magnitude, signs = weights
    turned = in_parts(builder, "llvm.x86.avx2.psign.b", 2, I8, [x, signs])
    return _maddubs(1, builder, sums, magnitude, turned)


def _widen(builder: Builder, sums: PartlyWidened) -> PartlyWidened:
    """Return the same sums, none of them in 16 bits."""
    if sums.pairs is None:
        return sums
    operands = [sums.pairs, constant(I16_PAIRS, 1)]
    wide = in_parts(builder, "llvm.x86.avx2.pmadd.wd", 2, I32, operands)
    return PartlyWidened(wide if sums.wide is None else builder.add(sums.wide, wide))


def _widened(builder: Builder, sums: PartlyWidened, bias: Bias) -> Value:
    return builder.add(_widen(builder, sums).wide, bias())


def _sdot(builder: Builder, sums: Value, weights: Value, x: Value) -> Value:
    return in_parts(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", 4, I32, [sums, weights, x])


def _by_halves(builder: Builder, sums: Value, weights: Value, x: Value) -> Value:
    """Multiply the even and the odd bytes as 16-bit lanes; a pair's sum is at most 32512."""
    pairs: Value = constant(I16_PAIRS, 0)
    for is_odd in (False, True):
        product = builder.mul(*(_odd_or_even(builder, v, 8, is_odd=is_odd) for v in (weights, x)))
        pairs = builder.add(pairs, product)
    for is_odd in (False, True):
        sums = builder.add(sums, _odd_or_even(builder, pairs, 16, is_odd=is_odd))
    return sums


def _odd_or_even(builder: Builder, vector: Value, bits: int, *, is_odd: bool) -> Value:
    """Return every second lane of so many bits, widened with its sign."""
    kind = {8: I16_PAIRS, 16: I32X}[bits]
    lanes = builder.bitcast(vector, kind)
    if not is_odd:
        lanes = builder.shl(lanes, constant(kind, bits))
    return builder.ashr(lanes, constant(kind, bits))
