from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.core.batch import TokenLogprobs
from control_plane.core.generation_params import GenerationParams
from control_plane.engine.sample_text import SampleText
from control_plane.text.answers.text_form import TextForm


class Words:
    """A tokenizer whose tokens are the pieces it is given; of any bytes."""

    vocab_size = 99
    bos_token_id = eos_token_id = pad_token_id = None

    def __init__(self, *pieces):
        self.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]

    def encode(self, text):
        raise NotImplementedError

    def decode(self, tokens):
        return b"".join(map(self.token_bytes, tokens)).decode(errors="replace")

    def token_bytes(self, token_id):
        return self.pieces[token_id]


def sample(words, *stop, **params):
    return SampleText(words, GenerationParams(stop=stop, **params))


def logprob(token_id):
    return TokenLogprobs(-float(token_id))


def feed(text, count, *, first=0):
    """Push tokens one by one; all pieces until it has ended, the rest included."""
    pieces = []
    for token_id in range(first, count):
        pieces.append(text.push((token_id,), (logprob(token_id),)))
        if text.has_ended:
            return pieces
    pieces.append(text.finish())
    return pieces


def joined(pieces):
    return "".join(piece.text for piece in pieces), [t for p in pieces for t in p.token_ids]


def test_without_stop_strings_text_and_tokens_go_straight_through():
    text = sample(Words("he", "llo"))
    assert text.push((0, 1), (logprob(0), logprob(1))) == (
        "hello",
        (0, 1),
        (logprob(0), logprob(1)),
    )
    assert text.num_tokens == 2


@pytest.mark.parametrize(
    ("least", "said", "stop"),
    [(0, "a", "#"), (1, "a", "#"), (2, "a#b", "#"), (3, "a#b", "#"), (4, "a#b#c", None)],
)
@pytest.mark.parametrize("ends", [[1, 2, 3, 4, 5], [5], [3, 5]])
def test_a_stop_string_counts_in_no_token_of_the_least(least, said, stop, ends):
    text = sample(Words("a", "#", "b", "#", "c"), "#", min_tokens=least)
    pieces, first = [], 0
    for end in ends:
        pieces.append(text.push(tuple(range(first, end))))
        first = end
    pieces.append(text.finish())
    assert (joined(pieces)[0], text.matched_stop) == (said, stop)


def test_tokens_and_logprobs_are_held_back_with_their_text():
    text = sample(Words("a", "b#", "#", "c"), "##END")
    pieces = feed(text, 4)
    assert [piece.text for piece in pieces] == ["a", "", "", "b##c", ""]
    assert [list(piece.token_ids) for piece in pieces] == [[0], [], [], [1, 2, 3], []]
    assert pieces[3].logprobs == [logprob(1), logprob(2), logprob(3)]
    assert (text.matched_stop, text.num_tokens) == (None, 4)


def test_tokens_behind_a_stop_string_and_in_it_are_not_given_nor_counted():
    text = sample(Words("one", " two#", "#E", "ND three", " four"), "##END")
    assert joined(feed(text, 5)) == ("one two", [0, 1])
    assert (text.matched_stop, text.has_ended, text.num_tokens) == ("##END", True, 2)
    assert text.push((4,)) == ("", (), ())
    assert text.finish() == ("", (), ())


def test_a_token_that_begins_a_stop_string_exactly_is_not_given():
    assert joined(feed(sample(Words("one", "##", "END"), "##END"), 3)) == ("one", [0])


def test_an_included_stop_string_comes_with_its_tokens():
    text = sample(Words("one", "#", "# two", "x"), "##", include_stop=True)
    assert joined(feed(text, 4)) == ("one##", [0, 1, 2])
    assert text.matched_stop == "##"


def test_a_stop_string_that_never_comes_is_given_at_the_end():
    text = sample(Words("one", "##", "EN"), "##END")
    pieces = feed(text, 3)
    assert pieces[-1] == ("##EN", [1, 2], [logprob(1), logprob(2)])
    assert text.matched_stop is None


def test_a_stop_string_of_characters_cut_over_tokens_is_found():
    euro = "€".encode()
    text = sample(Words("a", euro[:1], euro[1:], "b"), "€b")
    assert joined(feed(text, 4)) == ("a", [0, 1])  # the first byte of it has no text yet
    assert text.matched_stop == "€b"


def test_the_last_character_may_complete_a_stop_string_at_the_end():
    text = sample(Words("a", b"\xed\xa0"), "�")
    assert joined(feed(text, 2))[0] == "a"
    assert text.matched_stop == "�"


PIECES = st.lists(st.text("ab€", max_size=3).map(str.encode), min_size=1, max_size=10)
STOPS = st.lists(st.text("ab€", min_size=1, max_size=4), max_size=3)


@given(st.data(), PIECES, STOPS, st.booleans())
def test_a_primed_sample_goes_on_as_if_it_had_never_been_broken_off(
    data, pieces, stops, include_stop
):
    whole = b"".join(pieces)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)), max_size=8)) | {0, len(whole)})
    words = Words(*(whole[a:b] for a, b in itertools.pairwise(cuts)))
    count = len(words.pieces)
    text = sample(words, *stops, include_stop=include_stop)
    undisturbed = feed(text, count)
    seen, tokens = "", []
    for piece in undisturbed[:-1]:  # a reader broken off behind each piece
        seen += piece.text
        tokens += piece.token_ids
        again = sample(words, *stops, include_stop=include_stop)
        again.prime(tokens)
        assert not again.has_ended
        rest, rest_tokens = joined(feed(again, count, first=len(tokens)))
        assert (seen + rest, tokens + rest_tokens) == joined(undisturbed)
        assert again.matched_stop == text.matched_stop
        assert again.num_tokens == text.num_tokens


def test_the_text_it_was_primed_with_is_all_that_its_tokens_say():
    words = Words("a", "bc", "d", "e")
    for stops in ((), ("cx", "de!")):
        text = sample(words, *stops)
        text.prime((0, 1, 2))
        assert text.primed_text == "abcd"
        assert joined([text.push((3,)), text.finish()]) == ("e", [3])


def test_special_tokens_may_be_spelled():
    words = Words("a", "", "b")
    text = SampleText(words, GenerationParams(stop=("b!",)), TextForm({1: "<x>"}))
    text.prime((0, 1))
    assert text.primed_text == "a<x>"
    assert joined([text.push((1, 2)), text.finish()]) == ("<x>b", [1, 2])


class Until:
    """Sees that a text has so many characters."""

    def __init__(self, count: int) -> None:
        self.count = count

    def push(self, text: str, _: int) -> bool:
        self.count -= len(text)
        return self.count <= 0


@pytest.mark.parametrize("stop", [(), ("def",), ("x",)])
def test_a_text_that_is_whole_ends_with_the_token_with_which_it_is(stop):
    words = Words("ab", "", "cd", "ef", "g")
    for pieces in ([(0,), (1,), (2,), (3,), (4,)], [(0, 1, 2, 3, 4)], [(0, 1), (2, 3), (4,)]):
        params = GenerationParams(stop=stop, max_tokens=5)
        text = SampleText(words, params, TextForm(make_end=lambda: Until(3)))
        given = [text.push(tokens, tuple(map(logprob, tokens))) for tokens in pieces]
        # What may be the beginning of a stop text comes, too: nothing follows it.
        assert joined([*given, text.finish()]) == ("abcd", [0, 1, 2])
        assert [entry for piece in given for entry in piece.logprobs] == [*map(logprob, range(3))]
        assert (text.num_tokens, text.has_ended, text.ended_itself) == (3, True, True)
        assert text.matched_stop is None


def test_a_text_that_no_more_tokens_come_for_has_not_ended_itself():
    text = SampleText(Words("ab"), GenerationParams(), TextForm(make_end=lambda: Until(3)))
    assert joined([text.push((0,)), text.finish()]) == ("ab", [0])
    assert (text.has_ended, text.ended_itself) == (True, False)


def test_a_stop_string_before_the_text_is_whole_ends_it():
    words = Words("ab", "cd")
    text = SampleText(words, GenerationParams(stop=("c",)), TextForm(make_end=lambda: Until(4)))
    assert joined([text.push((0, 1)), text.finish()]) == ("ab", [0])
    assert (text.matched_stop, text.ended_itself) == ("c", True)


def test_a_text_that_was_whole_in_what_its_reader_has_takes_nothing_more():
    text = SampleText(Words("ab", "cd"), GenerationParams(), TextForm(make_end=lambda: Until(2)))
    text.prime((0,))
    assert (text.primed_text, text.has_ended) == ("ab", True)
    assert joined([text.push((1,)), text.finish()]) == ("", [])
