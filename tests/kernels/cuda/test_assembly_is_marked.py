"""What the compiler must not move is marked: it does not know what a line of assembly does."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from numba import cuda, float32, uint16, uint32

from kernels.cuda import build
from kernels.cuda.instructions.across_blocks import LOAD_FRESH_WORDS, fence, take_ticket
from kernels.cuda.instructions.async_copies import (
    commit_copies,
    copy_async,
    copy_word_async,
    wait_for_copies,
    wait_for_copies_but_one,
)
from kernels.cuda.instructions.emit import Emitter
from kernels.cuda.instructions.tiles import (
    load_tiles,
    load_transposed_tiles,
    multiply_bfloat16_tiles,
    multiply_float16_tiles,
    transpose_tile,
)
from kernels.cuda.variant import Expectation


@dataclass(frozen=True)
class Everything:
    """A kernel with every instruction that touches memory or other lanes by assembly."""

    name: str = "everything"
    threads: int = 32
    arguments: tuple[str, ...] = ("uint32*", "uint16*")
    expectation: Expectation = Expectation(registers=255)  # noqa: RUF009 - it is frozen

    def kernel(self):
        load_fresh = LOAD_FRESH_WORDS[4]

        def everything(out, source):
            tile = cuda.shared.array(512, uint16, alignment=16)
            words = cuda.local.array((2, 4), uint32)
            sums = cuda.local.array((1, 4), float32)
            copy_async(tile, 8 * cuda.threadIdx.x, source, 8 * cuda.threadIdx.x, True)
            copy_word_async(tile, 256 + 2 * cuda.threadIdx.x, source, 2 * cuda.threadIdx.x, True)
            commit_copies()
            wait_for_copies_but_one()
            wait_for_copies()
            cuda.syncthreads()
            load_tiles(words, 0, tile, 8 * cuda.threadIdx.x)
            load_transposed_tiles(words, 1, tile, 8 * cuda.threadIdx.x)
            for i in range(4):
                sums[0, i] = float32(0)
            a = (words[0, 0], words[0, 1], words[0, 2], words[0, 3])
            multiply_bfloat16_tiles(sums, 0, a, (words[1, 0], words[1, 1]))
            multiply_float16_tiles(sums, 0, a, (words[1, 2], words[1, 3]))
            out[cuda.threadIdx.x] = transpose_tile(uint32(sums[0, 0]))
            fence()
            out[32] = take_ticket(out, 33, 1)
            load_fresh(words, 0, out, 0)
            out[34] = words[0, 0]

        return everything


@pytest.fixture
def lines(monkeypatch):
    """(text, constraints, marks) of each line of assembly that is written."""
    written = []
    assembly = Emitter.assembly

    def recording(self, text, constraints, result, operands, **marks):
        value = assembly(self, text, constraints, result, operands, **marks)
        written.append((text, constraints, marks, value))
        return value

    monkeypatch.setattr(Emitter, "assembly", recording)
    return written


def test_assembly_that_touches_memory_or_other_lanes_is_marked(lines):
    ptx = build.compile_ptx(Everything())

    of_warp = [value for text, _, marks, value in lines if marks.get("of_warp")]
    in_memory = [
        text for text, *_ in lines if "[" in text or text.startswith(("cp.async", "fence"))
    ]
    assert len({text for text, *_ in lines if ".sync." in text}) == len(of_warp) == 5
    assert all("convergent" in str(value) for value in of_warp)
    assert len(in_memory) == 10
    for text, constraints, marks, _ in lines:
        assert bool(marks.get("of_warp")) == (".sync." in text)
        assert bool(marks.get("has_effects")) == ("~{memory}" in constraints) == (text in in_memory)
    for mnemonic in ("mma.sync", "ldmatrix.sync", "movmatrix.sync", "cp.async.wait_group"):
        assert mnemonic in ptx
