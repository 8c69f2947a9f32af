from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.loader import load_model
from compute_plane.model.rope_scaling import Llama3Scaling
from tests.compute_plane.model.llama_weights import decoded_weights


def write_safetensors(path, tensors, *, header=None):
    """Write name → (dtype, shape, bytes) by hand; `header` replaces the length field."""
    entries, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        entries[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    text = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text) if header is None else header) + text + data)


def bfloat16(values):
    """Cut float32 values to bfloat16; returns bytes and what they mean."""
    bits = values.view(np.uint32) >> 16
    return bits.astype("<u2").tobytes(), (bits << 16).view(np.float32)


@pytest.mark.parametrize("tied", [True, False])
def test_float32_weights_come_back_to_the_bit(tiny, tmp_path, tied):
    model = tiny.model(tied=tied)
    loaded = load_model(str(tiny.directory(tmp_path / "tiny-llama", model)))
    assert (loaded.spec.name, loaded.spec.weight_format) == ("tiny-llama", "F32")
    assert loaded.spec.tie_embeddings is tied
    assert loaded.spec.num_parameters == sum(w.size for w in model.weights.values())
    for name, values in model.weights.items():
        np.testing.assert_array_equal(loaded.source.tensor(name).to_float32(), values)
    weights = decoded_weights(loaded)
    assert (weights.lm_head is weights.embedding) is tied
    np.testing.assert_array_equal(
        weights.layers[1].q, model.weights["model.layers.1.self_attn.q_proj.weight"]
    )


def test_half_and_bfloat_weights_come_back_to_the_bit(tiny, tmp_path):
    model = tiny.model()
    directory = tiny.directory(tmp_path / "m", model)
    stored, expected = {}, {}
    for index, (name, values) in enumerate(model.weights.items()):
        if index % 2:
            content, expected[name] = bfloat16(values)
            stored[name] = ("BF16", values.shape, content)
        else:
            half = values.astype("<f2")
            stored[name] = ("F16", values.shape, half.tobytes())
            expected[name] = half.astype(np.float32)
    write_safetensors(directory / "model.safetensors", stored)
    loaded = load_model(str(directory))
    for name, values in expected.items():
        np.testing.assert_array_equal(loaded.source.tensor(name).to_float32(), values)


def test_weights_may_be_spread_over_indexed_files(tiny, tmp_path):
    model = tiny.model(tied=False)
    directory = tiny.directory(tmp_path / "m", model)
    (directory / "model.safetensors").unlink()
    names = list(model.weights)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, part in parts.items():
        save_file({name: model.weights[name] for name in part}, directory / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    loaded = load_model(str(directory))
    for name, values in model.weights.items():
        np.testing.assert_array_equal(loaded.source.tensor(name).to_float32(), values)

    index.write_text(json.dumps({"weight_map": weight_map | {"x": "../../secret"}}))
    with pytest.raises(ModelFileError, match=r"index\.json: .*must name files of this directory"):
        load_model(str(directory))
    index.write_text(json.dumps({"weight_map": weight_map | {"x": "c.safetensors"}}))
    with pytest.raises(ModelFileError, match=r"c\.safetensors: No such file"):
        load_model(str(directory))
    save_file({names[0]: model.weights[names[0]]}, directory / "c.safetensors")
    with pytest.raises(ModelFileError, match=r"c\.safetensors: .*is also in a\.safetensors"):
        load_model(str(directory))


def test_a_configuration_that_ties_yields_to_an_output_matrix_of_its_own(tiny, tmp_path):
    model = tiny.model(tied=False)
    tie = {"tie_word_embeddings": True}
    loaded = load_model(str(tiny.directory(tmp_path / "own", model, config=tie)))
    assert not loaded.spec.tie_embeddings
    np.testing.assert_array_equal(decoded_weights(loaded).lm_head, model.weights["lm_head.weight"])
    model.weights["lm_head.weight"] = model.weights["model.embed_tokens.weight"].copy()
    loaded = load_model(str(tiny.directory(tmp_path / "same", model, config=tie)))
    assert loaded.spec.tie_embeddings
    assert "lm_head.weight" not in loaded.source.names


def test_buffers_that_old_checkpoints_stored_are_passed_over(tiny, tmp_path):
    model = tiny.model()
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    loaded = load_model(str(tiny.directory(tmp_path / "m", model, weights=model.weights | extra)))
    assert {*loaded.source.names} == {*model.weights}


def test_llama3_scaling_is_read_from_old_and_new_configurations(tiny, tmp_path):
    scaling = {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = Llama3Scaling(32.0, 1.0, 4.0, 8192)
    old = {"rope_scaling": scaling | {"rope_type": "llama3"}, "rope_theta": 5e5}
    new = {"rope_parameters": scaling | {"rope_type": "llama3", "rope_theta": 5e5}}
    for name, config in {"old": old, "new": new}.items():
        spec = load_model(str(tiny.directory(tmp_path / name, tiny.model(), config=config))).spec
        assert (spec.rope_scaling, spec.rope_theta) == (expected, 5e5)


def test_mistral_without_a_sliding_window_is_llama(tiny, tmp_path):
    config = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    for name, window in {"none": None, "wide": 512}.items():
        directory = tiny.directory(
            tmp_path / name, tiny.model(), config=config | {"sliding_window": window}
        )
        assert load_model(str(directory)).spec.architecture == "llama"


UNSUPPORTED = {
    "model_type qwen3_asr": {"model_type": "qwen3_asr"},
    "model_type none": {"model_type": None},
    "architectures must name": {"architectures": ["LlamaForSequenceClassification"]},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "hidden_act must be silu, got gelu": {"hidden_act": "gelu"},
    "RoPE scaling dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "partial rotary": {"rope_parameters": {"partial_rotary_factor": 0.5}},
    "quantization_config.quant_method must be gptq": {
        "quantization_config": {"quant_method": "bitsandbytes"}
    },
}


@pytest.mark.parametrize("words", UNSUPPORTED)
def test_what_is_not_supported_is_refused_by_name(tiny, tmp_path, words):
    directory = tiny.directory(tmp_path / "m", tiny.model(), config=UNSUPPORTED[words])
    with pytest.raises(UnsupportedModelError) as caught:
        load_model(str(directory))
    assert words in caught.value.message
    assert caught.value.message.startswith(f"{directory / 'config.json'}: ")


FAULTY = {
    "hidden_size is missing": {"hidden_size": None},
    "hidden_size must be an integer, got '64'": {"hidden_size": "64"},
    "hidden_size must be an integer, got True": {"hidden_size": True},
    "must be an integer of at most": {"hidden_size": 10**30},
    "rms_norm_eps must be a number, got 'x'": {"rms_norm_eps": "x"},
    "rms_norm_eps must be a finite number": {"rms_norm_eps": float("nan")},
    "rope_scaling must be an object": {"rope_scaling": 3},
    "rope_scaling.factor is missing": {"rope_scaling": {"rope_type": "llama3"}},
    "vocab_size must be 1 to": {"vocab_size": -5},
    "num_layers must be 1 to": {"num_hidden_layers": 10**12},
    "2000 layers are declared, but the file has 20 tensors": {"num_hidden_layers": 2000},
    "not a multiple of num_attention_heads 0": {"num_attention_heads": 0, "head_dim": None},
    "has shape [265, 64], the model needs [265, 65]": {"hidden_size": 65},
    "missing tensors: model.layers.2.input_layernorm.weight": {"num_hidden_layers": 3},
    "tensors that a Llama model does not have: model.layers.1": {"num_hidden_layers": 1},
    "has id 264, the model has 200 logits": None,
    "eos_token_id must be below 265, got 265": {"eos_token_id": 265},
    "bos_token_id must be below 265, got 'x'": {"bos_token_id": ["x"]},
}


@pytest.mark.parametrize("words", FAULTY)
def test_a_configuration_that_is_wrong_is_refused_with_its_fault(tiny, tmp_path, words):
    model, config = tiny.model(), FAULTY[words]
    if config is None:
        name = "model.embed_tokens.weight"
        model.weights[name] = model.weights[name][:200].copy()
        config = {"vocab_size": 200}
    directory = tiny.directory(tmp_path / "m", model, config=config)
    with pytest.raises(ModelFileError) as caught:
        load_model(str(directory))
    assert words in caught.value.message
    assert caught.value.message.startswith(str(directory))
    assert caught.value.message.isprintable()


def test_special_tokens_and_template_come_from_the_files_that_generation_uses(tiny, tmp_path):
    files = {
        "generation_config.json": {"eos_token_id": [0, 2], "bos_token_id": 0},
        "tokenizer_config.json": {
            "bos_token": {"content": "<|im_start|>"},
            "eos_token": "<|im_end|>",
            "pad_token": None,
            "add_bos_token": True,
            "chat_template": [
                {"name": "tool_use", "template": "no"},
                {"name": "default", "template": "yes"},
            ],
        },
    }
    directory = tiny.directory(tmp_path / "m", tiny.model(), files=files)
    assets = load_model(str(directory)).assets
    assert (assets.bos_token_id, assets.eos_token_ids, assets.pad_token_id) == (1, (0, 2), None)
    assert assets.add_bos_token
    assert assets.chat_template == "yes"
    assert assets.tokenizer_json == (directory / "tokenizer.json").read_bytes()
    (directory / "chat_template.jinja").write_text("{{ 'file' }}")
    assert load_model(str(directory)).assets.chat_template == "{{ 'file' }}"


def test_bos_is_added_where_the_tokenizer_itself_adds_it(tiny, tmp_path):
    directory = tiny.directory(tmp_path / "m", tiny.model())
    assert not load_model(str(directory)).assets.add_bos_token
    document = json.loads((directory / "tokenizer.json").read_text())
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}
        },
    }
    (directory / "tokenizer.json").write_text(json.dumps(document))
    assert load_model(str(directory)).assets.add_bos_token


def test_a_directory_whose_name_is_no_text_gives_a_name_that_can_be_sent(tiny, tmp_path):
    directory = tiny.directory(Path(os.fsdecode(os.fsencode(tmp_path) + b"/m\xff")), tiny.model())
    assert load_model(str(directory)).spec.name == r"m\udcff"


def test_added_tokens_without_logits_are_left_out_of_the_tokenizer(tiny, tmp_path):
    """Text models of a family have the mark of its images behind their vocabulary (Gemma 3)."""
    document = tiny.tokenizer()
    mark = {**document["added_tokens"][0], "id": len(tiny.tokens), "content": "<image>"}
    document["added_tokens"].append(mark)
    files = {"tokenizer.json": document}
    loaded = load_model(str(tiny.directory(tmp_path / "m", tiny.model(), files=files)))
    tokenizer = Tokenizer.from_buffer(loaded.assets.tokenizer_json)
    assert tokenizer.token_to_id("<image>") is None
    assert max(tokenizer.encode("hello <image>").ids) < len(tiny.tokens)
    assert tokenizer.encode("<|im_end|>").ids == [2]
