"""Cases of attention over latents are as hostile as the others."""

from __future__ import annotations

import numpy as np
import pytest

from bench.gpu.case import to_float64
from bench.gpu.cases.block_pool import LAYER, NO_BLOCK, RISE_AT
from bench.gpu.cases.latent_attention import draw_decode
from kernels.cuda.latent_attention import LatentDecodeVariant

DECODE = LatentDecodeVariant("bfloat16", 2, 256, 32, 16)


@pytest.mark.parametrize("length", [20, 100])
def test_all_that_a_row_does_not_own_is_poison_and_its_scores_rise(length):
    case = draw_decode(DECODE, (length, 0))
    pool, tables = to_float64("bfloat16", case.arrays["pool"]), case.arrays["block_tables"]
    blocks = -(-length // 16)
    owned = pool[tables[0, :blocks], LAYER].reshape(blocks * 16, -1)
    assert np.isfinite(owned[:length]).all()
    assert np.isnan(owned[length:]).all()
    assert np.isfinite(pool).sum() == length * DECODE.row_elements
    assert (tables[0, blocks:] == NO_BLOCK).all()
    turning = np.abs(owned[:length, DECODE.rank :]).max(axis=1)
    assert (turning[RISE_AT:] > turning[:RISE_AT].max()).all()
