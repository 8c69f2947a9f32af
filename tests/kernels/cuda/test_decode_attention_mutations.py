"""Proof that the simulated tests notice: the kernel is broken in one place after another."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

from bench.gpu.decode_case import draw_case
from kernels.cuda import attention_decode as decode
from tests.kernels.cuda.decode_simulation import TOLERANCES, simulate
from tests.simt import Fault, OutOfBounds, Race

SOURCE = inspect.getsource(decode.make_attention_decode)
BARRIERS = [i for i, line in enumerate(SOURCE.splitlines()) if "cuda.syncthreads()" in line]

# A group that two warps share unevenly, four splits, and rows that end inside a block.
VARIANT = decode.DecodeVariant("float32", 64, 5, 16)
LENGTHS = (37, 16)


def kernel_from(source: str) -> Callable[..., None]:
    """Return the kernel that `make_attention_decode` with another source makes."""
    names = dict(vars(decode))
    exec(compile(source, inspect.getfile(decode), "exec"), names)
    return names["make_attention_decode"](VARIANT)


def replaced(old: str, new: str) -> Callable[..., None]:
    """Return the kernel with one piece of its source replaced."""
    assert SOURCE.count(old) == 1, f"{old!r} is {SOURCE.count(old)} times in the source"
    return kernel_from(SOURCE.replace(old, new))


def test_the_unbroken_source_passes():
    case = draw_case(VARIANT, LENGTHS)

    assert case.error(simulate(case, kernel=kernel_from(SOURCE))) <= TOLERANCES["float32"]


def test_there_is_a_barrier_to_delete():
    assert BARRIERS


@pytest.mark.parametrize("barrier", BARRIERS)
def test_a_deleted_barrier_is_a_race_in_every_order_of_threads(barrier):
    lines = SOURCE.splitlines()
    lines[barrier] = lines[barrier].replace("cuda.syncthreads()", "pass")
    kernel = kernel_from("\n".join(lines))

    for seed in range(3):
        with pytest.raises(Race, match="shared memory"):
            simulate(draw_case(VARIANT, LENGTHS), kernel=kernel, seed=seed)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("min(part * heads + h, group - 1)\n            if", "part * heads + h\n            if"),
        ("base = block * block_stride", "base = block * (2 * block_stride)"),
        ("table_width + block_index]", "table_width + block_index + 1]"),
    ],
    ids=["head past the group", "block past the pool", "entry past the row's blocks"],
)
def test_an_index_outside_an_array_is_out_of_bounds(old, new):
    with pytest.raises(OutOfBounds):
        simulate(draw_case(VARIANT, LENGTHS), kernel=replaced(old, new))


def test_a_shuffle_that_some_lanes_skip_is_a_fault():
    guarded = "if lane > 0: dot += cuda.shfl_xor_sync("
    kernel = replaced("dot += cuda.shfl_xor_sync(", guarded)

    with pytest.raises(Fault):
        simulate(draw_case(VARIANT, LENGTHS), kernel=kernel)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("token = min(first_token + t, num_tokens - 1)", "token = first_token + t"),
        ("scores[t] = dot if is_valid else MINUS_INFINITY", "scores[t] = dot"),
        ("num_blocks, splits)", "num_blocks, 2 * splits)"),
        ("mass[h] *= shrink\n", "mass[h] *= float32(1)\n"),
        ("total[h, i] *= shrink", "total[h, i] *= float32(1)"),
        ("numerator += share * split_total", "numerator += split_total"),
        ("key_offset + element", "value_offset + element"),
        ("16 >> step", "8 >> step"),
    ],
    ids=lambda text: text.strip()[:24],
)
def test_broken_arithmetic_gives_a_wrong_answer(old, new):
    case = draw_case(VARIANT, (70, 16), num_kv_heads=1)  # five blocks: split 0 takes two

    error = case.error(simulate(case, kernel=replaced(old, new)))

    assert error > 100 * TOLERANCES["float32"]
