"""Tiny models of gpt-oss's kind: logits and texts are transformers', codes of four bits or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as GgmlType

from compute_plane.cpu.executor import CpuExecutor
from compute_plane.cpu.packed_weights import pack_weights
from compute_plane.executor import weight_formats
from compute_plane.model import quantize
from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.hf_config import read_hf_spec
from compute_plane.model.json_file import JsonObject
from compute_plane.model.loader import load_model
from compute_plane.model.rope_scaling import YarnScaling, yarn_attention_factor
from compute_plane.model.spec import Mixture
from compute_plane.model.tensor import TensorFormat
from kernels.reference.clamped_mul import LIMIT, SLOPE
from kernels.reference.four_bit_floats import DOUBLED
from tests.compute_plane.executor.tiny_llama import pool_for
from tests.compute_plane.model.recorded_models import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    PROMPTS,
    Recorded,
    assert_same,
    record,
)
from tests.devices import STAND_IN, Target
from tests.golden.batch_driver import BatchDriver, DrivenSequence

CPU, CUDA = Target("cpu", "cpu"), STAND_IN
ROPE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 64, "truncate": False,
}  # fmt: skip
CONFIG = {
    "rope_parameters": ROPE, "sliding_window": 8, "attention_bias": True,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
KEYS = {
    "attention.sliding_window": 8, "rope.scaling.type": "yarn", "rope.scaling.factor": 8.0,
    "rope.scaling.original_context_length": 64,
}  # fmt: skip
CODES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]) / 2
MXFP4 = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []}}


@pytest.fixture(scope="module")
def recorded(tiny, tmp_path_factory) -> Recorded:
    made = tiny.model(architecture="gpt_oss", tied=False)
    return record(tiny, tmp_path_factory.mktemp("gpt-oss"), made, CONFIG, KEYS)


@pytest.mark.spread(3)
@pytest.mark.parametrize(("files", "target"), [("directory", CPU), ("gguf", CPU), ("gguf", CUDA)])
def test_greedy_texts_and_their_logits_are_those_of_transformers(
    recorded: Recorded, files: str, target: Target
) -> None:
    assert_same(recorded, load_model(str(getattr(recorded, files))), target)


def coded(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return codes, scales and what they stand for, of experts [E, K, N] with inputs first.

    As published: codes uint8 [E, N, K/32, 16], scales uint8 [E, N, K/32].
    """
    groups = np.swapaxes(values, 1, 2).reshape(len(values), values.shape[2], -1, 32)
    scales = np.floor(np.log2(np.abs(groups).max(-1))).astype(int) - 2
    nearest = np.abs(groups[..., None] / np.exp2(scales)[..., None, None] - CODES).argmin(-1)
    meant = CODES[nearest] * np.exp2(scales)[..., None]
    bytes_ = (nearest[..., 0::2] | nearest[..., 1::2] << 4).astype(np.uint8)
    rows = meant.reshape(*meant.shape[:2], -1)
    scales = np.ascontiguousarray(scales + 127).astype(np.uint8)  # the writer wants it so
    return bytes_, scales, np.swapaxes(rows, 1, 2).astype(np.float32)


def as_published(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a directory's tensors with experts of four bits; `weights` become what these mean."""
    stored = dict(weights)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        codes, scales, meant = coded(weights[name])
        weights[name][:] = meant
        del stored[name]
        stored |= {f"{name}_blocks": codes, f"{name}_scales": scales}
    return stored


@pytest.fixture(scope="module")
def published(tiny, tmp_path_factory) -> dict[str, Any]:
    """What transformers says of a model whose experts have four bits, and files that hold these."""
    folder, stored = tmp_path_factory.mktemp("mxfp4"), dict[str, np.ndarray]()
    made = tiny.model(architecture="gpt_oss", tied=False, seed=11)
    recorded = record(
        tiny, folder, made, CONFIG, KEYS,
        prepare=lambda weights: stored.update(as_published(weights)), expert_type=GgmlType.MXFP4,
    )  # fmt: skip
    directory = tiny.directory(folder / "published", made, config=CONFIG | MXFP4, weights=stored)
    return {"said": recorded, "directory": directory, "gguf": recorded.gguf}


@pytest.mark.spread(2)
@pytest.mark.parametrize(("files", "target"), [("directory", CPU), ("gguf", CPU), ("gguf", CUDA)])
def test_experts_of_four_bits_say_what_their_codes_mean(
    published: dict[str, Any], files: str, target: Target
) -> None:
    model = load_model(str(published[files]))
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    assert model.source.tensor(name).format.label == "MXFP4"
    assert_same(published["said"], model, target)


def test_what_a_configuration_leaves_out_is_what_transformers_means(tmp_path) -> None:
    from transformers import GptOssConfig

    said = {"max_position_embeddings": 131072, "num_hidden_layers": 5, "vocab_size": 300}
    said |= {"hidden_size": 96, "intermediate_size": 64, "num_attention_heads": 16}
    spec = read_hf_spec(JsonObject(tmp_path, said | {"model_type": "gpt_oss"}), "m")
    theirs = GptOssConfig(**said)
    rope = theirs.rope_parameters
    assert isinstance(spec.rope_scaling, YarnScaling)
    assert spec.rope_theta == rope["rope_theta"]
    assert spec.rope_scaling.factor == rope["factor"]
    assert spec.rope_scaling.original_context_length == rope["original_max_position_embeddings"]
    assert spec.rope_scaling.truncate == rope["truncate"]
    assert (spec.num_kv_heads, spec.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)
    assert spec.rms_norm_eps == theirs.rms_norm_eps
    assert spec.window == theirs.sliding_window
    windows = [kind == "sliding_attention" for kind in theirs.layer_types]
    assert [layer in spec.layers_with_window for layer in range(5)] == windows
    assert spec.mixture == Mixture(theirs.num_local_experts, theirs.num_experts_per_tok)
    assert spec.tie_embeddings == theirs.tie_word_embeddings
    assert (theirs.swiglu_limit, theirs.swiglu_alpha) == (LIMIT, SLOPE)


@pytest.mark.parametrize("files", ["directory", "gguf"])
def test_both_kinds_of_files_say_the_same(recorded: Recorded, files: str) -> None:
    spec = load_model(str(getattr(recorded, files))).spec
    assert spec.window == 8
    assert spec.layers_with_window == {0}
    assert spec.rope_scaling == YarnScaling(8.0, 64, yarn_attention_factor(8.0), truncate=False)
    assert (spec.has_sinks, spec.has_all_biases, spec.activation) == (True, True, "clamped")
    assert spec.mixture == Mixture(6, 2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"swiglu_limit": 5.0}, "swiglu_limit must be 7, got 5"),
        ({"swiglu_alpha": 1.0}, r"swiglu_alpha must be 1\.702, got 1"),
        ({"attention_bias": False}, "attention_bias must be true, got false"),
        ({"mlp_bias": True}, "mlp_bias = true is not supported"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}},
            "quantization_config.quant_method must be mxfp4, got gptq",
        ),
    ],
)
def test_what_computes_something_else_is_refused(tiny, tmp_path, config, message) -> None:
    made = tiny.model(architecture="gpt_oss", tied=False)
    directory = tiny.directory(tmp_path / "hf", made, config=CONFIG | config)
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(str(directory))


def test_codes_of_four_bits_are_gpt_oss_s_alone(tiny, tmp_path) -> None:
    directory = tiny.directory(tmp_path / "hf", tiny.model(), config=MXFP4)
    with pytest.raises(UnsupportedModelError, match=r"quant_method must be .*, got mxfp4"):
        load_model(str(directory))


BLOCKS = "model.layers.1.mlp.experts.down_proj_blocks"
SCALES = "model.layers.1.mlp.experts.down_proj_scales"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({SCALES: None}, f"missing tensors: {SCALES}"),
        (
            {SCALES: np.zeros((6, 64, 2), np.uint8)},
            r"\[6, 64, 2\], the model needs",
        ),
        ({BLOCKS: np.zeros((6, 64, 3, 8), np.uint8)}, r"has shape \[6, 64, 3, 8\]"),
        ({SCALES: np.zeros((6, 64, 3), np.float32)}, "has type F32"),
        (
            {"model.layers.0.mlp.experts.down_proj_bias": None},
            "missing tensors: model.layers.0.mlp.experts.down_proj_bias",
        ),
        ({"model.layers.0.self_attn.sinks": None}, "missing tensors: .*sinks"),
        ({"model.layers.0.mlp.router.bias": None}, "missing tensors: .*gate.bias"),
    ],
)
def test_experts_that_are_not_whole_are_refused_by_name(
    tiny, tmp_path, change: dict[str, Any], message: str
) -> None:
    made = tiny.model(architecture="gpt_oss", tied=False)
    stored = as_published(made.weights) | change
    weights = {name: values for name, values in stored.items() if values is not None}
    directory = tiny.directory(tmp_path / "hf", made, config=CONFIG | MXFP4, weights=weights)
    with pytest.raises(ModelFileError, match=message):
        load_model(str(directory))


def test_a_directory_that_lacks_all_of_a_layer_is_refused_by_name(tiny, tmp_path) -> None:
    made = tiny.model(architecture="gpt_oss", tied=False)
    first = "model.layers.0.mlp.experts."
    weights = {name: values for name, values in made.weights.items() if name.startswith(first)}
    directory = tiny.directory(tmp_path / "hf", made, config=CONFIG, weights=weights)
    missing = "missing tensors: model.layers.1.mlp.experts.gate_up_proj, .*gate_up_proj_bias"
    with pytest.raises(ModelFileError, match=missing):
        load_model(str(directory))


def codes_as_bytes(rows: np.ndarray, out: np.ndarray) -> None:
    """Turn rows of MXFP4 into rows of Q8_0, exactly."""
    blocks, target = rows.reshape(-1, 17), out.reshape(-1, 34)
    scales = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    target[:, :2] = scales.astype(np.float16).view(np.uint8)
    codes = np.concatenate((blocks[:, 1:] & 15, blocks[:, 1:] >> 4), axis=1)
    target[:, 2:] = np.array(DOUBLED, np.int8)[codes].view(np.uint8)


@pytest.mark.wide
def test_codes_of_four_bits_give_on_the_cpu_what_the_same_weights_give_in_eight(
    published: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a server runs them: in float32 nothing is as it is stored."""
    model, found = load_model(str(published["directory"])), []
    key = TensorFormat.MXFP4, TensorFormat.Q8_0
    monkeypatch.setitem(quantize._CONVERSIONS, key, codes_as_bytes)
    for runs_as in (TensorFormat.Q4_F, TensorFormat.Q8_0):
        monkeypatch.setitem(weight_formats.OWN_FORMAT, TensorFormat.MXFP4, runs_as)
        packed = pack_weights(model.spec, model.source, "auto")
        assert {(one.stored, one.runs_as) for one in packed.conversions} == {
            ("MXFP4", runs_as.label)
        }
        pool = pool_for(model.spec, NUM_BLOCKS, BLOCK_SIZE)
        with CpuExecutor(model.spec, packed, pool, num_threads=1, keep_logits=True) as executor:
            driver = BatchDriver(executor, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
            rows = [DrivenSequence(list(prompt)) for prompt in PROMPTS]
            output = executor.execute(driver.batch(rows))
            assert output.logits is not None
            found.append(output.logits.copy())
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-5)
    said = np.stack([rows[0] for rows in published["said"].logits])
    assert np.abs(found[0] - said).max() < 0.2 * np.abs(said).max()


def test_groups_that_are_not_whole_are_refused(tiny, tmp_path) -> None:
    made = tiny.model(architecture="gpt_oss", tied=False, intermediate_size=40)
    stored = dict(made.weights)
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.experts.down_proj"
        del stored[name]
        stored[f"{name}_blocks"] = np.zeros((6, 64, 1, 16), np.uint8)
        stored[f"{name}_scales"] = np.zeros((6, 64, 1), np.uint8)
    directory = tiny.directory(tmp_path / "hf", made, config=CONFIG | MXFP4, weights=stored)
    with pytest.raises(UnsupportedModelError, match="has 40 inputs; multiples of 32 are read"):
        load_model(str(directory))


def test_a_scale_that_is_no_number_is_found_when_weights_are_read(tiny, tmp_path) -> None:
    made = tiny.model(architecture="gpt_oss", tied=False)
    stored = as_published(made.weights)
    stored[SCALES][2, 5, 1] = 255
    directory = tiny.directory(tmp_path / "hf", made, config=CONFIG | MXFP4, weights=stored)
    model = load_model(str(directory))
    for dtype in ("auto", "float32"):
        with pytest.raises(ModelFileError, match="down_proj_blocks holds nan at row 5, column 32"):
            pack_weights(model.spec, model.source, dtype)
