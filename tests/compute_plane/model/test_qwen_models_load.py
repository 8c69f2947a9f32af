"""Qwen2 and Qwen3: what they have beside a Llama model is read, and nothing else is let through."""

from __future__ import annotations

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as GgmlType
from tokenizers import Tokenizer

from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.loader import load_model
from tests.compute_plane.model.group_checkpoints import Scheme, checkpoint

OWN = {
    "qwen2": ["self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"],
    "qwen3": ["self_attn.q_norm.weight", "self_attn.k_norm.weight"],
}
"""What each architecture has in a layer that Llama has not."""
EACH = [(architecture, part) for architecture, parts in OWN.items() for part in parts]
IN_GGUF = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v"} | {
    f"{part}_norm": f"attn_{part}_norm" for part in "qk"
}


def name_in_gguf(part: str) -> str:
    """The name that a GGUF file has for a part of layer 1."""
    _, module, kind = part.split(".")
    return f"blk.1.{IN_GGUF[module]}.{kind}"


@pytest.mark.parametrize("architecture", OWN)
@pytest.mark.parametrize("kind", [GgmlType.F32, GgmlType.Q8_0, GgmlType.Q4_1], ids=str)
def test_a_gguf_file_gives_the_weights_in_the_order_they_have(tiny, tmp_path, architecture, kind):
    model = tiny.model(architecture=architecture)
    loaded = load_model(str(tiny.gguf(tmp_path / "m.gguf", model, kind)))
    assert loaded.spec.architecture == architecture
    assert (loaded.spec.head_dim, loaded.spec.context_length) == (16, 512)
    assert set(loaded.source.names) == set(model.weights)
    for name, values in model.weights.items():
        array = loaded.source.tensor(name).to_float32()
        # Vectors are float32 whatever the matrices are, and their rows are never reordered.
        step = 0 if kind == GgmlType.F32 or values.ndim == 1 else 0.4
        np.testing.assert_allclose(array, values, rtol=0, atol=step)


@pytest.mark.parametrize("architecture", OWN)
def test_a_directory_gives_the_weights(tiny, tmp_path, architecture):
    model = tiny.model(architecture=architecture, tied=False)
    window = {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 1}
    loaded = load_model(str(tiny.directory(tmp_path / "m", model, config=window)))
    assert loaded.spec.architecture == architecture
    for name, values in model.weights.items():
        np.testing.assert_array_equal(loaded.source.tensor(name).to_float32(), values)


def test_what_a_configuration_of_qwen3_leaves_out_is_what_transformers_takes(tiny, tmp_path):
    model = tiny.model(architecture="qwen3", head_dim=128, num_heads=32, num_kv_heads=32)
    silent = {"head_dim": None, "num_key_value_heads": None}
    spec = load_model(str(tiny.directory(tmp_path / "m", model, config=silent))).spec
    assert (spec.head_dim, spec.num_kv_heads) == (128, 32)


@pytest.mark.parametrize(("architecture", "part"), EACH)
def test_a_missing_or_misshapen_vector_is_named(tiny, tmp_path, architecture, part):
    name = f"model.layers.1.{part}"
    model = tiny.model(architecture=architecture)
    model.weights[name] = model.weights[name][:-1].copy()
    with pytest.raises(ModelFileError, match=rf"{name} has shape .*the model needs"):
        load_model(str(tiny.directory(tmp_path / "a", model)))
    with pytest.raises(ModelFileError, match=rf"{name_in_gguf(part)} has shape"):
        load_model(str(tiny.gguf(tmp_path / "a.gguf", model)))
    del model.weights[name]
    with pytest.raises(ModelFileError, match=f"missing tensors: {name}"):
        load_model(str(tiny.directory(tmp_path / "b", model)))
    with pytest.raises(ModelFileError, match=rf"missing tensors: {name_in_gguf(part)}"):
        load_model(str(tiny.gguf(tmp_path / "b.gguf", model)))


@pytest.mark.parametrize(("architecture", "part"), EACH)
def test_a_vector_of_one_architecture_is_refused_in_the_others(tiny, tmp_path, architecture, part):
    other = {"qwen2": "qwen3", "qwen3": "qwen2"}[architecture]
    for host in ("llama", other):
        model = tiny.model(architecture=host)
        model.weights[f"model.layers.1.{part}"] = np.ones(4, np.float32)
        with pytest.raises(ModelFileError, match=name_in_gguf(part)):
            load_model(str(tiny.gguf(tmp_path / f"{host}.gguf", model)))


@pytest.mark.parametrize("architecture", OWN)
def test_a_bias_where_the_architecture_has_none_is_refused(tiny, tmp_path, architecture):
    model = tiny.model(architecture=architecture)
    model.weights["model.layers.0.self_attn.o_proj.bias"] = np.ones(64, np.float32)
    with pytest.raises(UnsupportedModelError, match=r"biases are not .*o_proj\.bias"):
        load_model(str(tiny.directory(tmp_path / "m", model)))


REFUSED = {
    "attention_bias = true": {"attention_bias": True},
    "RoPE scaling dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "architectures must name Qwen3ForCausalLM, got": {"architectures": ["Qwen3MoeForCausalLM"]},
    "model_type qwen3_asr": {"model_type": "qwen3_asr"},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_computed_otherwise_is_refused_by_name(tiny, tmp_path, words):
    model = tiny.model(architecture="qwen3")
    with pytest.raises(UnsupportedModelError) as caught:
        load_model(str(tiny.directory(tmp_path / "m", model, config=REFUSED[words])))
    assert words in caught.value.message


def test_a_group_wise_checkpoint_of_qwen2_keeps_its_biases_be_they_zeros(tiny, tmp_path):
    model = tiny.model(architecture="qwen2")
    made = checkpoint(model.weights, Scheme())
    name = "model.layers.0.self_attn.k_proj.bias"
    made.tensors[name] = made.tensors[name] * 0
    settings_of = {"quantization_config": made.scheme.config()}
    directory = tiny.directory(tmp_path / "m", model, config=settings_of)
    made.save(directory / "model.safetensors")
    loaded = load_model(str(directory))
    assert not loaded.source.tensor(name).to_float32().any()
    other = name.replace("k_proj", "q_proj")
    np.testing.assert_array_equal(loaded.source.tensor(other).to_float32(), made.weights[other])


@pytest.mark.parametrize("architecture", OWN)
def test_a_gguf_file_cuts_words_as_qwen_does_and_ends_at_its_end_tokens(
    tiny, tmp_path, architecture
):
    loaded = load_model(str(tiny.gguf(tmp_path / "m.gguf", tiny.model(architecture=architecture))))
    tokenizer = Tokenizer.from_buffer(loaded.assets.tokenizer_json)
    ids = tokenizer.encode("hello<|im_end|>  12").ids
    # Every digit is a word, and the space before it too: there is a token of two, not taken here.
    tokens = ["hello", "<|im_end|>", "Ġ", "Ġ", "1", "2"]
    assert [tiny.tokens[i] for i in ids] == tokens
    assert {tiny.tokens[i] for i in loaded.assets.eos_token_ids} == {"<|im_end|>", "<|endoftext|>"}
