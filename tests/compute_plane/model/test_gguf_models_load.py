from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as GgmlType
from tokenizers import Tokenizer

from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.loader import load_model
from compute_plane.model.rope import inverse_frequencies
from compute_plane.model.rope_scaling import FrequencyDivisors
from planes.errors import ConfigError
from tests.compute_plane.model.llama_weights import decoded_weights

KINDS = [
    GgmlType.F32,
    GgmlType.F16,
    GgmlType.BF16,
    GgmlType.Q8_0,
    GgmlType.Q4_0,
    GgmlType.Q4_1,
]


def as_stored(values, kind):
    """What is left of values once they were stored: the gguf package's own arithmetic."""
    if values.ndim == 1:
        return values
    return gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind).reshape(values.shape)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_comes_back_in_hugging_face_order_and_to_the_bit(tiny, tmp_path, kind, tied):
    model = tiny.model(tied=tied)
    loaded = load_model(str(tiny.gguf(tmp_path / "m.gguf", model, kind)))

    assert loaded.spec.weight_format == kind.name
    assert loaded.spec.tie_embeddings is tied
    assert loaded.spec.num_parameters == sum(w.size for w in model.weights.values())
    assert set(loaded.source.names) == set(model.weights)
    for name, values in model.weights.items():
        array = loaded.source.tensor(name).to_float32()
        np.testing.assert_array_equal(array, as_stored(values, kind))
        assert array.shape == values.shape == loaded.source.tensor(name).shape
        assert array.flags.c_contiguous
        assert array.flags.owndata or array.base.flags.owndata
        assert array.dtype == np.float32


def test_raw_rows_are_the_quantised_bytes_in_model_order(tiny, tmp_path):
    model = tiny.model()
    loaded = load_model(str(tiny.gguf(tmp_path / "m.gguf", model, GgmlType.Q4_1)))
    for name in (
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
    ):
        expected = gguf.quants.quantize(model.weights[name], GgmlType.Q4_1)
        np.testing.assert_array_equal(loaded.source.tensor(name).rows(), expected)


def test_the_spec_and_the_assets_are_those_of_the_file(tiny, tmp_path):
    loaded = load_model(str(tiny.gguf(tmp_path / "m.gguf", tiny.model())))
    spec, assets = loaded.spec, loaded.assets
    assert (spec.name, spec.architecture, spec.num_layers) == ("tiny", "llama", 2)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 2, 16)
    assert (spec.hidden_size, spec.intermediate_size, spec.context_length) == (64, 96, 512)
    assert (spec.rope_theta, spec.rope_scaling, spec.vocab_size) == (
        10000.0,
        None,
        len(tiny.tokens),
    )
    assert (assets.bos_token_id, assets.eos_token_ids, assets.pad_token_id) == (1, (2, 0), None)
    assert not assets.add_bos_token
    assert (assets.model_name, assets.chat_template) == ("tiny", "{{ messages[0].content }}")
    tokenizer = Tokenizer.from_buffer(assets.tokenizer_json)
    ids = tokenizer.encode("hello<|im_end|> hello\x00é").ids
    assert [tiny.tokens[i] for i in ids] == ["hello", "<|im_end|>", "Ġ", "hello", "Ā", "Ã", "©"]
    assert tokenizer.decode(ids) == "hello hello\x00é"


@pytest.mark.parametrize(
    ("marks", "ends"),
    [
        (("<|call|>", "<|return|>", "<|end|>"), (2, 4, 3, 0)),
        (("<|x|>", "<|y|>", "<|end|>"), (2, 5, 0)),
    ],
    ids=["gpt-oss's", "Phi-3's"],
)
def test_what_ends_messages_ends_no_answer_where_there_are_other_marks(tiny, tmp_path, marks, ends):
    tokens = [*tiny.tokens[:3], *marks, *tiny.tokens[6:]]

    def change(writer) -> None:
        (data,) = writer.kv_data
        data["tokenizer.ggml.tokens"].value = tokens
        data["tokenizer.ggml.token_type"].value = [3] * 6 + [1] * (len(tokens) - 6)
        writer.add_eot_token_id(5)

    path = tiny.gguf(tmp_path / "m.gguf", tiny.model(), change=change)
    assert load_model(str(path)).assets.eos_token_ids == ends


def test_stored_rope_divisors_scale_the_frequencies(tiny, tmp_path):
    divisors = np.array([1, 1, 1, 2, 2, 4, 8, 8], dtype=np.float32)
    path = tiny.gguf(
        tmp_path / "m.gguf",
        tiny.model(),
        change=lambda writer: writer.add_tensor("rope_freqs.weight", divisors),
    )
    spec = load_model(str(path)).spec
    assert spec.rope_scaling == FrequencyDivisors(tuple(divisors.tolist()))
    plain = 1 / np.power(10000.0, np.arange(8) / 8)
    np.testing.assert_allclose(inverse_frequencies(spec), plain / divisors, rtol=1e-6)


def with_kv_heads(tiny, folder, counts):
    def change(writer) -> None:
        del writer.kv_data[0]["llama.attention.head_count_kv"]
        writer.add_head_count_kv(counts)

    return str(tiny.gguf(folder / "m.gguf", tiny.model(), change=change))


def test_numbers_of_heads_may_be_said_for_each_layer(tiny, tmp_path):
    assert load_model(with_kv_heads(tiny, tmp_path, [2, 2])).spec.num_kv_heads == 2


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ([2], "must have a number for each of 2 layers"),
        ([2, 2, 2], "must have a number for each of 2 layers"),
        ([0, 2], r"must be the same in all layers, got \[0, 2\]"),
        ([2, 4], r"must be the same in all layers, got \[2, 4\]"),
    ],
)
def test_layers_with_other_numbers_of_heads_are_refused(tiny, tmp_path, counts, words):
    with pytest.raises(ModelFileError, match=words):
        load_model(with_kv_heads(tiny, tmp_path, counts))


def test_a_model_that_declares_bos_says_so(tiny, tmp_path):
    path = tiny.gguf(
        tmp_path / "m.gguf", tiny.model(), change=lambda writer: writer.add_add_bos_token(True)
    )
    assert load_model(str(path)).assets.add_bos_token


UNSUPPORTED = {
    "architecture mamba": (
        "general.architecture",
        lambda w: w.add_string("general.architecture", "mamba"),
    ),
    "RoPE scaling mrope": (None, lambda w: w.add_string("llama.rope.scaling.type", "mrope")),
    "by tensor rope_freqs.weight together": (
        None,
        lambda w: (
            w.add_float32("llama.rope.scale_linear", 4.0),
            w.add_tensor("rope_freqs.weight", np.ones(8, np.float32)),
        ),
    ),
    "llama.rope.dimension_count": (
        "llama.rope.dimension_count",
        lambda w: w.add_rope_dimension_count(8),
    ),
    "llama.logit_scale": (None, lambda w: w.add_logit_scale(0.5)),
    "tokenizer t5": ("tokenizer.ggml.model", lambda w: w.add_tokenizer_model("t5")),
    "pre-tokenizer falcon": ("tokenizer.ggml.pre", lambda w: w.add_tokenizer_pre("falcon")),
    "biases": (None, lambda w: w.add_tensor("blk.0.attn_q.bias", np.zeros(64, np.float32))),
    "type IQ3_S": (
        None,
        lambda w: w.add_tensor("x", np.zeros((1, 110), np.uint8), raw_dtype=GgmlType.IQ3_S),
    ),
}


@pytest.mark.parametrize("words", UNSUPPORTED)
def test_what_is_not_supported_is_refused_by_name(tiny, tmp_path, words):
    replaced, change = UNSUPPORTED[words]
    skipped = () if replaced is None else (replaced,)
    path = tiny.gguf(tmp_path / "m.gguf", tiny.model(), change=change, skip_keys=skipped)
    with pytest.raises(UnsupportedModelError) as caught:
        load_model(str(path))
    assert words in caught.value.message
    assert caught.value.message.startswith(f"{path}: ")
    assert "\n" not in caught.value.message
    assert isinstance(caught.value, ConfigError)


def test_missing_and_misshapen_and_superfluous_tensors_are_named(tiny, tmp_path):
    model = tiny.model()
    del model.weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ModelFileError, match=r"missing tensors: blk\.1\.ffn_up\.weight"):
        load_model(str(tiny.gguf(tmp_path / "a.gguf", model)))

    model = tiny.model()
    name = "model.layers.0.mlp.up_proj.weight"
    model.weights[name] = model.weights[name][:-1]
    with pytest.raises(ModelFileError, match=r"blk\.0\.ffn_up\.weight has shape \[95, 64\].*\[96,"):
        load_model(str(tiny.gguf(tmp_path / "b.gguf", model)))

    extra = lambda writer: writer.add_tensor("blk.0.extra.weight", np.zeros(4, np.float32))  # noqa: E731
    with pytest.raises(ModelFileError, match=r"does not have: blk\.0\.extra\.weight"):
        load_model(str(tiny.gguf(tmp_path / "c.gguf", tiny.model(), change=extra)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_weight_that_is_not_finite_is_reported_with_its_tensor(tiny, tmp_path, kind, value):
    model = tiny.model()
    path = tiny.gguf(tmp_path / "m.gguf", model, kind)
    reader = gguf.GGUFReader(path)
    entry = next(t for t in reader.tensors if t.name == "blk.1.ffn_gate.weight")
    start, row = int(entry.data_offset), int(entry.n_bytes) // 96
    content = bytearray(path.read_bytes())
    stored = {GgmlType.F32: np.float32(value).tobytes(), GgmlType.BF16: None}.get(
        kind, np.float16(value).tobytes()
    )
    if stored is None:
        stored = np.float32(value).tobytes()[2:]
    content[start + 5 * row : start + 5 * row + len(stored)] = stored
    path.write_bytes(content)
    loaded = load_model(str(path))
    with pytest.raises(ModelFileError, match=r"blk\.1\.ffn_gate\.weight holds .* at row 5"):
        decoded_weights(loaded)


FAULTY_VOCABULARIES = {
    "'hello' is in the vocabulary twice": (lambda t, m: ([*t[:-1], "hello"], m)),
    "does not join two tokens": (lambda t, m: (t, [*m, "zz zz"])),
    "('h e l') does not join": (lambda t, m: (t, [*m, "h e l"])),
    "is empty": (lambda t, m: ([*t[:-1], ""], m)),
    "has 264 tokens": (lambda t, m: (t[:-1], m)),
}


@pytest.mark.parametrize("words", FAULTY_VOCABULARIES)
def test_a_vocabulary_that_contradicts_itself_is_refused(tiny, tmp_path, words):
    tokens, merges = FAULTY_VOCABULARIES[words](
        list(tiny.tokens), ["h e", "l l", "he ll", "hell o"]
    )

    def change(writer):
        writer.add_token_list(tokens)
        writer.add_token_merges(merges)

    path = tiny.gguf(
        tmp_path / "m.gguf",
        tiny.model(),
        change=change,
        skip_keys=("tokenizer.ggml.tokens", "tokenizer.ggml.merges"),
    )
    with pytest.raises(ModelFileError) as caught:
        load_model(str(path))
    assert words in caught.value.message
