from __future__ import annotations

import ctypes
import dataclasses
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as GgmlType

from compute_plane.cpu.packed_weights import pack_weights
from compute_plane.executor import weight_formats
from compute_plane.executor.weight_formats import measure_conversions
from compute_plane.model import layout, stored_names
from compute_plane.model.errors import ModelFileError
from compute_plane.model.quantize import round_to_bf16
from compute_plane.model.spec import ModelSpec
from compute_plane.model.tensor import RawTensor, TensorFormat
from kernels.cpu.float_packing import FLOAT_TYPES
from planes.errors import ConfigError
from tests.kernels.cpu.operation_calls import SCALES_AT, random_blocks
from tests.kernels.cpu.packed_values import values_in_panels

SPEC = ModelSpec(
    name="packed",
    architecture="llama",
    vocab_size=1100,  # more than one thread packs at once, and no whole panel
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    hidden_size=64,
    intermediate_size=96,
    context_length=64,
    rope_theta=10_000.0,
    rope_scaling=None,
    rms_norm_eps=1e-5,
    tie_embeddings=False,
    num_parameters=0,
    weight_format="",
)
SHARED = ("Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
DRAWN = (*SHARED, "IQ4_NL")
"""What the gguf package does not make."""
OWN = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", *DRAWN)
WIDE_SPEC = dataclasses.replace(SPEC, hidden_size=256, intermediate_size=512, head_dim=64)
"""Rows of whole blocks of 256 weights."""


def spec_for(label):
    return WIDE_SPEC if label in SHARED else SPEC


class ArraySource:
    """A model's tensors in memory, random, each quantised by the gguf package or drawn."""

    def __init__(self, spec, label, own_labels=()):
        self.path = Path("m.gguf")
        self.was_forgotten = False
        self.tensors = {}
        random = np.random.default_rng(5)
        turned = layout.head_orders(spec, turns_neighbours=True)
        for name, shape in layout.tensor_shapes(spec).items():
            values = random.standard_normal(shape, dtype=np.float32)
            role = name.removesuffix(".weight").split(".", 3)[-1]
            fmt = TensorFormat["F32" if len(shape) == 1 else dict(own_labels).get(role, label)]
            if fmt.label in DRAWN:
                rows = random_blocks(fmt.label, *shape, random)
            else:
                rows = gguf.quants.quantize(values, GgmlType[fmt.label])
            stored = np.ascontiguousarray(rows).view(np.uint8).reshape(-1, fmt.row_bytes(shape[-1]))
            order = turned.get(name) if label == "Q4_1" else None
            self.tensors[name] = RawTensor(name, name, self.path, fmt, shape, stored, order)

    @property
    def names(self):
        return tuple(self.tensors)

    def tensor(self, name):
        return self.tensors[name]

    def forget_pages(self):
        self.was_forgotten = True

    def spoil(self, name, row, number):
        """Put a number, float16 or wider, to the first place of a row of a tensor that has one."""
        tensor = self.tensors[name]
        stored = tensor.stored.copy()
        at = SCALES_AT.get(tensor.format.label, (0,))[0]
        stored[row, at : at + number.nbytes] = np.frombuffer(number.tobytes(), np.uint8)
        self.tensors[name] = dataclasses.replace(tensor, stored=stored)


def bytes_at(address, num_bytes):
    return np.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), np.uint8).copy()


def vector_at(address, size):
    return bytes_at(address, 4 * size).view(np.float32)


def unpacked(matrix):
    """Return a packed matrix's rows decoded, float32 [n, k]."""
    assert matrix.address % 64 == 0
    packed = bytes_at(matrix.address, matrix.num_bytes)
    n, k = matrix.n, matrix.k
    if matrix.format not in FLOAT_TYPES:
        return values_in_panels(matrix.format, packed, n, k).astype(np.float32)
    panels = -(-n // 16)
    if matrix.format == "BF16":
        pairs = packed.view(np.uint16).reshape(panels, -1, 16, 2).transpose(0, 2, 1, 3)
        bits = pairs.reshape(panels * 16, -1)[:n, :k].astype(np.uint32)
        return (bits << 16).view(np.float32)
    kind = np.float32 if matrix.format == "F32" else np.float16
    turned = packed.view(kind).reshape(panels, k, 16).transpose(0, 2, 1)
    return turned.reshape(panels * 16, k)[:n].astype(np.float32)


def side_by_side(matrices):
    """Return the rows of the matrices of one product, checking where each begins."""
    rows = [unpacked(matrix) for matrix in matrices]
    starts = np.cumsum([0, *(len(part) for part in rows)])[:-1]
    assert [matrix.first_column for matrix in matrices] == starts.tolist()
    return np.concatenate(rows)


def check_against(weights, source, as_run=lambda values: values, spec=SPEC):
    """Compare everything that was packed with the source's tensors."""

    def values(name):
        decoded = source.tensor(name).to_float32()
        return as_run(decoded) if decoded.ndim == 2 else decoded

    def same(actual, *names):
        expected = np.concatenate([values(name) for name in names])
        np.testing.assert_array_equal(actual, expected)

    same(unpacked(weights.embedding), layout.EMBEDDING)
    same(vector_at(weights.final_norm, spec.hidden_size), layout.FINAL_NORM)
    if layout.LM_HEAD in source.tensors:
        same(unpacked(weights.lm_head), layout.LM_HEAD)
    for index, layer in enumerate(weights.layers):
        name = {role: layout.layer_tensor(index, role) for role in stored_names.GGUF_LAYER_NAMES}
        same(vector_at(layer.attn_norm, spec.hidden_size), name[layout.ATTN_NORM])
        same(
            side_by_side(layer.mixer.qkv),
            *(name[r] for r in (layout.QUERY, layout.KEY, layout.VALUE)),
        )
        same(unpacked(layer.mixer.o), name[layout.OUTPUT])
        same(vector_at(layer.mlp_norm, spec.hidden_size), name[layout.MLP_NORM])
        same(side_by_side(layer.feedforward.gate_up), name[layout.GATE], name[layout.UP])
        same(unpacked(layer.feedforward.down), name[layout.DOWN])


@pytest.mark.parametrize("label", OWN)
def test_auto_keeps_every_weight_of_the_files_own_format(label):
    spec = spec_for(label)
    source = ArraySource(spec, label)
    weights = pack_weights(spec, source)
    check_against(weights, source, spec=spec)
    assert weights.weight_format == label
    assert weights.conversions == ()
    assert {len(layer.mixer.qkv) for layer in weights.layers} == {1}
    assert weights.layers[0].mixer.qkv[0].n == spec.query_size + 2 * spec.kv_size
    assert source.was_forgotten


@pytest.mark.parametrize("label", ["F16", "Q4_1", "Q5_1"])
def test_float32_runs_exactly_what_the_file_says(label):
    source = ArraySource(SPEC, label)
    weights = pack_weights(SPEC, source, "float32")
    check_against(weights, source)
    assert weights.weight_format == f"{label} as F32"
    assert [c.relative_error for c in weights.conversions] == [0.0]


@pytest.mark.parametrize("label", ["F32", "F16", "BF16", "Q8_0"])
def test_bfloat16_rounds_every_matrix_to_nearest(label):
    source = ArraySource(SPEC, label)
    weights = pack_weights(SPEC, source, "bfloat16")

    def rounded(values):
        return (round_to_bf16(values).astype(np.uint32) << 16).view(np.float32)

    check_against(weights, source, rounded)
    (loss,) = weights.conversions or (None,)
    if label == "BF16":
        assert loss is None
    else:
        assert (loss.stored, loss.runs_as) == (label, "BF16")
        assert 0 < loss.relative_error < 2**-8


def test_matrices_of_a_file_with_several_formats_run_each_in_its_own():
    # As llama.cpp makes files of Q4_K_M: v and down in more bits than the others.
    source = ArraySource(WIDE_SPEC, "Q4_K", {layout.DOWN: "Q6_K", layout.VALUE: "Q6_K"}.items())
    weights = pack_weights(WIDE_SPEC, source)
    check_against(weights, source, spec=WIDE_SPEC)
    assert weights.weight_format == "Q4_K, Q6_K"
    assert weights.conversions == ()
    layer = weights.layers[1]
    assert [(m.format, m.first_column) for m in layer.mixer.qkv] == [("Q4_K", 0), ("Q6_K", 384)]


def test_tied_embeddings_are_one_matrix():
    spec = dataclasses.replace(SPEC, tie_embeddings=True)
    source = ArraySource(spec, "Q8_0")
    weights = pack_weights(spec, source, num_threads=1)
    assert weights.lm_head is weights.embedding
    untied = pack_weights(SPEC, ArraySource(SPEC, "Q8_0"))
    assert untied.num_bytes - weights.num_bytes == weights.embedding.num_bytes
    check_against(weights, source)


def test_rows_that_share_a_panel_with_the_next_matrix_are_packed_together():
    spec = dataclasses.replace(SPEC, head_dim=10, intermediate_size=32 * 3 - 8)
    for label in ("F32", "BF16"):
        source = ArraySource(spec, label)
        weights = pack_weights(spec, source)
        check_against(weights, source)


@pytest.mark.spread(27)
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
@pytest.mark.parametrize("label", OWN)
def test_a_weight_that_is_not_finite_is_refused_with_its_tensor_and_row(label, dtype):
    name, spec = layout.EMBEDDING, spec_for(label)
    source = ArraySource(spec, label)
    number = np.float32([np.inf]) if label == "F32" else np.float16([np.inf])
    if label == "BF16":
        number = np.uint16([0x7F80])
    source.spoil(name, 1050, number)
    with pytest.raises(ModelFileError, match=rf"{re.escape(name)} holds .* at row 1050"):
        pack_weights(spec, source, dtype)


def test_a_norm_that_is_not_finite_is_refused():
    source = ArraySource(SPEC, "Q8_0")
    source.spoil(layout.FINAL_NORM, 0, np.float32([np.nan]))
    with pytest.raises(ModelFileError, match=r"model\.norm\.weight holds nan"):
        pack_weights(SPEC, source)


def test_weights_too_large_for_the_format_they_would_run_in_are_refused():
    source = ArraySource(SPEC, "Q5_1")
    source.spoil(layout.EMBEDDING, 3, np.float16([60000, 60000]))
    weights = pack_weights(SPEC, source)
    assert np.isfinite(unpacked(weights.embedding)).all()
    source = ArraySource(SPEC, "F32")
    source.spoil(layout.EMBEDDING, 3, np.float32([3.4e38]))
    with pytest.raises(
        ModelFileError, match=r"embed_tokens\.weight has weights too large for BF16"
    ):
        pack_weights(SPEC, source, "bfloat16")


def test_an_unknown_dtype_is_refused_with_its_name():
    with pytest.raises(ConfigError, match="dtype must be auto, float32 or bfloat16, got int3"):
        pack_weights(SPEC, ArraySource(SPEC, "F32"), "int3")


def test_of_thousands_of_matrices_some_are_measured_and_all_are_counted(monkeypatch):
    """The one matrix of another format is not missed among them."""
    measured = []

    def error_sums(tensor, _):
        measured.append(tensor.name)
        return 1.0, 4.0

    monkeypatch.setattr(weight_formats, "error_sums", error_sums)
    stored = np.zeros((32, 256), np.uint8)

    def matrix(name, fmt):
        return RawTensor(name, name, Path("m.gguf"), fmt, (32, 64), stored)

    many = [(matrix(str(i), TensorFormat.Q2_K), TensorFormat.Q8_0) for i in range(1500)]
    rare = [(matrix("rare", TensorFormat.Q5_K), TensorFormat.Q8_0)]
    with ThreadPoolExecutor(1) as pool:
        found = measure_conversions([*many[:700], *rare, *many[700:]], pool)
    assert [(c.stored, c.num_matrices, c.relative_error) for c in found] == [
        ("Q2_K", 1500, 0.5),
        ("Q5_K", 1, 0.5),
    ]
    assert measured == [*(str(i) for i in range(0, 1500, 3)), "rare"]
