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
    latent_attention,
    latent_write,
    logits,
    quantized_matmul,
    sampling,
)
from kernels.cuda.adjust_logits import AdjustLogitsVariant
from kernels.cuda.attention_decode import DecodeVariant
from kernels.cuda.attention_prefill import PrefillVariant
from kernels.cuda.attention_wide import WideDecodeVariant, WidePrefillVariant
from kernels.cuda.copy_blocks import CopyBlocksVariant
from kernels.cuda.dense_matmul import DenseMatmulVariant
from kernels.cuda.embedding import EmbeddingVariant
from kernels.cuda.latent_attention import LatentDecodeVariant, LatentPrefillVariant
from kernels.cuda.latent_write import LatentWriteVariant
from kernels.cuda.logprobs import LogprobsVariant
from kernels.cuda.quantized_formats import PANEL_ROWS
from kernels.cuda.quantized_matmul import QuantizedMatmulVariant
from kernels.cuda.quantized_rows import QuantizedRowsVariant
from kernels.cuda.rope_write_kv import RopeWriteKvVariant
from kernels.cuda.sampling import SamplingVariant
from tests.kernels.cuda.far_memory import (
    FAR,
    LARGEST_BLOCK,
    RUNS,
    faults,
    moved,
    placed,
    spread,
    with_argument,
)
from tests.simt.memory import Spread

pytestmark = RUNS


def spread_pool_and_query(case: Case) -> Case:
    case = spread(spread(case, "pool", "block_stride", LARGEST_BLOCK), "query", "query_stride")
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


@pytest.mark.spread(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", [LatentDecodeVariant, LatentPrefillVariant])
def test_attention_over_latents_finds_them_too(kind, dtype, run):
    variant = kind(dtype, 4, 256, 32, 16)
    if kind is LatentDecodeVariant:
        case = latent_attention.draw_decode(variant, (18, 3))
    else:
        case = latent_attention.draw_prefill(variant, ((2, 18), (1, 3)))
    assert case.arrays["block_tables"].max() > 2
    case = spread(spread(case, "pool", "block_stride", LARGEST_BLOCK), "queries", "query_stride")

    assert faults(case, run) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_latents_are_written_to_their_blocks(dtype, run):
    (case, *_) = latent_write.draw_cases(LatentWriteVariant(dtype, 256, 32, 16))

    assert faults(spread(case, "pool", "block_stride"), run) == []


@pytest.mark.parametrize("kv_dtype", [None, "float8"])
def test_keys_and_values_are_written_to_their_blocks(kv_dtype, run):
    (case,) = draw_cases(RopeWriteKvVariant("bfloat16", 64, 16, kv_dtype))

    assert faults(spread(case, "pool", "block_stride"), run) == []


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


def test_rows_of_a_far_part_of_an_embedding_are_copied(run):
    (case, *_) = draw_cases(EmbeddingVariant("bfloat16"))
    far = FAR // case.arrays["table"].shape[1] + 1  # tokens
    ids = case.arrays["token_ids"] + np.int32(far)
    case = dataclasses.replace(case, arrays={**case.arrays, "token_ids": ids})

    assert faults(moved(case, "table", far), run) == []


@pytest.mark.parametrize("weights", ["Q4_Z_G64", "Q8_0", "FP8", "Q5_K", "Q6_K"])
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

    assert faults(spread(case, "out", "out_width"), run) == []


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

    assert faults(spread(case, "out", "out_width"), run) == []


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


def test_logits_of_the_largest_vocabulary_there_can_be_are_adjusted(run):
    vocab = 2**31 - 1
    case = logits.draw_adjust_case(AdjustLogitsVariant(threads=64), 45)
    starts = [vocab * row for row in range(len(case.arrays["adjusted"]))]
    case = placed(placed(case, "adjusted", starts), "counts", starts)

    assert faults(with_argument(case, "vocab", vocab), run) == []
