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


def without_a_cut_end(data):
    """The text of some bytes, less a character at the end whose last bytes are missing."""
    for num_bytes in (3, 2, 1):
        try:
            data[-num_bytes:].decode()
        except UnicodeDecodeError as error:
            if error.start == 0 and error.reason == "unexpected end of data":
                return data[:-num_bytes].decode(errors="replace")
    return data.decode(errors="replace")


def bytes_of(tokenizer, ids):
    return b"".join(map(tokenizer.token_bytes, ids))


sizes = st.lists(st.integers(1, 5), max_size=30)


@given(data=st.data(), parts=sizes)
def test_any_tokens_stream_to_the_whole_characters_of_decode(bpe, data, parts):
    ids = data.draw(st.lists(st.integers(0, bpe.vocab_size - 1), max_size=60))
    expected = without_a_cut_end(bytes_of(bpe, ids))
    assert "".join(stream(make_detokenizer(bpe), ids, parts)) == expected
    assert bpe.decode(ids) in (expected, expected + "\ufffd")


@given(text=st.text(st.sampled_from(SCRIPTS), max_size=40), parts=sizes, cut=st.integers(0, 3))
def test_no_delta_cuts_a_character_in_two(bpe, text, parts, cut):
    ids = bpe.encode(text)
    ids = ids[: len(ids) - cut] if cut else ids
    deltas = stream(make_detokenizer(bpe), ids, parts)
    assert text.startswith("".join(deltas))
    assert "".join(deltas) == without_a_cut_end(bytes_of(bpe, ids))


@given(ids=st.lists(st.integers(0, 258), max_size=60), parts=sizes)
def test_any_bytes_stream_to_the_whole_characters_of_decode(ids, parts):
    tokenizer = SimpleTokenizer()
    expected = without_a_cut_end(bytes_of(tokenizer, ids))
    assert "".join(stream(make_detokenizer(tokenizer), ids, parts)) == expected


@given(text=st.text(st.sampled_from(SCRIPTS + "xyz hello"), max_size=40), parts=sizes)
def test_a_tokenizer_that_is_not_byte_level_streams_through_a_window(metaspace, text, parts):
    ids = metaspace.encode(text)
    detokenizer = make_detokenizer(metaspace)
    assert isinstance(detokenizer, WindowDetokenizer)
    deltas = stream(detokenizer, ids, parts)
    # A window cannot tell a replacement character of the text from a character not yet whole.
    assert "".join(deltas) == metaspace.decode(ids).rstrip("\ufffd")


@given(text=st.text(st.sampled_from(SCRIPTS), max_size=40), parts=sizes)
def test_the_window_and_the_byte_decoder_agree(bpe, text, parts):
    ids = bpe.encode(text)
    windowed, direct = (
        stream(WindowDetokenizer(bpe), ids, parts),
        stream(ByteDetokenizer(bpe), ids, parts),
    )
    assert "".join(direct) == text
    assert "".join(windowed) == text.rstrip("\ufffd")


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


@given(data=st.data(), parts=sizes)
def test_special_tokens_are_spelled_where_that_is_wanted(bpe, metaspace, data, parts):
    """And nothing else is other than without them, but for a character that one of them cuts."""
    special = 1  # of both: <|im_start|>, <s>
    for tokenizer, first in ((bpe, 0), (metaspace, 3 + 256)):  # not its single bytes
        ids = data.draw(st.lists(st.integers(first, tokenizer.vocab_size - 1), max_size=20))
        ids += [special, *ids[:5], special, special]
        spelling = make_detokenizer(tokenizer, {special: "<MARK>"})
        expected, rest = "", ids
        while special in rest:
            end = rest.index(special)
            expected += "".join(stream(make_detokenizer(tokenizer), rest[:end], ())) + "<MARK>"
            rest = rest[end + 1 :]
        assert "".join(stream(spelling, ids, parts)) == expected
