from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as GgmlType

from compute_plane.executor.weight_formats import is_exact
from compute_plane.model import read_only_quants
from compute_plane.model.errors import ModelFileError
from compute_plane.model.loader import load_model
from compute_plane.model.quantize import convert_rows
from compute_plane.model.tensor import TensorFormat
from kernels.reference import k_quants
from tests.compute_plane.model.llama_weights import decoded_weights

DECODERS = {**k_quants.DECODERS, **read_only_quants.DECODERS}
SCALES_AT = {
    "Q5_0": [0], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "Q2_K": [80, 82],
    "Q3_K": [108], "IQ4_NL": [0], "IQ4_XS": [0],
}  # fmt: skip
"""Where a block's float16 lie."""
WIDTH = 512


def random_rows(label, num_rows, seed=0, largest=1.0):
    """Return rows in which every bit but those of the scales is random."""
    fmt = TensorFormat[label]
    random = np.random.default_rng(seed)
    rows = random.integers(0, 256, (num_rows, fmt.row_bytes(WIDTH)), dtype=np.uint8)
    blocks = rows.reshape(-1, fmt.block_bytes)
    for at in SCALES_AT[label]:
        scales = random.uniform(-largest, largest, (len(blocks), 1)).astype(np.float16)
        scales[::7] = np.float16(6e-8)  # the smallest there is
        blocks[:, at : at + 2] = scales.view(np.uint8)
    return rows


@pytest.mark.parametrize("label", DECODERS)
def test_rows_are_decoded_to_the_bit(label):
    rows = random_rows(label, 300)
    out = np.full((300, WIDTH), np.nan, np.float32)
    DECODERS[label](rows, out)
    np.testing.assert_array_equal(out, gguf.quants.dequantize(rows, GgmlType[label]))


@pytest.fixture
def wide(tiny):
    return tiny.model(hidden_size=WIDTH, intermediate_size=WIDTH)


@pytest.mark.parametrize("label", DECODERS)
def test_a_file_of_the_format_comes_back_in_hugging_face_order(tiny, wide, tmp_path, label):
    stored = {
        name: (random_rows(label, len(values), seed), GgmlType[label])
        for seed, (name, values) in enumerate(wide.weights.items())
        if values.ndim == 2 and values.shape[1] == WIDTH
    }
    loaded = load_model(str(tiny.gguf(tmp_path / "m.gguf", wide, stored=stored)))
    assert loaded.spec.weight_format == label
    for name, (rows, kind) in stored.items():
        expected = gguf.quants.dequantize(rows, kind)
        np.testing.assert_array_equal(loaded.source.tensor(name).to_float32(), expected)
    loaded.source.forget_pages()
    name = "model.layers.1.self_attn.q_proj.weight"
    np.testing.assert_array_equal(loaded.source.tensor(name).rows(), stored[name][0])


@pytest.mark.parametrize("label", DECODERS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_scale_that_is_not_finite_is_reported_with_its_tensor(tiny, wide, tmp_path, label, value):
    for at in SCALES_AT[label]:
        name = "model.layers.0.mlp.up_proj.weight"
        rows = random_rows(label, len(wide.weights[name]))
        rows[5, at : at + 2] = np.float16([value]).view(np.uint8)
        stored = {name: (rows, GgmlType[label])}
        loaded = load_model(str(tiny.gguf(tmp_path / "m.gguf", wide, stored=stored)))
        with pytest.raises(ModelFileError, match=r"blk\.0\.ffn_up\.weight holds .* at row 5"):
            decoded_weights(loaded)


@pytest.mark.parametrize(
    ("label", "runs_as", "largest_error"),
    [
        ("IQ4_NL", "Q8_0", 0.0),
        ("Q3_K", "Q6_K", 0.0),
        ("IQ4_XS", "Q8_0", 2**-11),
        ("Q2_K", "Q8_0", 2**-7),
        ("Q3_K", "Q8_0", 2**-7),
    ],
)
def test_what_no_kernel_reads_becomes_what_one_reads(label, runs_as, largest_error):
    rows = random_rows(label, 100)
    blocks = rows.reshape(-1, TensorFormat[label].block_bytes)
    for at in SCALES_AT[label]:  # of numbers that are nearly zero Q8_0 keeps less
        blocks[::7, at : at + 2] = np.float16([0.5]).view(np.uint8)
    weights = gguf.quants.dequantize(rows, GgmlType[label]).reshape(-1, 32)

    run = convert_rows(rows, TensorFormat[label], TensorFormat[runs_as], path=Path("m"), name="w")

    as_run = gguf.quants.dequantize(run, GgmlType[runs_as]).reshape(-1, 32)
    bound = largest_error * np.abs(weights).max(axis=1, keepdims=True)
    assert (np.abs(as_run - weights) <= bound).all()
    assert (as_run != weights).any() == bool(largest_error)
    assert is_exact(TensorFormat[label], TensorFormat[runs_as]) == (not largest_error)
