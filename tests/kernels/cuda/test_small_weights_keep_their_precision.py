"""Many tokens of little weight beside one of much, as behind an attention sink, are not lost.

The first token takes nearly all of the weight and its value is zero: the answer is what the others
leave, each 2⁻¹⁴ of the weight times small values. In a pool of eight bits their scale is multiplied
to the weight, and the product is far below what a float16 can hold.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bench.gpu.case import to_float64, to_stored
from bench.gpu.cases import attention_decode, attention_prefill
from bench.gpu.cases.block_pool import LAYER, draw_pool, to_pool
from kernels.cuda.attention_decode import DecodeVariant
from kernels.cuda.attention_prefill import PrefillVariant
from tests.kernels.cuda.simulation import simulate

NUM_TOKENS, HEAD_SIZE, BLOCK_SIZE = 40, 64, 16
BITS_BELOW = 14  # of the other tokens' weights
VALUE = 0.02


def case_of(variant):
    rng = np.random.default_rng(0)
    pool = draw_pool(
        rng, variant.dtype, (NUM_TOKENS,),
        num_kv_heads=1, block_size=BLOCK_SIZE, head_size=HEAD_SIZE, kv_dtype=variant.kv_dtype,
    )  # fmt: skip
    values = pool.exact
    blocks = pool.tables[0, :-1]
    values[blocks, LAYER, 0] = 0
    values[blocks, LAYER, 1] = VALUE * rng.choice([-1.0, -0.5, 1.0], (HEAD_SIZE,))
    sink = blocks[0], LAYER, slice(None), 0, 0
    # Of a query of ones, score · log2(e) = √D · key · log2(e).
    values[sink] = [[BITS_BELOW / np.sqrt(HEAD_SIZE) / np.log2(np.e)], [0.0]]
    pool = dataclasses.replace(pool, pool=to_pool(pool.dtype, pool.kv_dtype, values))
    query = to_stored(variant.dtype, np.ones((1, variant.group + 1, HEAD_SIZE)))
    if isinstance(variant, DecodeVariant):
        return attention_decode.make_case(variant, query, pool)
    return attention_prefill.make_case(variant, query, np.array([1], np.int32), pool)


@pytest.mark.parametrize("kind", [DecodeVariant, PrefillVariant])
@pytest.mark.parametrize("kv_dtype", ["int8", "float8"])
def test_float16_beside_a_pool_of_eight_bits_keeps_small_weights(kind, kv_dtype):
    case = case_of(kind("float16", HEAD_SIZE, 2, BLOCK_SIZE, kv_dtype))

    out = to_float64("float16", simulate(case)["out"])

    np.testing.assert_allclose(out, case.expected["out"].values, rtol=0.01)
