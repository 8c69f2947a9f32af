"""Checkpoints of GPTQ, AWQ and compressed-tensors: read to the bit, or refused by name."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.group_config import read_group_quantization
from compute_plane.model.group_parts import take_group_matrices
from compute_plane.model.json_file import JsonObject
from compute_plane.model.loader import load_model
from compute_plane.model.quantize import converted_tensor
from compute_plane.model.safetensors import read_header
from compute_plane.model.stored_tensor import ARRAY_TYPES
from compute_plane.model.tensor import RawTensor, TensorFormat
from tests.compute_plane.model.group_checkpoints import (
    Checkpoint,
    Quantised,
    Scheme,
    checkpoint,
    parts_of,
    quantised,
)

CT = "compressed-tensors"
SCHEMES = {
    "INT4": [
        Scheme(),
        Scheme(group_size=64, order="plain"),
        Scheme(group_size=-1, version="gptq_v2"),
        Scheme(order="act", scale_type="F32"),
        Scheme(CT, scale_type="BF16"),
    ],
    "UINT4": [
        Scheme(symmetric=False, version="gptq_v2", group_size=64),
        Scheme(symmetric=False, version="gptq_v2", order="act", group_size=64),
        Scheme("awq", symmetric=False),
        Scheme("awq", symmetric=False, group_size=64, scale_type="BF16"),
        Scheme(CT, symmetric=False, group_size=-1, scale_type="BF16"),
        Scheme(CT, symmetric=False, order="act"),
    ],
    "INT8": [Scheme(bits=8, group_size=128), Scheme(CT, bits=8, group_size=-1)],
    "UINT8": [Scheme(bits=8, symmetric=False), Scheme(CT, bits=8, symmetric=False)],
}
CASES = [(label, scheme) for label, schemes in SCHEMES.items() for scheme in schemes]
IDS = [f"{s.method}-{s.bits}-{s.group_size}-{'sym' if s.symmetric else 'asym'}-{s.order}"
       for _, s in CASES]  # fmt: skip
DOWN = "model.layers.1.mlp.down_proj"


def write(tiny, directory: Path, made: Checkpoint, **config) -> Path:
    """Write a checkpoint as a Hugging Face directory; `config` changes its quantisation."""
    settings_of = {"quantization_config": made.scheme.config() | config}
    tiny.directory(directory, tiny.model(), config=settings_of)
    made.save(directory / "model.safetensors")
    return directory


def small(tiny, scheme: Scheme = Scheme()) -> Checkpoint:  # noqa: B008 - a frozen value
    return checkpoint(tiny.model().weights, scheme)


@pytest.mark.parametrize(("label", "scheme"), CASES, ids=IDS)
def test_every_weight_is_scale_times_quant_less_zero_point(tiny, tmp_path, label, scheme):
    made = small(tiny, scheme)
    loaded = load_model(str(write(tiny, tmp_path / "m", made)))
    assert loaded.spec.num_parameters == sum(w.size for w in made.weights.values())
    for name, values in made.weights.items():
        tensor = loaded.source.tensor(name)
        assert tensor.format.label == (label if "_proj" in name else scheme.scale_type)
        assert tensor.shape == values.shape
        np.testing.assert_array_equal(tensor.to_float32(), values)
        if "_proj" in name:
            is_strewn = scheme.order == "act" and scheme.group_size < values.shape[1]
            assert (tensor.input_order is not None) == is_strewn
            some = np.array([0, 9, 31])
            np.testing.assert_array_equal(tensor.rows(some), tensor.rows()[some])
            np.testing.assert_array_equal(tensor.rows(slice(9, 30)), tensor.rows()[9:30])
            floats = converted_tensor(tensor, TensorFormat.F32, 3, 20)
            np.testing.assert_array_equal(floats.view("<f4"), values[3:20])


@pytest.mark.parametrize(
    ("scheme", "target", "error"),
    [
        (Scheme(), "Q4_0", 0),
        (Scheme(CT, scale_type="BF16"), "Q4_0", 0),
        (Scheme(bits=8), "Q8_0", 0),
        (Scheme("awq", symmetric=False), "Q4_1", 15 / 2048),
        (Scheme(CT, symmetric=False, scale_type="BF16"), "Q4_1", 15 / 2048),
        (Scheme(bits=8, symmetric=False), "Q8_0", 1.01),
    ],
    ids=str,
)
def test_a_matrix_runs_as_the_format_with_a_kernel_that_keeps_it(
    tiny, tmp_path, scheme, target, error
):
    """`error`: at most so many steps between two quants."""
    made = small(tiny, scheme)
    tensor = load_model(str(write(tiny, tmp_path / "m", made))).source.tensor(f"{DOWN}.weight")
    run = dataclasses.replace(
        tensor, format=TensorFormat[target], stored=converted_tensor(tensor, TensorFormat[target])
    )
    found, exact = run.to_float32(), made.weights[tensor.name]
    (scales,) = (part for name, part in made.tensors.items() if re.match(f"{DOWN}.*scale", name))
    step = scales.float().max().item()
    np.testing.assert_allclose(found, exact, rtol=0, atol=error * step)


def test_modules_that_are_not_quantised_stay_as_they_are(tiny, tmp_path):
    made = small(tiny)
    plain = "model.layers.0.mlp.up_proj"
    kept = tiny.model().weights[f"{plain}.weight"]
    tensors = {name: t for name, t in made.tensors.items() if not name.startswith(plain)}
    tensors[f"{plain}.weight"] = torch.from_numpy(kept)
    made = dataclasses.replace(made, tensors=tensors)
    dynamic = {f"-:.*{plain}": {}}
    source = load_model(str(write(tiny, tmp_path / "m", made, dynamic=dynamic))).source
    np.testing.assert_array_equal(source.tensor(f"{plain}.weight").to_float32(), kept)
    assert source.tensor(f"{DOWN}.weight").format is TensorFormat.INT4


def test_an_output_matrix_may_be_quantised_and_is_then_not_the_embedding(tiny, tmp_path):
    weights = tiny.model(tied=False).weights
    head = weights.pop("lm_head.weight")
    weights["lm_proj.weight"] = head[:264]  # whole words of zero points
    made = checkpoint(weights, Scheme())
    tensors = {name.replace("lm_proj", "lm_head"): t for name, t in made.tensors.items()}
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:264].contiguous()
    made = dataclasses.replace(made, tensors=tensors)
    directory = write(tiny, tmp_path / "m", made)
    config = json.loads((directory / "config.json").read_text())
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    del tokenizer["model"]["vocab"]["Ġhell"], tokenizer["model"]["merges"][-1]
    (directory / "config.json").write_text(json.dumps(config | {"vocab_size": 264}))
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    loaded = load_model(str(directory))
    assert not loaded.spec.tie_embeddings
    np.testing.assert_array_equal(
        loaded.source.tensor("lm_head.weight").to_float32(), made.weights["lm_proj.weight"]
    )


def test_biases_of_zeros_are_passed_over_and_others_refused(tiny, tmp_path):
    made = small(tiny)
    made.tensors[f"{DOWN}.bias"] = -torch.zeros(64, dtype=torch.float16)
    load_model(str(write(tiny, tmp_path / "zeros", made)))
    made.tensors[f"{DOWN}.bias"][3] = 1
    with pytest.raises(UnsupportedModelError, match=r"biases .*down_proj\.bias"):
        load_model(str(write(tiny, tmp_path / "others", made)))


OLD_GPTQ = {"bits": 4, "group_size": 32, "damp_percent": 0.01, "desc_act": False, "sym": True}
OLD_AWQ = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}


@pytest.mark.parametrize(
    ("name", "settings_of", "scheme"),
    [
        ("quantize_config.json", OLD_GPTQ, Scheme()),
        ("quant_config.json", OLD_AWQ, Scheme("awq", symmetric=False)),
        (
            "quantize_config.json",
            {"bits": 4, "group_size": 32, "quant_method": "awq", "checkpoint_format": "gemm"},
            Scheme("awq", symmetric=False),
        ),
    ],
)
def test_a_tool_s_own_file_counts_where_config_json_says_nothing(
    tiny, tmp_path, name, settings_of, scheme
):
    made = small(tiny, scheme)
    directory = tiny.directory(tmp_path / "m", tiny.model())
    (directory / "model.safetensors").unlink()
    made.save(directory / "gptq_model-4bit-32g.safetensors")
    (directory / name).write_text(json.dumps(settings_of))
    tensor = load_model(str(directory)).source.tensor(f"{DOWN}.weight")
    np.testing.assert_array_equal(tensor.to_float32(), made.weights[tensor.name])

    (directory / name).write_text(json.dumps(settings_of | {"group_size": 5, "q_group_size": 5}))
    with pytest.raises(UnsupportedModelError, match=rf"{name}: (q_)?group_size must .*, got 5"):
        load_model(str(directory))


def test_config_json_counts_before_a_tool_s_own_file(tiny, tmp_path):
    directory = write(tiny, tmp_path / "m", small(tiny))
    (directory / "quantize_config.json").write_text('{"bits": 3}')
    load_model(str(directory))
    config = json.loads((directory / "config.json").read_text())
    config["compression_config"] = config.pop("quantization_config")
    (directory / "config.json").write_text(json.dumps(config))
    load_model(str(directory))


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def cut(*sizes: int):
    """Take so many rows and columns of a part."""
    return lambda tensor: tensor[tuple(map(slice, sizes))].contiguous()


ORDERED, STREWN, INT4_AWQ = (
    Scheme(order="plain"),
    Scheme(order="act"),
    Scheme("awq", symmetric=False),
)
WITH_ZEROS = Scheme(CT, symmetric=False)
EMBEDDING = {
    "model.embed_tokens.weight": None,
    "model.embed_tokens.qweight": torch.zeros((8, 64), dtype=torch.int32),
    "model.embed_tokens.qzeros": torch.zeros((2, 8), dtype=torch.int32),
    "model.embed_tokens.scales": torch.zeros((2, 64)),
}
# Words of the message → the scheme, and what becomes of parts: a tensor, nothing, or a change.
DAMAGED = {
    "down_proj.qzeros is missing": (Scheme(symmetric=False), {"qzeros": None}),
    "down_proj.qweight is missing": (Scheme(), {"qweight": None}),
    "down_proj.scales is missing": (INT4_AWQ, {"scales": None}),
    "down_proj.g_idx is missing": (STREWN, {"g_idx": None}),
    "down_proj.weight_shape is missing": (WITH_ZEROS, {"weight_shape": None}),
    "down_proj.weight_zero_point is missing": (WITH_ZEROS, {"weight_zero_point": None}),
    "down_proj.qzeros has shape [3, 7], must be [3, 8]": (Scheme(), {"qzeros": cut(3, 7)}),
    "down_proj.scales has shape [2, 64], must be [3, 64]": (Scheme(), {"scales": cut(2, 64)}),
    "down_proj.qweight has shape [768], must be a matrix": (Scheme(), {"qweight": torch.flatten}),
    "down_proj.qweight has type F16, must be I32": (Scheme(), {"qweight": torch.Tensor.half}),
    "down_proj.scales has type I32, must be F32 or F16": (Scheme(), {"scales": torch.Tensor.int}),
    "down_proj.qweight is of shape [63, 96], the model needs [64, 96]": (
        Scheme(),
        {"qweight": cut(12, 63)},
    ),
    "down_proj.qweight is of shape [64, 64], the model needs [64, 96]": (
        Scheme(),
        {"qweight": cut(8, 64), "qzeros": cut(2, 8), "scales": cut(2, 64)},
    ),
    "down_proj.weight_packed is of shape [64, 88], the model needs [64, 96]": (
        Scheme(CT),
        {"weight_packed": cut(64, 11), "weight_shape": torch.tensor([64, 88])},
    ),
    "model.visual.qweight is of no matrix that a Llama model has": (
        Scheme(),
        {"model.visual.qweight": torch.zeros((8, 64), dtype=torch.int32)},
    ),
    "model.norm.scales is of no matrix": (Scheme(), {"model.norm.scales": torch.zeros(2, 64)}),
    "scales is of no matrix": (Scheme(), {"model.scales": torch.zeros(2, 64)}),
    "down_proj.g_idx has group 3, there are 3": (ORDERED, {"g_idx": int32(*[3] * 96)}),
    "down_proj.g_idx has group -1, there are 3": (ORDERED, {"g_idx": int32(*[-1] * 96)}),
    "down_proj.g_idx has shape [95], must be [96]": (ORDERED, {"g_idx": cut(95)}),
    "down_proj.g_idx has a group of 31 inputs; multiples of 32": (
        ORDERED,
        {"g_idx": int32(*[0] * 31, *[1] * 33, *[2] * 32)},
    ),
    "down_proj.weight_shape says [64, 95], weight_packed is [64, 96]": (
        WITH_ZEROS,
        {"weight_shape": torch.tensor([64, 95])},
    ),
    "down_proj.weight_zero_point is there, but the checkpoint is symmetric": (
        Scheme(CT),
        {"weight_zero_point": int32(0)},
    ),
    "is beside a plain weight": (Scheme(), {"weight": torch.zeros(64, 96)}),
    ": an embedding is not read so": (Scheme(), EMBEDDING),
    "model.norm.weight has type I32; supported are F32, F16, BF16": (
        Scheme(),
        {"model.norm.weight": torch.Tensor.int},
    ),
}


def damage(made: Checkpoint, changes: dict) -> Checkpoint:
    """Change tensors; a name without a dot is that of a part of one matrix."""
    tensors = dict(made.tensors)
    for part, change in changes.items():
        name = part if "." in part else f"{DOWN}.{part}"
        found = tensors.pop(name, None)
        if change is not None:
            tensors[name] = change(found) if callable(change) else change
    return dataclasses.replace(made, tensors=tensors)


@pytest.mark.parametrize("words", DAMAGED)
def test_a_damaged_checkpoint_is_refused_with_its_tensor(tiny, tmp_path, words):
    scheme, changes = DAMAGED[words]
    directory = write(tiny, tmp_path / "m", damage(small(tiny, scheme), changes))
    with pytest.raises(ModelFileError) as caught:
        load_model(str(directory))
    assert f"tensor {words}" in caught.value.message or words in caught.value.message
    assert caught.value.message.startswith(str(directory))
    assert caught.value.message.isprintable()


def spoilt(value: float):
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor[1, 5] = value
        return tensor

    return change


def stored_zero(value: int):
    """Change the first zero point of a word."""
    return lambda t: torch.cat([(t[:1] & ~15) | value, t[1:]])


SPOILT = {
    "down_proj.qweight holds -inf at row 5, column 32": (
        Scheme(),
        {"scales": spoilt(np.inf)},
    ),
    "down_proj.qweight holds nan at row 5, column 32": (
        Scheme(),
        {"scales": spoilt(np.nan)},
    ),
    "down_proj.qweight has weights too large for Q4_0": (
        Scheme(scale_type="F32"),
        {"scales": spoilt(1e6)},
    ),
    "down_proj.qweight has weights too large for Q4_1": (
        Scheme("awq", symmetric=False, scale_type="BF16"),
        {"scales": spoilt(3e4)},
    ),
    "down_proj.qzeros has zero points stored as 7 to 8; in a symmetric checkpoint all are 8": (
        Scheme(version="gptq_v2"),
        {"qzeros": stored_zero(7)},
    ),
    "down_proj.qzeros has zero points stored as 7 to 8; in a symmetric checkpoint all are 7 or": (
        Scheme(),
        {"qzeros": stored_zero(8)},
    ),
    "down_proj.qzeros has zero points stored as 15, which tools do not agree on": (
        dataclasses.replace(Scheme(), symmetric=False),
        {"qzeros": stored_zero(15)},
    ),
}


@pytest.mark.parametrize("words", SPOILT)
def test_a_number_that_cannot_be_is_found_when_the_matrix_is_read(tiny, tmp_path, words):
    scheme, changes = SPOILT[words]
    directory = write(tiny, tmp_path / "m", damage(small(tiny, scheme), changes))
    tensor = load_model(str(directory)).source.tensor(f"{DOWN}.weight")
    label = "Q4_0" if scheme.symmetric else "Q4_1"
    with pytest.raises(ModelFileError) as caught:
        converted_tensor(tensor, TensorFormat[label])
    assert f"tensor model.layers.1.mlp.{words}" in caught.value.message


SYMMETRIC_ZEROS = {
    "missing": {"qzeros": None},
    "not less one": {"qzeros": lambda t: torch.full_like(t, -0x77777778)},
}


@pytest.mark.parametrize("what", SYMMETRIC_ZEROS)
def test_a_symmetric_checkpoint_has_but_one_zero_point_however_it_is_stored(tiny, tmp_path, what):
    made = small(tiny)
    directory = write(tiny, tmp_path / "m", damage(made, SYMMETRIC_ZEROS[what]))
    tensor = load_model(str(directory)).source.tensor(f"{DOWN}.weight")
    np.testing.assert_array_equal(tensor.to_float32(), made.weights[tensor.name])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("quantizer", ["gptqmodel:0.9.0", ["optimum:1.2", "GPTQModel:4.2.5-dev"]])
def test_zero_points_of_whole_words_less_one_are_read_back(tiny, tmp_path, bits, quantizer):
    scheme = Scheme(bits=bits, symmetric=False, version="gptq_v2")
    made = small(tiny, scheme)
    one = torch.tensor(0x11111111 if bits == 4 else 0x01010101, dtype=torch.int32)
    zeros = {name: t - one for name, t in made.tensors.items() if name.endswith("qzeros")}
    zeros[f"{DOWN}.qzeros"][0, 0] = -one  # all zero, each has borrowed but the first
    where = f"{DOWN}.weight"
    per_word, scales = 32 // bits, made.tensors[f"{DOWN}.scales"].float().numpy().T
    before = made.tensors[f"{DOWN}.qzeros"].numpy().view(np.uint32)
    expected = made.weights[where].copy()
    for row in range(per_word):
        zero = int(before[0, 0] >> np.uint32(bits * row)) & (2**bits - 1)
        expected[row, :32] += scales[row, 0] * zero
    made = dataclasses.replace(made, tensors=made.tensors | zeros)
    config = {"checkpoint_format": "gptq", "meta": {"quantizer": quantizer}}
    source = load_model(str(write(tiny, tmp_path / "m", made, **config))).source
    for name, values in (made.weights | {where: expected}).items():
        np.testing.assert_allclose(source.tensor(name).to_float32(), values, rtol=1e-6, atol=1e-6)
    tensor = source.tensor(where)
    some = np.array([0, 3, 9])
    np.testing.assert_array_equal(tensor.rows(some), tensor.rows()[some])

    config["meta"] = {"quantizer": "gptqmodel:0.8.9"}
    source = load_model(str(write(tiny, tmp_path / "old", made, **config))).source
    with pytest.raises(UnsupportedModelError, match="which tools do not agree on"):
        source.tensor(where).to_float32()


@st.composite
def matrices(draw) -> tuple[Scheme, Quantised]:
    """A scheme and any integers it can store, with scales of float16 that are not zero."""
    method = draw(st.sampled_from(["gptq", "awq", CT]))
    bits = 4 if method == "awq" else draw(st.sampled_from([4, 8]))
    scheme = Scheme(
        method, bits, draw(st.sampled_from([-1, 32, 64, 128])),
        symmetric=method != "awq" and draw(st.booleans()),
        version=draw(st.sampled_from(["gptq", "gptq_v2"])),
        order="none" if method == "awq" else draw(st.sampled_from(["none", "plain", "act"])),
    )  # fmt: skip
    num_outputs = 8 * draw(st.integers(1, 4)) + (method == CT) * draw(st.integers(0, 3))
    groups = scheme.groups(32 * draw(st.integers(1, 5)))
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    shape = num_outputs, int(groups.max()) + 1
    scales = random.uniform(1e-3, 1, shape).astype(np.float16).astype(np.float64)
    lowest = 1 if method == "gptq" and scheme.version == "gptq" else 0
    zeros = random.integers(lowest, 2**bits, shape)
    if scheme.symmetric:
        zeros[:] = 2 ** (bits - 1)
    quants = random.integers(0, 2**bits, (num_outputs, len(groups)))
    return scheme, Quantised(quants, scales, zeros, groups)


def read_alone(path: Path, config: JsonObject, shape: tuple[int, ...]) -> RawTensor:
    """Read a matrix that is alone in a file, and called m."""
    quantization = read_group_quantization(config)
    assert quantization is not None
    stored = read_header(path, tuple(ARRAY_TYPES))
    (tensor,) = take_group_matrices(stored, quantization, {"m.weight": shape}).values()
    assert not stored
    return tensor


@pytest.mark.parametrize(
    ("scheme", "shape", "words"),
    [
        (Scheme(), (8, 88), "qweight has 88 inputs; multiples of 32 are read"),
        (Scheme(CT, group_size=-1), (8, 16), "weight_packed has 16 inputs; multiples of 32"),
        (Scheme("awq", symmetric=False), (8, 40), "qweight has 40 inputs; multiples of 32"),
        (Scheme(symmetric=False), (12, 64), "qweight has 12 outputs, not whole words of zeros"),
    ],
)
def test_sizes_that_no_kernel_takes_are_refused(tmp_path, scheme, shape, words):
    matrix = quantised(np.random.default_rng(0).standard_normal(shape), scheme)
    path = tmp_path / "model.safetensors"
    save_file({f"m.{name}": part for name, part in parts_of(matrix, scheme).items()}, path)
    config = JsonObject(path, {"quantization_config": scheme.config()})
    with pytest.raises(ModelFileError, match=f"tensor m.{words}"):
        read_alone(path, config, shape)


def test_outputs_that_are_no_whole_words_need_no_zero_points(tmp_path):
    matrix = quantised(np.random.default_rng(0).standard_normal((12, 64)), Scheme())
    parts = parts_of(matrix, Scheme())
    del parts["qzeros"]
    path = tmp_path / "model.safetensors"
    save_file({f"m.{name}": part for name, part in parts.items()}, path)
    config = JsonObject(path, {"quantization_config": Scheme().config()})
    found = read_alone(path, config, (12, 64)).to_float32()
    np.testing.assert_array_equal(found, matrix.weights().astype(np.float32))


class Untouched:
    """A part of a shape that takes more memory than there is, if anybody looked into it."""

    def __init__(self, *shape: int) -> None:
        self.path, self.dtype, self.shape = Path("huge.safetensors"), "I32", shape

    def array(self) -> np.ndarray:
        return np.broadcast_to(np.int32(0), self.shape)


def test_a_gigantic_matrix_is_refused_before_memory_is_taken_for_it():
    for scheme, parts in (
        (Scheme(), {"qweight": Untouched(1 << 40, 64), "g_idx": Untouched(1 << 43)}),
        (Scheme(CT), {"weight_packed": Untouched(64, 1 << 40)}),
    ):
        config = JsonObject(Path("c.json"), {"quantization_config": scheme.config()})
        stored = {f"m.{name}": part for name, part in parts.items()}
        stored["m.weight_shape"] = Untouched(2)
        stored["m.weight_shape"].array = lambda: np.array([64, 1 << 43])
        with pytest.raises(ModelFileError, match=r"m\.\w+ is of shape \[64, 8796093022208\]"):
            take_group_matrices(stored, read_group_quantization(config), {"m.weight": (64, 96)})


@settings(deadline=None, max_examples=60)
@given(drawn=matrices())
def test_whatever_is_packed_is_read_again(tmp_path_factory, drawn):
    scheme, matrix = drawn
    path = tmp_path_factory.mktemp("drawn") / "model.safetensors"
    save_file({f"m.{name}": part for name, part in parts_of(matrix, scheme).items()}, path)
    config = JsonObject(path, {"quantization_config": scheme.config()})
    tensor = read_alone(path, config, matrix.q.shape)
    np.testing.assert_array_equal(tensor.to_float32(), matrix.weights().astype(np.float32))
