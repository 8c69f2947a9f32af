"""GGUF files with a SentencePiece vocabulary, as those of Llama 2, Mistral 7B and TinyLlama."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.loader import load_model
from compute_plane.model.tokenizer_json import BYTE, NORMAL, USER_DEFINED
from tests.compute_plane.model.sentence_piece_models import PieceModel, assembled

PIECES = ("\u2581", "a", "b", "ab", "\u2581a", "abab")  # with the usual 259, as many as rows


@pytest.fixture(scope="module")
def pieces() -> PieceModel:
    return assembled((piece, -float(index)) for index, piece in enumerate(PIECES[::-1]))


@pytest.fixture
def write(tiny, tmp_path, pieces):
    """Writes a file; keys not named are as converters write them, those that are None left out."""

    def write(**values):
        of_bytes = ["merges", "pre", "model", "tokens", "token_type"]
        of_bytes += [f"{kind}_token_id" for kind in ("bos", "eos")]

        def change(writer) -> None:
            keys = {
                "model": "llama",
                "tokens": pieces.tokens,
                "scores": pieces.scores,
                "token_type": pieces.types,
                "bos_token_id": 1,
                "eos_token_id": 2,
            }
            for key, value in (keys | values).items():
                name = f"tokenizer.ggml.{key}"
                if value is None:
                    continue
                if isinstance(value, str):
                    writer.add_string(name, value)
                elif isinstance(value, bool):
                    writer.add_bool(name, value)
                elif isinstance(value, int):
                    writer.add_uint32(name, value)
                else:
                    writer.add_array(name, value)

        return tiny.gguf(
            tmp_path / "m.gguf",
            tiny.model(),
            change=change,
            skip_keys=tuple(f"tokenizer.ggml.{key}" for key in of_bytes),
        )

    return write


def changed(values, index, value):
    return [*values[:index], value, *values[index + 1 :]]


def test_the_tokens_are_those_of_sentencepiece_behind_a_bos_token(write, pieces):
    assets = load_model(str(write())).assets
    assert (assets.bos_token_id, assets.add_bos_token) == (1, True)
    assert assets.eos_token_ids == (2,)
    tokenizer = Tokenizer.from_buffer(assets.tokenizer_json)
    for text in ("abab", "  ab é\n", "", "bb</"):
        assert tokenizer.encode(text).ids == pieces.theirs.encode(text)
    assert tokenizer.encode("a</s>a").ids == [*[pieces.tokens.index("\u2581a"), 2] * 2][:3]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=5)
@given(scores=st.lists(st.floats(-1e6, 1e6, width=32), min_size=265, max_size=265))
def test_any_scores_are_taken_as_they_are(write, pieces, scores):
    assets = load_model(str(write(scores=scores))).assets
    same = dataclasses.replace(pieces, scores=scores)
    assert assets.tokenizer_json == same.tokenizer_json()


def test_whether_a_space_or_bos_comes_in_front_is_as_the_file_says(write):
    assets = load_model(str(write(add_space_prefix=False, add_bos_token=False))).assets
    assert not assets.add_bos_token
    tokenizer = Tokenizer.from_buffer(assets.tokenizer_json)
    assert tokenizer.encode("ab a").tokens == ["ab", "\u2581a"]
    assert tokenizer.decode(tokenizer.encode(" a").ids) == " a"


def test_special_tokens_that_the_file_does_not_name_are_the_usual_ones(write):
    assets = load_model(str(write(bos_token_id=None, eos_token_id=None))).assets
    assert (assets.bos_token_id, assets.eos_token_ids, assets.add_bos_token) == (1, (2,), True)


def test_merges_in_the_file_are_not_looked_at(write, pieces):
    assets = load_model(str(write(merges=["no merges"]))).assets
    assert assets.tokenizer_json == pieces.tokenizer_json()


def test_an_end_of_turn_that_a_converter_calls_user_defined_ends_a_text(write, pieces):
    tokens = changed(pieces.tokens, 264, "<|im_end|>")
    types = changed(pieces.types, 264, USER_DEFINED)
    assets = load_model(str(write(tokens=tokens, token_type=types))).assets
    assert assets.eos_token_ids == (2, 264)


def test_runs_of_spaces_that_are_user_defined_are_found_in_the_text_itself(write, pieces):
    """As in Gemma's files, which also have no space in front."""
    place = pieces.tokens.index("abab")
    tokens = changed(pieces.tokens, place, "   ")
    types = changed(pieces.types, place, USER_DEFINED)
    path = write(tokens=tokens, token_type=types, add_space_prefix=False)
    tokenizer = Tokenizer.from_buffer(load_model(str(path)).assets.tokenizer_json)
    text = "ab   b a"
    encoded = tokenizer.encode(text)
    assert encoded.tokens == ["ab", "   ", "b", "\u2581a"]
    assert tokenizer.decode(encoded.ids) == text


WRONG = {
    "key tokenizer.ggml.scores is missing": lambda _: {"scores": None},
    "265 tokens, but tokenizer.ggml.scores has 264": lambda m: {"scores": m.scores[1:]},
    "tokenizer.ggml.scores must have at most 265 elements, got 266": lambda m: {
        "scores": [*m.scores, 0.0]
    },
    "tokenizer.ggml.scores: element 260 must be finite, got nan": lambda m: {
        "scores": changed(m.scores, 260, float("nan"))
    },
    "tokenizer.ggml.scores: element 3 must be finite, got -inf": lambda m: {
        "scores": changed(m.scores, 3, float("-inf"))
    },
    "tokenizer.ggml.scores must be an array of numbers, but it is an array of int32": lambda _: {
        "scores": [0] * 265
    },
    "tokenizer.ggml.tokens: no token <0x0A>, so not every text has tokens": lambda m: {
        "tokens": changed(m.tokens, 13, "c")
    },
    "tokenizer.ggml.token_type: token <0x0A> must be of type 6 (byte), got 1": lambda m: {
        "token_type": changed(m.types, 13, NORMAL)
    },
    "tokenizer.ggml.token_type: token 'ab' must not be of type 6 (byte)": lambda m: {
        "token_type": changed(m.types, m.tokens.index("ab"), BYTE)
    },
    "token 'a' is in the vocabulary twice": lambda m: {
        "tokens": changed(m.tokens, m.tokens.index("ab"), "a")
    },
    "tokenizer.ggml.tokens: token 264 must have at most 1024 characters, got 1025": lambda m: {
        "tokens": changed(m.tokens, 264, "a" * 1025)
    },
}


@pytest.mark.parametrize("words", WRONG)
def test_a_vocabulary_that_cannot_be_is_refused_by_file_and_key(write, pieces, words):
    path = write(**WRONG[words](pieces))
    with pytest.raises(ModelFileError) as caught:
        load_model(str(path))
    assert caught.value.message == f"{path}: {words}"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("remove_extra_whitespaces", True),
        ("precompiled_charsmap", [1, 2]),
    ],
)
def test_what_would_give_other_tokens_is_refused_by_name(write, key, value):
    with pytest.raises(UnsupportedModelError, match=rf"tokenizer\.ggml\.{key} .*is not supported"):
        load_model(str(write(**{key: value})))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bits_load_or_are_refused(write, tmp_path, data):
    path = tmp_path / "m.gguf"
    content = bytearray(path.read_bytes() if path.exists() else write().read_bytes())
    first, end = content.index(b"tokenizer.ggml.tokens"), content.index(b"token_embd.weight")
    places = data.draw(st.lists(st.integers(8 * first, 8 * end - 1), min_size=1, max_size=3))
    for place in places:
        content[place // 8] ^= 1 << place % 8
    flipped = tmp_path / "flipped.gguf"
    flipped.write_bytes(content)
    message = None
    try:
        assets = load_model(str(flipped)).assets
        tokenizer = Tokenizer.from_buffer(assets.tokenizer_json)
        tokenizer.decode(tokenizer.encode("ab \u00e9").ids)
    except ModelFileError as fault:
        message = fault.message
    assert message is None or (message.startswith(f"{flipped}: ") and message.isprintable())
