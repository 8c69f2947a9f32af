"""Adding 64 bits in shared memory by halves: the instructions themselves, run by the CPU."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import llvmlite.binding as llvm
import numpy as np
import pytest
from llvmlite import ir

from kernels.cuda.instructions import atomics
from kernels.cuda.instructions.emit import I64


@pytest.fixture(scope="module")
def add():
    """A function (address, value) of the instructions that the intrinsic writes."""
    module = ir.Module()
    function = ir.Function(
        module, ir.FunctionType(ir.VoidType(), [I64.as_pointer(), I64]), "add_halves"
    )
    builder = ir.IRBuilder(function.append_basic_block())
    place, value = function.args
    atomics._add_halves(
        SimpleNamespace(
            builder=builder,
            arguments=[place, None, value],
            element=lambda array, _: {0: place}[array],
            nothing=lambda: None,
        )
    )
    builder.ret_void()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(str(module)), machine)
    engine.finalize_object()
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
    yield kind(engine.get_function_address("add_halves"))
    del engine


def test_any_sum_is_that_of_64_bits(add):
    rng = np.random.default_rng(0)
    edges = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**62 - 1, -1, -(2**32), -(2**63)]
    numbers = np.array([*edges, *rng.integers(-(2**62), 2**62, 100)])
    total = np.zeros(1, np.int64)

    for number in [*numbers, *rng.permutation(numbers)]:
        expected = total + number
        add(total.ctypes.data, int(number))
        assert total == expected
