from __future__ import annotations

import ctypes

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf.constants import GGMLQuantizationType as GgmlType

from kernels.cpu.catalogue import EMBEDDINGS
from kernels.cpu.float_packing import FLOAT_TYPES, pack_float_rows, packed_float_bytes
from kernels.cpu.int8_packing import INT8_FORMATS, packed_int8_bytes
from kernels.cpu.int8_turning import pack_int8_rows
from kernels.cpu.operands import EmbeddingRecord
from kernels.cpu.operation import HEADER_WORDS, RECORD_WORDS, StepWord
from tests.kernels.cpu.operation_calls import (
    SCALES_AT,
    decoded_weights,
    random_blocks,
    whole_blocks,
)

VOCABULARY = 53


def stored_rows(label: str) -> tuple[npt.NDArray[np.uint8], int]:
    """Return rows as a file holds them, and their number of elements."""
    random = np.random.default_rng(3)
    fmt = INT8_FORMATS.get(label)
    if fmt is not None and (fmt.is_shared or fmt.codes is not None):
        # None of these does the gguf package make.
        width = whole_blocks(label, 512)
        rows = random_blocks(label, VOCABULARY, width, random)
        blocks = rows[7].reshape(-1, fmt.block_bytes)
        for at in SCALES_AT.get(label, (0,)):
            blocks[:, at + 1] &= 0x83  # below the smallest normal number, as below
        return rows, width
    width = 96
    values = random.standard_normal((VOCABULARY, width), dtype=np.float32)
    values[7] *= np.float32(1e-6)  # float16 scales below the smallest normal number
    stored = gguf.quants.quantize(values, GgmlType[label])
    return np.ascontiguousarray(stored).view(np.uint8).reshape(VOCABULARY, -1), width


@pytest.mark.parametrize("label", EMBEDDINGS)
@pytest.mark.parametrize(("chunks", "scale"), [(1, None), (4, None), (1, 54.545456)])
def test_tokens_get_their_rows_to_the_bit_and_nothing_else_is_written(label, chunks, scale):
    rows, width = stored_rows(label)
    is_float = label in FLOAT_TYPES
    kind = {"F32": "<f4", "F16": "<f2"}.get(label, "u1")
    stored = rows.view(kind)
    if label in GgmlType.__members__:
        expected = gguf.quants.dequantize(stored, GgmlType[label]).reshape(VOCABULARY, width)
    else:
        expected = decoded_weights(label, rows).astype(np.float32)
    size = (packed_float_bytes if is_float else packed_int8_bytes)(label, VOCABULARY, width)
    packed = np.empty(size, np.uint8)
    (pack_float_rows if is_float else pack_int8_rows)(label, rows, width, packed)

    token_ids = np.array([0, 52, 16, 15, 7, 7, 33], np.int32)
    out = np.full((len(token_ids) + 5, width), 7.5, np.float32)
    record, header = np.zeros(RECORD_WORDS, np.int64), np.zeros(HEADER_WORDS, np.int64)
    record[EmbeddingRecord.WEIGHTS], record[EmbeddingRecord.K] = packed.ctypes.data, width
    record[EmbeddingRecord.OUT] = out.ctypes.data
    if scale is not None:
        expected = expected * np.float32(scale)
        record[EmbeddingRecord.SCALE] = np.float32(scale).view(np.uint32)
    header[StepWord.NUM_TOKENS], header[StepWord.FIRST_TOKEN] = len(token_ids), 3
    header[StepWord.TOKEN_IDS] = token_ids.ctypes.data
    kernel = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(EMBEDDINGS[label].address)
    for chunk in range(chunks):
        kernel(record.ctypes.data, header.ctypes.data, chunk, chunks, 0)
    np.testing.assert_array_equal(out[3:-2], expected[token_ids])
    assert (out[:3] == 7.5).all()
    assert (out[-2:] == 7.5).all()
