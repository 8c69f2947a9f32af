from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from control_plane.text.stop_strings import StopMatcher


def run(pieces, stops, *, include_stop=False):
    """What was returned of each piece, and which string ended it."""
    matcher = StopMatcher(stops, include_stop=include_stop)
    texts = []
    for piece in pieces:
        text, matched = matcher.push(piece)
        texts.append(text)
        if matched is not None:
            return texts, matched
    texts.append(matcher.finish())
    return texts, None


def cut_by_hand(text, stops, *, include_stop):
    """The answer, by trying every end from the left."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


def test_a_stop_string_in_one_piece_ends_the_text_before_it():
    assert run(["one. two"], ["."]) == (["one"], ".")


def test_a_stop_string_over_many_pieces_never_shows_any_part_of_itself():
    texts, matched = run(["ab", "#", "#", "E", "ND tail"], ["##END"])
    assert (texts, matched) == (["ab", "", "", "", ""], "##END")


def test_what_only_looked_like_a_stop_string_is_returned_when_it_cannot_be_one():
    assert run(["a#", "#E", "x"], ["##END"]) == (["a", "", "##Ex", ""], None)


def test_what_is_held_back_at_the_end_is_text():
    assert run(["say ##EN"], ["##END"]) == (["say ", "##EN"], None)


def test_a_beginning_inside_a_failed_beginning_is_found():
    assert run(["aab", "aac"], ["aabaac"]) == (["", ""], "aabaac")
    assert run(["aabaa", "baac!"], ["aabaac"]) == (["", "aab"], "aabaac")


def test_the_first_complete_string_counts_and_of_those_the_longest():
    assert run(["xabcd"], ["abcd", "bc"]) == (["xa"], "bc")
    assert run(["xabc"], ["c", "abc", "bc"]) == (["x"], "abc")


def test_the_stop_string_is_returned_where_it_is_wanted_but_nothing_behind_it():
    texts, matched = run(["ab", "cd", "ef"], ["cde"], include_stop=True)
    assert ("".join(texts), matched) == ("abcde", "cde")


def test_many_beginnings_cost_no_more_than_the_text_is_long():
    stop = "a" * 255 + "b"
    texts, matched = run(["a"] * 4000 + ["b"], [stop])
    assert (len("".join(texts)), matched) == (4000 - 255, stop)


@given(
    st.lists(st.text("ab", max_size=5), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4),
    st.booleans(),
)
def test_the_pieces_change_nothing_and_the_answer_is_that_of_the_whole_text(
    pieces, stops, include_stop
):
    texts, matched = run(pieces, stops, include_stop=include_stop)
    expected = cut_by_hand("".join(pieces), stops, include_stop=include_stop)
    assert ("".join(texts), matched) == expected


@given(
    st.lists(st.text("ab", max_size=5), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4),
    st.integers(0, 12),
)
@example(["aba", "ba"], ["aba"], 1)
def test_what_is_complete_in_the_first_pieces_ends_nothing(pieces, stops, num_held):
    matcher = StopMatcher(stops)
    text, place, matched = "", 0, None
    for index, piece in enumerate(pieces):
        text += piece
        released, matched = matcher.push(piece, ends=index >= num_held)
        place += len(released)
        if matched is not None:
            break
    else:
        place += len(matcher.finish())
    whole, held = "".join(pieces), len("".join(pieces[:num_held]))
    ends = [
        (end, -len(stop), stop)
        for stop in stops
        for end in range(held + 1, len(whole) + 1)
        if whole[:end].endswith(stop)
    ]
    if ends:
        end, minus_length, stop = min(ends)
        assert (matched, place) == (stop, max(end + minus_length, 0))
    else:
        assert (matched, place) == (None, len(whole))


@given(
    st.lists(st.text("ab", max_size=5), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4),
)
def test_no_more_is_held_back_than_may_be_a_beginning(pieces, stops):
    matcher = StopMatcher(stops)
    for piece in pieces:
        if matcher.push(piece).matched is not None:
            return
        held = matcher.held
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_the_samples_of_a_request_share_what_is_known_of_its_stop_strings():
    one, other = (StopMatcher(["ab" * 100, "x"]) for _ in range(2))
    for mine, theirs in zip(one._followers, other._followers, strict=True):
        assert mine is not theirs
        assert mine._fallback is theirs._fallback
