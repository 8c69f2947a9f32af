from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.text.detokenizer import ByteDetokenizer, WindowDetokenizer, make_detokenizer
from control_plane.text.huggingface_tokenizer import load_huggingface_tokenizer
from control_plane.text.simple_tokenizer import SimpleTokenizer

SCRIPTS = "ab 你好世界👩‍👧🏽🇩🇪မြန်မာဘာသာ€½é\ufffd\n"


@pytest.fixture(scope="session")
def bpe(tokenizer_json):
    return load_huggingface_tokenizer(tokenizer_json)


@pytest.fixture(scope="session")
def metaspace(metaspace_json):
    return load_huggingface_tokenizer(metaspace_json)


def stream(detokenizer, ids, sizes):
    """Push `ids` in parts of the given sizes; the deltas, that of the end last."""
    deltas, start, sizes = [], 0, iter(sizes)
    while start < len(ids):
        size = next(sizes, 1)
        deltas.append(detokenizer.push(ids[start : start + size]))
        start += size
    return [*deltas, detokenizer.finish()]


sizes = st.lists(st.integers(1, 5), max_size=30)


@given(data=st.data(), parts=sizes)
def test_any_tokens_stream_to_what_decode_says_of_all(bpe, data, parts):
    ids = data.draw(st.lists(st.integers(0, bpe.vocab_size - 1), max_size=60))
    assert "".join(stream(make_detokenizer(bpe), ids, parts)) == bpe.decode(ids)


@given(text=st.text(st.sampled_from(SCRIPTS), max_size=40), parts=sizes, cut=st.integers(0, 3))
def test_no_delta_cuts_a_character_in_two(bpe, text, parts, cut):
    ids = bpe.encode(text)
    ids = ids[: len(ids) - cut] if cut else ids
    deltas = stream(make_detokenizer(bpe), ids, parts)
    assert "".join(deltas) == bpe.decode(ids)
    # Before the end, only a replacement character of the text itself may appear.
    assert "".join(deltas[:-1]).count("\ufffd") <= text.count("\ufffd")


@given(ids=st.lists(st.integers(0, 258), max_size=60), parts=sizes)
def test_any_bytes_stream_to_what_decode_says_of_all(ids, parts):
    tokenizer = SimpleTokenizer()
    assert "".join(stream(make_detokenizer(tokenizer), ids, parts)) == tokenizer.decode(ids)


@given(text=st.text(st.sampled_from(SCRIPTS + "xyz hello"), max_size=40), parts=sizes)
def test_a_tokenizer_that_is_not_byte_level_streams_through_a_window(metaspace, text, parts):
    ids = metaspace.encode(text)
    detokenizer = make_detokenizer(metaspace)
    assert isinstance(detokenizer, WindowDetokenizer)
    deltas = stream(detokenizer, ids, parts)
    assert "".join(deltas) == metaspace.decode(ids)
    assert "".join(deltas[:-1]).count("\ufffd") <= text.count("\ufffd")


@given(text=st.text(st.sampled_from(SCRIPTS), max_size=40), parts=sizes)
def test_the_window_and_the_byte_decoder_agree(bpe, text, parts):
    ids = bpe.encode(text)
    windowed, direct = (
        stream(WindowDetokenizer(bpe), ids, parts),
        stream(ByteDetokenizer(bpe), ids, parts),
    )
    assert "".join(windowed) == "".join(direct) == text


def test_a_character_appears_with_its_last_byte(bpe):
    detokenizer = make_detokenizer(bpe)
    single_bytes = [next(i for i in range(300) if bpe.token_bytes(i) == bytes((b,)))
                    for b in "👩你".encode()]  # fmt: skip
    assert [detokenizer.push([i]) for i in single_bytes] == ["", "", "", "👩", "", "", "你"]
    assert detokenizer.finish() == ""


class Counting:
    """A tokenizer that counts how many tokens it was asked to decode."""

    def __init__(self, inner):
        self.inner, self.num_decoded = inner, 0

    def decode(self, tokens):
        self.num_decoded += len(tokens)
        return self.inner.decode(tokens)


@pytest.mark.parametrize("byte", [ord("a"), 0xFF])
def test_the_window_costs_a_bounded_number_of_decoded_tokens_a_token(byte):
    counting = Counting(SimpleTokenizer())
    detokenizer = WindowDetokenizer(counting)
    for _ in range(2000):
        detokenizer.push([byte])
    assert counting.num_decoded <= 10 * 2000
    detokenizer.finish()
