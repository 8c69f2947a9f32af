"""The text of SentencePiece's tokens is SentencePiece's, whole or token by token."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from control_plane.core.generation_params import GenerationParams
from control_plane.engine.sample_text import SampleText
from control_plane.http.spelling import Speller
from control_plane.text.detokenizer import ByteDetokenizer, make_detokenizer
from control_plane.text.huggingface_tokenizer import (
    SentencePieceTokenizer,
    load_huggingface_tokenizer,
)
from tests.compute_plane.model.sentence_piece_models import (
    CONTROL_SYMBOL,
    FIRST_BYTE,
    USER_DEFINED_SYMBOL,
    PieceModel,
    trained,
)

TEXT = st.text(st.sampled_from("ab 12你好👩‍👧🏽मြ€½é\ufffd\n\t"), max_size=30) | st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="<["), max_size=15
)
BOS, SPACE_BYTE = 1, FIRST_BYTE + 0x20
SIZES = st.lists(st.integers(1, 4), max_size=20)


@pytest.fixture(scope="module", params=[True, False], ids=["a space in front", "none"])
def model(request) -> PieceModel:
    return trained(adds_space=request.param)


@pytest.fixture(scope="module")
def ours(model) -> SentencePieceTokenizer:
    tokenizer = load_huggingface_tokenizer(
        model.tokenizer_json(), bos_token_id=BOS, eos_token_id=2, add_bos_token=True
    )
    assert isinstance(tokenizer, SentencePieceTokenizer)
    assert tokenizer.adds_space == model.adds_space
    return tokenizer


def stream(detokenizer, ids, sizes=()):
    """Push `ids` in parts of the given sizes; the deltas, that of the end last."""
    deltas, start, sizes = [], 0, iter(sizes)
    while start < len(ids):
        size = next(sizes, 1)
        deltas.append(detokenizer.push(ids[start : start + size]))
        start += size
    return [*deltas, detokenizer.finish()]


def drawn_tokens(data, model):
    """Any tokens but the unknown one, which SentencePiece has a text for and we have not."""
    of_bytes, any_token = (
        st.integers(FIRST_BYTE, FIRST_BYTE + 255),
        st.integers(1, len(model.tokens) - 1),
    )
    return data.draw(st.lists(of_bytes | any_token, max_size=30))


@given(text=TEXT)
def test_every_text_comes_back_from_its_tokens(model, ours, text):
    ids = ours.encode(text)
    assert ids == [BOS, *model.theirs.encode(text)]
    assert ours.decode(ids) == text.replace("\u2581", " ")


def test_a_long_text_has_the_tokens_and_the_text_that_a_short_one_has(model, ours):
    text = "Hello,  world 12 é😀\n" * 200
    ids = ours.encode(text)
    assert ids == [BOS, *model.theirs.encode(text)]
    assert ours.decode(ids) == text


@given(data=st.data())
def test_any_tokens_decode_as_with_sentencepiece(model, ours, data):
    ids = drawn_tokens(data, model)
    # The byte of a space in front is the one that SentencePiece keeps and the library does not.
    assume(SPACE_BYTE not in ids)
    # To SentencePiece a special token ends a character, to transformers and us it is not there.
    assert ours.decode(ids) == model.theirs.decode([t for t in ids if ours.token_bytes(t)])


def test_a_special_token_cuts_no_character(ours):
    first, second = of_bytes("\u00e9")
    ids = [first, BOS, second]
    assert ours.decode(ids) == "".join(stream(make_detokenizer(ours), ids)) == "\u00e9"


@given(data=st.data(), sizes=SIZES)
def test_tokens_of_a_whole_text_stream_to_it_less_a_character_cut_off(model, ours, data, sizes):
    ids = drawn_tokens(data, model)
    streamed = "".join(stream(make_detokenizer(ours), ids, sizes))
    if ours.adds_space:
        streamed = streamed.removeprefix(" ")
    whole = ours.decode(ids)
    assert whole.startswith(streamed)
    assert whole[len(streamed) :] in ("", "\ufffd", "\ufffd\ufffd", "\ufffd\ufffd\ufffd")


@given(data=st.data(), prompt=TEXT, sizes=SIZES)
def test_a_generation_streams_to_what_it_adds_to_its_prompt(model, ours, data, prompt, sizes):
    before = ours.encode("x" + prompt)
    ids = drawn_tokens(data, model)
    deltas = stream(make_detokenizer(ours), ids, sizes)
    whole = ours.decode([*before, *ids])
    added = whole.removeprefix(ours.decode(before))
    assert added.startswith("".join(deltas))
    assert not added.removeprefix("".join(deltas)).rstrip("\ufffd")


@given(prompt=st.sampled_from(["The", "a b", "你"]), text=TEXT, sizes=SIZES)
def test_a_prompt_and_the_text_that_goes_on_with_it_are_the_whole_text(ours, prompt, text, sizes):
    before, ids = ours.encode(prompt), ours.encode(prompt + " " + text)
    assume(ids[: len(before)] == before)
    continued = "".join(stream(make_detokenizer(ours), ids[len(before) :], sizes))
    assert prompt + continued == (prompt + " " + text).replace("\u2581", " ")


def of_bytes(text):
    """The byte tokens that spell a text."""
    return [FIRST_BYTE + byte for byte in text.encode()]


def test_a_character_of_byte_tokens_appears_with_its_last_byte(ours):
    detokenizer = make_detokenizer(ours)
    assert isinstance(detokenizer, ByteDetokenizer)
    deltas = [detokenizer.push([token]) for token in of_bytes("👩é")]
    assert deltas == ["", "", "", "👩", "", "é"]


def test_a_byte_that_is_no_text_spoils_nothing_beside_it(model, ours):
    ids = [
        *of_bytes("é"),
        FIRST_BYTE + 0xFF,
        *of_bytes("你")[:2],
        *of_bytes("ab"),
        *of_bytes("👩")[:3],
    ]
    expected = "é\ufffd\ufffd\ufffdab"
    assert "".join(stream(make_detokenizer(ours), ids)) == expected
    # Only a whole text shows the character that is cut off.
    assert ours.decode(ids) == model.theirs.decode(ids) == expected + "\ufffd" * 3


def test_a_stop_string_is_found_where_byte_tokens_are_cut(ours):
    text = SampleText(ours, GenerationParams(max_tokens=9, stop=["👩!"]))
    given_text = "".join(
        text.push([token]).text for token in [*of_bytes("hi 👩👩"), FIRST_BYTE + ord("!")]
    )
    assert given_text + text.finish().text == "hi 👩"
    assert text.matched_stop == "👩!"


def test_special_tokens_have_no_text_unless_they_are_spelled(ours):
    ids = [BOS, *of_bytes("a"), 2, *of_bytes("b")]
    assert ours.decode(ids) == "ab"
    assert ours.decode_with_special(ids) == "<s>a</s>b"
    assert ours.decode(ours.encode(USER_DEFINED_SYMBOL)) == USER_DEFINED_SYMBOL
    assert [ours.token_bytes(token) for token in (BOS, 2, 10**6)] == [b"", b"", b""]


def test_tokens_are_named_by_the_text_they_have_amid_a_text(model, ours):
    space = model.theirs.piece_to_id("\u2581")
    speller = Speller(ours)
    assert speller.spell(space) == (" ", [32])
    assert speller.spell(FIRST_BYTE + 0xE4) == ("bytes:\\xe4", [0xE4])
    assert speller.spell(BOS) == ("<s>", None)


@pytest.mark.parametrize(
    "text",
    [
        "hello world",
        "  hello",
        f"{CONTROL_SYMBOL} hello {CONTROL_SYMBOL}world</s> again",
        f"a{USER_DEFINED_SYMBOL}b</s></s>  é c",
    ],
)
def test_tokens_of_a_prompt_begin_where_its_text_has_them(ours, text):
    ids = ours.encode(text)
    offsets = Speller(ours).ruler().offsets(ids, text)
    ends = [*offsets[1:], len(text)]
    shown = [text[start:end] for start, end in zip(offsets, ends, strict=True)]
    assert "".join(shown) == text
    names = [Speller(ours).spell(token) for token in ids]
    for index, (name, part) in enumerate(zip(names, shown, strict=True)):
        if name.text.startswith("bytes:") or not index:
            continue
        # Encoding puts a space in front of a text, and behind a special token in it.
        adds = ours.adds_space and name.utf8 is not None
        assert part in ((name.text, name.text.removeprefix(" ")) if adds else (name.text,))
