from __future__ import annotations

import numpy as np

from kernels.reference.quantized_kv import from_float8
from tests.kernels.cpu.attention_driver import codes_widened

CODES = np.arange(256, dtype=np.uint8)


def test_every_int8_is_itself_as_bfloat16() -> None:
    np.testing.assert_array_equal(codes_widened("int8"), CODES.view(np.int8).astype(np.float32))


def test_every_float8_is_its_number_as_bfloat16_and_a_code_nobody_writes_is_finite() -> None:
    expected = from_float8(CODES)
    expected[[0x7F, 0xFF]] = 480, -480
    found = codes_widened("float8")
    np.testing.assert_array_equal(found, expected)
    assert np.signbit(found[0x80])
