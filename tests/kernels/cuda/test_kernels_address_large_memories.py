"""Elements behind the first 2³¹ are found: blocks, queries and logits lie that far apart."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bench.gpu.case import Case
from bench.gpu.cases import (
    attention_decode,
    attention_prefill,
    dense_matmul,
    draw_cases,
    logits,
    quantized_matmul,
    sampling,
)
from kernels.cuda.attention_decode import DecodeVariant
from kernels.cuda.attention_prefill import PrefillVariant
from kernels.cuda.attention_wide import WideDecodeVariant, WidePrefillVariant
from kernels.cuda.copy_blocks import CopyBlocksVariant
from kernels.cuda.dense_matmul import DenseMatmulVariant
from kernels.cuda.logprobs import LogprobsVariant
from kernels.cuda.quantized_formats import PANEL_ROWS
from kernels.cuda.quantized_matmul import QuantizedMatmulVariant
from kernels.cuda.quantized_rows import QuantizedRowsVariant
from kernels.cuda.rope_write_kv import RopeWriteKvVariant
from kernels.cuda.sampling import SamplingVariant
from tests.kernels.cuda.compiled import run_compiled
from tests.kernels.cuda.simulation import simulate
from tests.simt.memory import Spread

FAR = 2**32 + 2**12  # neither 32 bits with a sign nor without hold a multiple of it
LARGEST_BLOCK = 2**31 - 2**12  # its stride is 32 bits with a sign, where the third begins is not

# Where the scalars stand among the arguments, from the end.
BLOCK_STRIDE, QUERY_STRIDE = -6, -8
WRITTEN_BLOCK_STRIDE = -9  # of `rope_write_kv`


def spread(case: Case, name: str, argument: int, far: int = FAR) -> Case:
    """Return the case with the rows of an array `far` apart, and the argument that says so."""
    array = case.arrays[name]
    pieces = Spread(array, tuple(far * i for i in range(len(array))))
    first, *others = case.launches
    arguments = list(first.arguments)
    arguments[argument] = far
    launches = (dataclasses.replace(first, arguments=tuple(arguments)), *others)
    return dataclasses.replace(case, arrays={**case.arrays, name: pieces}, launches=launches)


@pytest.fixture(
    params=[simulate, pytest.param(run_compiled, marks=pytest.mark.slow)],
    ids=["source", "compiled"],
)
def run(request):
    return request.param


def faults(case: Case, run) -> list[str]:
    outputs = run(case)
    return case.faults(
        {name: x.values if isinstance(x, Spread) else x for name, x in outputs.items()}
    )


def spread_pool_and_query(case: Case) -> Case:
    case = spread(spread(case, "pool", BLOCK_STRIDE, LARGEST_BLOCK), "query", QUERY_STRIDE)
    assert case.arrays["block_tables"].max() > 2
    return case


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("bfloat16", None), ("bfloat16", "int8"), ("float32", None)]
)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kind", [DecodeVariant, PrefillVariant])
def test_attention_finds_blocks_and_queries(kind, window, dtype, kv_dtype, run):
    variant = kind(dtype, 64, 2, 16, kv_dtype, window is not None)
    if kind is DecodeVariant:
        case = attention_decode.draw_case(variant, (18, 3), num_kv_heads=1, window=window)
    else:
        rows = ((2, 18), (1, 3))
        case = attention_prefill.draw_case(variant, rows, num_kv_heads=1, window=window)

    assert faults(spread_pool_and_query(case), run) == []


@pytest.mark.wide
def test_decode_attention_whose_places_are_of_32_bits_finds_them_too(run):
    variant = DecodeVariant("bfloat16", 256, 4, 16, None, True)
    case = attention_decode.draw_case(variant, (18, 3), num_kv_heads=1, splits=2, window=5)

    assert faults(spread_pool_and_query(case), run) == []


@pytest.mark.spread(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", [WideDecodeVariant, WidePrefillVariant])
def test_attention_with_heads_of_512_finds_them_too(kind, dtype, run):
    variant = kind(dtype, 512, 2, 16)
    if kind is WideDecodeVariant:
        case = attention_decode.draw_case(variant, (18, 3), num_kv_heads=1)
    else:
        case = attention_prefill.draw_case(variant, ((2, 18), (1, 3)), num_kv_heads=1)

    assert faults(spread_pool_and_query(case), run) == []


@pytest.mark.parametrize("kv_dtype", [None, "float8"])
def test_keys_and_values_are_written_to_their_blocks(kv_dtype, run):
    (case,) = draw_cases(RopeWriteKvVariant("bfloat16", 64, 16, kv_dtype))

    assert faults(spread(case, "pool", WRITTEN_BLOCK_STRIDE), run) == []


def test_blocks_are_copied_to_and_from_far_places(run):
    (case,) = draw_cases(CopyBlocksVariant())
    pairs, words = case.arrays["pairs"], case.arrays["source"].shape[1]
    far = 2**31 // words + 1  # blocks
    pools = {
        name: Spread(array, tuple((far + i) * words for i in range(len(array))))
        for name, array in case.arrays.items()
        if name != "pairs"
    }
    moved = np.where(pairs < 0, pairs, pairs + far).astype(np.int32)

    assert faults(dataclasses.replace(case, arrays={**pools, "pairs": moved}), run) == []


@pytest.mark.parametrize("weights", ["Q4_Z_G64", "Q8_0", "FP8"])
def test_rows_of_far_panels_are_unpacked(weights, run):
    case = draw_cases(QuantizedRowsVariant(weights, "float16"))[1]
    panels = case.arrays["packed"].reshape(2, -1)
    far = FAR // panels.shape[1]
    packed = Spread(panels, tuple((far + i) * panels.shape[1] for i in range(2)))
    rows = case.arrays["rows"] + np.int32(far * PANEL_ROWS)

    case = dataclasses.replace(case, arrays={**case.arrays, "packed": packed, "rows": rows})

    assert faults(case, run) == []


def test_products_are_written_to_rows_far_apart(run):
    case = quantized_matmul.draw_case(
        QuantizedMatmulVariant("Q8_0", "bfloat16", 8), 2, 20, 1, 3, alone=0
    )

    assert faults(spread(case, "out", -2), run) == []


def test_gates_and_their_values_lie_far_apart_and_so_do_rows_they_are_written_to(run):
    variant = DenseMatmulVariant("bfloat16", 8, "gated", normalises=True)
    case = dense_matmul.draw_case(variant, 2, variant.panel_outputs, 3, 3, alone=0)
    gates_and_values = case.arrays["weights"].reshape(2, -1)
    (one,) = case.launches
    num_inputs = one.arguments[6]
    far = FAR // num_inputs + 1  # outputs, of which the one block of the launch has the first few
    weights = Spread(gates_and_values, (0, far * num_inputs))
    arguments = (*one.arguments[:5], far, *one.arguments[6:])
    launches = (dataclasses.replace(one, arguments=arguments),)
    case = dataclasses.replace(case, arrays={**case.arrays, "weights": weights}, launches=launches)

    assert faults(spread(case, "out", -3), run) == []


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "case",
    [
        sampling.draw_case(SamplingVariant(threads=64), 45, [(2, 0), (4, 2), (0, 5)]),
        logits.draw_logprobs_case(LogprobsVariant(threads=64), 45),
    ],
    ids=lambda case: case.name,
)
def test_logits_are_read_from_their_rows(case, run):
    rows = case.arrays["logits"]
    pieces = Spread(rows, tuple(FAR * i for i in range(len(rows))))
    stride = rows.shape[1]  # a number that no other argument is
    launches = tuple(
        dataclasses.replace(one, arguments=tuple(FAR if a == stride else a for a in one.arguments))
        for one in case.launches
    )
    assert all(FAR in one.arguments for one in launches)
    case = dataclasses.replace(
        case, arrays={**case.arrays, "logits": pieces}, launches=launches, part=None
    )

    assert faults(case, run) == []
