"""GGUF files whose pieces are joined by a list of merges: Gemma 4's."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.loader import load_model
from compute_plane.model.sentence_pieces import BYTE_PIECES
from compute_plane.model.tokenizer_json import BYTE, CONTROL, NORMAL, USER_DEFINED

SPECIALS = ("<pad>", "<eos>", "<bos>")
PIECES = ("\u2581", "a", "b", "ab", "\u2581a", "ba")  # with the rest as many as the model has rows
MERGES = ["b a", "\u2581 a", "a b"]
TOKENS = [*SPECIALS, *BYTE_PIECES, *PIECES]
TYPES = [CONTROL] * 3 + [BYTE] * 256 + [NORMAL] * len(PIECES)
FIRST = TOKENS.index("\u2581")


@pytest.fixture
def write(tiny, tmp_path):
    """Writes a file; keys not named are as converters write them, those that are None left out."""

    def write(**values):
        of_bytes = ["merges", "pre", "model", "tokens", "token_type"]
        of_bytes += [f"{kind}_token_id" for kind in ("bos", "eos")]

        def change(writer) -> None:
            keys = {
                "model": "gemma4",
                "tokens": TOKENS,
                "scores": [-1000.0] * len(TOKENS),
                "token_type": TYPES,
                "merges": MERGES,
                "bos_token_id": 2,
                "eos_token_id": 1,
                "add_bos_token": True,
                "add_space_prefix": False,
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


def read(path) -> Tokenizer:
    return Tokenizer.from_buffer(load_model(str(path)).assets.tokenizer_json)


@pytest.fixture(scope="module")
def published() -> Tokenizer:
    """The tokenizer as such models are published with it."""
    found = Tokenizer(
        models.BPE(
            {token: index for index, token in enumerate(TOKENS)},
            [(left, right) for left, right in (merge.split() for merge in MERGES)],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    found.normalizer = normalizers.Replace(" ", "\u2581")
    found.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    found.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    found.add_special_tokens(list(SPECIALS))
    return found


@pytest.mark.parametrize(
    "text", ["aba", " ab  a b", "", "b\n\na é", "a\u2581b", "<0x41>", "😀 a\r\n\ta", "<eos>a<bos>"]
)
def test_the_tokens_are_those_of_the_published_tokenizer(write, published, text):
    ours = read(write())
    encoded = ours.encode(text)
    assert encoded.ids == published.encode(text).ids
    expected = text.replace("\u2581", " ").replace("<eos>", "").replace("<bos>", "")
    assert ours.decode(encoded.ids) == expected


def test_merges_say_what_is_joined_first_and_scores_nothing(write):
    scores = [0.0] * FIRST + [float(index) for index in range(len(PIECES))]
    assert read(write(scores=scores)).encode("aba").tokens == ["a", "ba"]
    merges = ["a b", "b a", "\u2581 a"]
    assert read(write(merges=merges)).encode("aba").tokens == ["ab", "a"]
    assert read(write(scores=None)).encode("aba").tokens == ["a", "ba"]


@pytest.mark.parametrize("said", [True, False, None])
def test_a_text_begins_with_bos_whatever_the_converter_has_written(write, said):
    assets = load_model(str(write(add_bos_token=said))).assets
    assert (assets.bos_token_id, assets.add_bos_token) == (2, True)
    assert not load_model(str(write(bos_token_id=None))).assets.add_bos_token


def test_a_turn_ends_by_its_mark_and_where_a_result_is_to_follow(write):
    tokens, types = list(TOKENS), list(TYPES)
    for place, token, kind in ((-1, "<turn|>", CONTROL), (-2, "<|tool_response>", USER_DEFINED)):
        tokens[place], types[place] = token, kind
    ends = load_model(str(write(tokens=tokens, token_type=types, merges=["a b"]))).assets
    assert ends.eos_token_ids == (1, 264, 263)
    tokens[-1] = "</s>"
    types[-1] = NORMAL  # as in Gemma's vocabulary, a word like others
    ends = load_model(str(write(tokens=tokens, token_type=types, merges=["a b"]))).assets
    assert ends.eos_token_ids == (1, 263)


def test_marks_of_calls_are_one_token_each_and_stay_in_the_text(write):
    place = TOKENS.index("ba")
    tokens = changed(TOKENS, place, '<|"|>')
    types = changed(TYPES, place, USER_DEFINED)
    tokenizer = read(write(tokens=tokens, token_type=types, merges=["a b"]))
    encoded = tokenizer.encode('<|"|>ab<|"|>')
    assert encoded.tokens == ['<|"|>', "ab", '<|"|>']
    assert tokenizer.decode(encoded.ids) == '<|"|>ab<|"|>'


WRONG = {
    "key tokenizer.ggml.merges is missing": {"merges": None},
    "merge 1 ('a c') does not join two tokens to a third": {"merges": ["a b", "a c"]},
    "merge 0 ('ab') does not join two tokens to a third": {"merges": ["ab"]},
    "merge 0 ('') does not join two tokens to a third": {"merges": [""]},
    "merge 2 ('a b a') does not join two tokens to a third": {"merges": ["a b", "b a", "a b a"]},
    "tokenizer.ggml.merges must have at most 1060 elements, got 1061": {"merges": ["a b"] * 1061},
    "tokenizer.ggml.tokens: no token <0x0A>, so not every text has tokens": {
        "tokens": changed(TOKENS, 13, "c")
    },
    "tokenizer.ggml.token_type: token <0x0A> must be of type 6 (byte), got 1": {
        "token_type": changed(TYPES, 13, NORMAL)
    },
    "tokenizer.ggml.token_type: token 'ab' must not be of type 6 (byte)": {
        "token_type": changed(TYPES, TOKENS.index("ab"), BYTE)
    },
    "token 'a' is in the vocabulary twice": {"tokens": changed(TOKENS, TOKENS.index("ab"), "a")},
    "tokenizer.ggml.bos_token_id must be below 265, got 265": {"bos_token_id": 265},
}


@pytest.mark.parametrize("words", WRONG)
def test_a_vocabulary_that_cannot_be_is_refused_by_file_and_key(write, words):
    path = write(**WRONG[words])
    with pytest.raises(ModelFileError) as caught:
        load_model(str(path))
    assert caught.value.message == f"{path}: {words}"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("remove_extra_whitespaces", True),
        ("add_space_prefix", True),
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
    first, end = content.index(b"tokenizer.ggml.model"), content.index(b"token_embd.weight")
    places = data.draw(st.lists(st.integers(8 * first, 8 * end - 1), min_size=1, max_size=3))
    for place in places:
        content[place // 8] ^= 1 << place % 8
    flipped = tmp_path / "flipped.gguf"
    flipped.write_bytes(content)
    message = None
    try:
        tokenizer = read(flipped)
        tokenizer.decode(tokenizer.encode("ab \u00e9").ids)
    except ModelFileError as fault:
        message = fault.message
    assert message is None or (message.startswith(f"{flipped}: ") and message.isprintable())
