from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as GgmlType

from compute_plane.model.errors import ModelFileError
from compute_plane.model.quantize import are_finite, convert_rows, round_to_bf16
from compute_plane.model.tensor import TensorFormat as Format
from kernels.cpu.int8_packing import INT8_FORMATS
from tests.kernels.cpu.operation_calls import SCALES_AT, random_blocks

PATH = Path("m.gguf")


def convert(rows, stored, target):
    return convert_rows(rows, stored, target, path=PATH, name="t")


def decoded(rows, fmt):
    return convert(rows, fmt, Format.F32).view(np.float32)


def random_values(rows=40, columns=512):
    return np.random.default_rng(1).standard_normal((rows, columns), dtype=np.float32)


def q4_k_rows(rows=40, columns=512):
    random = np.random.default_rng(2)
    raw = random.integers(0, 256, (rows, Format.Q4_K.row_bytes(columns)), dtype=np.uint8)
    blocks = raw.reshape(-1, 144)
    numbers = random.uniform(0.001, 0.01, (len(blocks), 2)).astype(np.float16)
    blocks[:, :4] = numbers.view(np.uint8)
    return raw


def relative_error(values, expected):
    return np.sqrt(np.square(values - expected).sum() / np.square(expected).sum())


@pytest.mark.parametrize("stored", [Format.F32, Format.Q5_1, Format.Q4_K])
def test_requantising_to_eight_bits_errs_by_half_a_step_at_most(stored):
    values = random_values()
    values[3] = 0
    values[4, :32] = 1e-9  # below what a float16 scale can say
    if stored is Format.Q4_K:
        rows = q4_k_rows()
    else:
        rows = gguf.quants.quantize(values, GgmlType[stored.label]).view(np.uint8)
    expected = decoded(rows, stored)
    as_run = decoded(convert(rows, stored, Format.Q8_0), Format.Q8_0)
    groups = expected.reshape(-1, 32)
    step = np.abs(groups).max(axis=1, keepdims=True) / 127
    # Half a step, and what rounding of the scale to float16 adds to the largest.
    limit = step * (0.5 + 127 * 2**-11) + 127 * 2.0**-25
    assert (np.abs(as_run.reshape(-1, 32) - groups) <= limit).all()
    assert relative_error(as_run, expected) < 0.01


def test_rounding_to_bfloat16_is_that_of_torch():
    import torch

    random = np.random.default_rng(0)
    bits = random.integers(0, 2**32, 100_000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = np.concatenate(
        (values[np.isfinite(values)], np.float32([0, -0.0, 1.00390625, 3.4e38]))
    )
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy()
    np.testing.assert_array_equal(round_to_bf16(values), expected.view(np.uint16))


def test_a_weight_that_is_not_finite_is_refused_on_the_way():
    values = random_values()
    values[7, 5] = np.nan
    with pytest.raises(ModelFileError, match="t holds nan at row 7, column 5"):
        convert(values.view(np.uint8), Format.F32, Format.BF16)


@pytest.mark.parametrize(
    "stored", [Format.F32, Format.F16, Format.BF16, *(Format[label] for label in INT8_FORMATS)]
)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_found_in_every_format_that_runs(stored, value):
    if stored.label in INT8_FORMATS:
        rows = random_blocks(stored.label, 16, 512, np.random.default_rng(4))
    else:
        rows = gguf.quants.quantize(random_values(), GgmlType[stored.label]).view(np.uint8)
    assert are_finite(rows, stored)
    number = {Format.F32: np.float32}.get(stored, np.float16)([value]).view(np.uint8)
    if stored is Format.BF16:
        number = np.float32([value]).view(np.uint8)[2:]
    # In the last block: one of a row's is enough.
    last = rows.shape[1] - stored.block_bytes
    for at in SCALES_AT.get(stored.label, (0,)):
        bad = rows.copy()
        bad[9, last + at : last + at + len(number)] = number
        assert not are_finite(bad, stored)
