"""What files of embedding models have besides: pooling, ends of texts, no head."""

from __future__ import annotations

import json

import numpy as np
import pytest
from gguf.constants import PoolingType
from tokenizers import Tokenizer

from compute_plane.model import pooling
from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.loader import load_model
from compute_plane.model.source import HUB_FILES

END = 2


def sentence_transformer(**modes: bool) -> dict:
    """A pooling module's configuration, as sentence-transformers write it."""
    return {
        "word_embedding_dimension": 64,
        **dict.fromkeys(pooling.MODES, False),
        "include_prompt": True,
        **modes,
    }


def template(before: list[str], behind: list[str]) -> dict:
    """A tokenizer.json's post-processor that puts special tokens around a text."""
    ids = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": END}
    special = [{"SpecialToken": {"id": name, "type_id": 0}} for name in [*before, *behind]]
    single = [*special[: len(before)], {"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "type": "TemplateProcessing",
        "single": [*single, *special[len(before) :]],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in [*before, *behind]
        },
    }


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (None, ""),
        (PoolingType.NONE, ""),
        (PoolingType.MEAN, "mean"),
        (PoolingType.CLS, "cls"),
        (PoolingType.LAST, "last"),
        (PoolingType.RANK, "rank"),
    ],
)
def test_a_gguf_file_says_its_pooling_by_number(tiny, tmp_path, kind, expected) -> None:
    def change(writer) -> None:
        if kind is not None:
            writer.add_pooling_type(kind)

    path = tiny.gguf(tmp_path / "m.gguf", tiny.model(), change=change)
    assert load_model(str(path)).spec.pooling == expected


def test_a_number_that_stands_for_none_is_refused(tiny, tmp_path) -> None:
    path = tiny.gguf(
        tmp_path / "m.gguf", tiny.model(), change=lambda w: w.add_uint32("llama.pooling_type", 5)
    )
    with pytest.raises(ModelFileError, match=r"llama\.pooling_type must be below 5, got 5"):
        load_model(str(path))


@pytest.mark.parametrize(
    ("modes", "expected"),
    [
        ({}, ""),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "cls+mean"),
    ],
)
def test_a_directory_of_sentence_transformers_names_it(tiny, tmp_path, modes, expected) -> None:
    directory = tiny.directory(tmp_path / "m", tiny.model())
    assert load_model(str(directory)).spec.pooling == ""
    path = directory / pooling.CONFIG
    path.parent.mkdir()
    path.write_text(json.dumps(sentence_transformer(**modes)))
    assert load_model(str(directory)).spec.pooling == expected
    assert pooling.CONFIG in HUB_FILES
    path.write_text("[]")
    with pytest.raises(ModelFileError, match="1_Pooling"):
        load_model(str(directory))


def test_what_the_post_processor_puts_behind_a_text_is_no_bos_token(tiny, tmp_path) -> None:
    """Qwen3-Embedding: the end of its texts is what its configuration calls BOS."""
    directory = tiny.directory(
        tmp_path / "m",
        tiny.model(),
        config={"bos_token_id": END},
        files={
            "tokenizer.json": tiny.tokenizer() | {"post_processor": template([], ["<|im_end|>"])}
        },
    )
    assets = load_model(str(directory)).assets
    assert assets.text_end_token_ids == (END,)
    assert not assets.add_bos_token


def test_what_stands_around_a_text_is_told_apart(tiny, tmp_path) -> None:
    around = template(["<|im_start|>"], ["<|im_end|>", "<|endoftext|>"])
    directory = tiny.directory(
        tmp_path / "m",
        tiny.model(),
        files={"tokenizer.json": tiny.tokenizer() | {"post_processor": around}},
    )
    assets = load_model(str(directory)).assets
    assert (assets.add_bos_token, assets.bos_token_id) == (True, 1)
    assert assets.text_end_token_ids == (END, 0)
    ids = Tokenizer.from_file(str(directory / "tokenizer.json")).encode("a b").ids
    assert ids[0] == 1
    assert ids[-2:] == [END, 0]


def test_the_settings_ask_for_an_end_where_the_tokenizer_adds_none(tiny, tmp_path) -> None:
    settings = {"add_eos_token": True, "eos_token": "<|im_end|>"}
    directory = tiny.directory(
        tmp_path / "m", tiny.model(), files={"tokenizer_config.json": settings}
    )
    assert load_model(str(directory)).assets.text_end_token_ids == (END,)
    del settings["eos_token"]
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelFileError, match="there is no EOS token"):
        load_model(str(directory))


def test_a_gguf_file_that_adds_an_end_token_says_which(tiny, tmp_path) -> None:
    path = tiny.gguf(tmp_path / "m.gguf", tiny.model())
    assert load_model(str(path)).assets.text_end_token_ids == ()
    path = tiny.gguf(tmp_path / "m.gguf", tiny.model(), change=lambda w: w.add_add_eos_token(True))
    assert load_model(str(path)).assets.text_end_token_ids == (END,)
    path = tiny.gguf(
        tmp_path / "m.gguf",
        tiny.model(),
        change=lambda w: w.add_add_eos_token(True),
        skip_keys=("tokenizer.ggml.eos_token_id",),
    )
    with pytest.raises(ModelFileError, match="add_eos_token is set"):
        load_model(str(path))


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_a_directory_without_a_head_is_read_with_and_without_prefix(tiny, tmp_path, prefix) -> None:
    model = tiny.model(tied=False)
    weights = {
        name.replace("model.", prefix, 1): values
        for name, values in model.weights.items()
        if name != "lm_head.weight"
    }
    directory = tiny.directory(
        tmp_path / "m", model, config={"architectures": ["LlamaModel"]}, weights=weights
    )
    loaded = load_model(str(directory))
    assert loaded.spec.tie_embeddings
    for name, values in model.weights.items():
        if name != "lm_head.weight":
            np.testing.assert_array_equal(loaded.source.tensor(name).to_float32(), values)


def test_attention_in_both_directions_is_refused_by_name(tiny, tmp_path) -> None:
    directory = tiny.directory(tmp_path / "m", tiny.model(), config={"is_causal": False})
    with pytest.raises(UnsupportedModelError, match="is_causal = false"):
        load_model(str(directory))
