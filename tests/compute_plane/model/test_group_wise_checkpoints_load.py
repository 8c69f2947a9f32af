"""Checkpoints of GPTQ, AWQ and compressed-tensors: what they mean, read to the bit."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from compute_plane.model import group_matrices
from compute_plane.model.errors import UnsupportedModelError
from compute_plane.model.group_blocks import uint4_to_q4_1, write_blocks
from compute_plane.model.json_file import JsonObject
from compute_plane.model.loader import load_model
from compute_plane.model.quantize import converted_tensor
from compute_plane.model.tensor import TensorFormat
from tests.compute_plane.model.group_checkpoints import (
    CT,
    DOWN,
    Quantised,
    Scheme,
    checkpoint,
    damage,
    parts_of,
    quantised,
    read_alone,
    small,
    write,
)

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
            floats = converted_tensor(tensor, TensorFormat.F32, slice(3, 20))
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
        (Scheme("awq", symmetric=False), "Q4_Z", 0),
        (Scheme(CT, bits=8, symmetric=False), "Q8_Z", 0),
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


def test_a_minimum_is_rounded_once_from_the_scale_that_is_meant():
    scales = np.float32([[1.0004, 0.01]])  # which float16 does not hold
    zeros, quants = np.uint8([[13, 7]]), np.zeros((1, 64), np.uint8)
    out = np.zeros((1, 2 * 20), np.uint8)
    uint4_to_q4_1(write_blocks(quants, scales, zeros, 4), out)
    minima = out.reshape(2, 20)[:, 2:4].copy().view(np.float16)[:, 0]
    np.testing.assert_array_equal(minima, (-scales[0] * zeros[0]).astype(np.float16))
    assert minima[0] != np.float16(-13 * np.float32(np.float16(scales[0, 0])))


@pytest.mark.parametrize("scheme", [Scheme(order="act"), Scheme("awq", symmetric=False)], ids=str)
def test_rows_are_the_same_in_whatever_pieces_they_are_made(tiny, tmp_path, monkeypatch, scheme):
    source = load_model(str(write(tiny, tmp_path / "m", small(tiny, scheme)))).source
    tensor = source.tensor(f"{DOWN}.weight")
    whole = tensor.rows()
    monkeypatch.setattr(group_matrices, "CHUNK_WEIGHTS", 1)
    for first, end in ((0, 64), (3, 61), (8, 9), (63, 64), (5, 5)):
        np.testing.assert_array_equal(tensor.rows(slice(first, end)), whole[first:end])


@pytest.mark.parametrize("method", ["gptq", "awq", CT])
def test_parts_of_a_matrix_may_lie_in_several_files(tiny, tmp_path, method):
    made = small(tiny, Scheme(method, symmetric=method != "awq"))
    directory = write(tiny, tmp_path / "m", made)
    (directory / "model.safetensors").unlink()
    shards = {f"model-0000{n}-of-00003.safetensors": sorted(made.tensors)[n::3] for n in range(3)}
    for file, names in shards.items():
        save_file({name: made.tensors[name] for name in names}, directory / file)
    index = {name: file for file, names in shards.items() for name in names}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    source = load_model(str(directory)).source
    for name, values in made.weights.items():
        np.testing.assert_array_equal(source.tensor(name).to_float32(), values)


@pytest.mark.parametrize(
    ("scheme", "part", "unset"), [(Scheme(CT), "weight_g_idx", -1), (Scheme(), "g_idx", 0)]
)
def test_groups_that_nobody_filled_in_are_neighbours(tiny, tmp_path, scheme, part, unset):
    made = small(tiny, scheme)
    made = damage(made, {part: torch.full((96,), unset, dtype=torch.int32)})
    tensor = load_model(str(write(tiny, tmp_path / "m", made))).source.tensor(f"{DOWN}.weight")
    np.testing.assert_array_equal(tensor.to_float32(), made.weights[tensor.name])


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


def test_a_file_of_that_name_that_has_no_bits_is_another_tool_s(tiny, tmp_path):
    directory = tiny.directory(tmp_path / "m", tiny.model())
    (directory / "quant_config.json").write_text('{"batch_num": 1}')
    load_model(str(directory))


def test_config_json_counts_before_a_tool_s_own_file(tiny, tmp_path):
    directory = write(tiny, tmp_path / "m", small(tiny))
    (directory / "quantize_config.json").write_text('{"bits": 3}')
    load_model(str(directory))
    config = json.loads((directory / "config.json").read_text())
    config["compression_config"] = config.pop("quantization_config")
    (directory / "config.json").write_text(json.dumps(config))
    load_model(str(directory))


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


def test_outputs_that_are_no_whole_words_need_no_zero_points(tmp_path):
    matrix = quantised(np.random.default_rng(0).standard_normal((12, 64)), Scheme())
    parts = parts_of(matrix, Scheme())
    del parts["qzeros"]
    path = tmp_path / "model.safetensors"
    save_file({f"m.{name}": part for name, part in parts.items()}, path)
    config = JsonObject(path, {"quantization_config": Scheme().config()})
    found = read_alone(path, config, (12, 64)).to_float32()
    np.testing.assert_array_equal(found, matrix.weights().astype(np.float32))


@settings(deadline=None, max_examples=60)
@given(drawn=matrices())
def test_whatever_is_packed_is_read_again(tmp_path_factory, drawn):
    scheme, matrix = drawn
    path = tmp_path_factory.mktemp("drawn") / "model.safetensors"
    save_file({f"m.{name}": part for name, part in parts_of(matrix, scheme).items()}, path)
    config = JsonObject(path, {"quantization_config": scheme.config()})
    tensor = read_alone(path, config, matrix.q.shape)
    np.testing.assert_array_equal(tensor.to_float32(), matrix.weights().astype(np.float32))
