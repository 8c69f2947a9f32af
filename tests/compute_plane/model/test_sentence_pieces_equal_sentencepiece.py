"""A tokenizer.json made of pieces and scores has the tokens of SentencePiece itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from compute_plane.model.tokenizer_json import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED
from tests.compute_plane.model.sentence_piece_models import (
    CONTROL_SYMBOL,
    FIRST_BYTE,
    TEXTS,
    USER_DEFINED_SYMBOL,
    PieceModel,
    assembled,
    trained,
)

SPECIALS = ["<s>", "</s>", "<unk>", CONTROL_SYMBOL, USER_DEFINED_SYMBOL]
PARTS = [
    *("Hello", " world", "the", "quick brown", "café", "don't", "0", "7", " 42", "2024", "3.14159"),
    *(" ", "  ", "   ", "        ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\u2581", "\0"),
    *(
        "你好",
        "世界",
        "ကမ္ဘာ",
        "हिन्दी",
        "👩‍👩‍👧‍👦",
        "👍🏽",
        "😀",
        "e\u0301",
        "\ufffd",
        "\ufeff",
        "½",
        "𠮷",
    ),
    *("----", "=====", "(x):", "    return", "<0x41>", "<s", "/s>", "unk", "[INST", "<", ">"),
]
TEXT = st.one_of(
    st.lists(st.sampled_from(PARTS), max_size=12).map("".join),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.sampled_from(TEXTS),
)


@pytest.fixture(scope="module", params=[True, False], ids=["a space in front", "none"])
def model(request) -> PieceModel:
    return trained(adds_space=request.param)


@pytest.fixture(scope="module")
def ours(model) -> Tokenizer:
    return Tokenizer.from_buffer(model.tokenizer_json())


def test_the_trained_models_have_every_type_of_token(model):
    assert set(model.types) == {NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE}
    pieces = [t for t, kind in zip(model.tokens, model.types, strict=True) if kind == NORMAL]
    assert max(map(len, pieces)) > 4
    assert "😀" not in pieces
    assert "你" in pieces
    assert model.tokens[FIRST_BYTE] == "<0x00>"


@given(text=TEXT)
def test_every_text_has_the_tokens_of_sentencepiece(model, ours, text):
    if any(special in text for special in SPECIALS):
        text = text.replace("<", "").replace("[", "")
    assert ours.encode(text).ids == model.theirs.encode(text)


@given(texts=st.lists(TEXT, min_size=2, max_size=4), data=st.data())
def test_text_beside_special_tokens_is_text_of_its_own(model, ours, texts, data):
    texts = [text.replace("<", "").replace("[", "") for text in texts]
    specials = data.draw(
        st.lists(st.sampled_from(SPECIALS), min_size=len(texts) - 1, max_size=len(texts) - 1)
    )
    whole, expected = texts[0], model.theirs.encode(texts[0])
    for special, text in zip(specials, texts[1:], strict=True):
        whole += special + text
        expected += [model.tokens.index(special), *model.theirs.encode(text)]
    assert ours.encode(whole).ids == expected


LETTERS = "\u2581ab"


@st.composite
def drawn_models(draw) -> PieceModel:
    """Pieces over three letters in any order of scores, so that a piece has many cuts."""
    pieces = list(LETTERS)
    for _ in range(draw(st.integers(1, 20))):
        joined = draw(st.sampled_from(pieces)) + draw(st.sampled_from(pieces))
        if joined not in pieces and len(joined) <= 8:
            pieces.append(joined)
    scores = draw(st.permutations(range(len(pieces))))
    return assembled((piece, -score) for piece, score in zip(pieces, scores, strict=True))


@given(model=drawn_models(), texts=st.lists(st.text(" ab", max_size=30), min_size=5, max_size=5))
def test_neighbours_are_joined_in_the_order_of_scores_whichever_way_a_piece_is_cut(model, texts):
    ours = Tokenizer.from_buffer(model.tokenizer_json())
    for text in texts:
        assert ours.encode(text).ids == model.theirs.encode(text)


def test_pieces_of_one_score_are_joined_in_the_order_of_their_ids():
    # Converters that know no scores write the same for all.
    model = assembled((piece, -1000.0) for piece in ("\u2581", "a", "b", "c", "bc", "ab"))
    ours = Tokenizer.from_buffer(model.tokenizer_json())
    assert ours.encode("abc").tokens == ["\u2581", "a", "bc"]


def test_a_text_that_spells_a_byte_token_is_not_that_byte():
    pieces = ("1>", "<0x4", "<0", "x4", *"<0x41>")
    model = assembled((piece, -float(index)) for index, piece in enumerate(pieces))
    ours = Tokenizer.from_buffer(model.tokenizer_json())
    assert ours.encode("<0x41>").tokens[-2:] == ["<0x4", "1>"]
    assert ours.encode("<0x41>").ids == model.theirs.encode("<0x41>")
