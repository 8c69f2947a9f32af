"""What prompt lookup finds, and when it looks."""

from __future__ import annotations

from control_plane.core.prompt_lookup import PromptLookup


def test_what_followed_the_last_tokens_is_found_in_prompt_and_output() -> None:
    output: list[int] = []
    lookup = PromptLookup([1, 2, 3, 4, 5, 6, 7, 9], output, 2)
    assert lookup.find(3) == []
    output += [2, 3]
    assert lookup.find(3) == [4, 5, 6]
    output += [8, 7, 9, 2, 3]
    assert lookup.find(3) == [8, 7, 9]


def test_the_longest_agreement_wins_and_the_latest_of_equals() -> None:
    text = [9, 1, 2, 70, 8, 1, 2, 71, 8, 1, 2, 72, 5, 1, 2, 73]
    assert PromptLookup([*text, 9, 1, 2], [], 2).find(1) == [70]
    assert PromptLookup([*text, 8, 1, 2], [], 2).find(1) == [72]
    assert PromptLookup([*text, 6, 1, 2], [], 2).find(1) == [73]


def test_of_many_places_the_latest_eight_are_looked_at() -> None:
    for count, found in ((8, 70), (9, 79)):
        text = [9, 1, 70, *(token for last in range(1, count) for token in (8, 1, 70 + last))]
        text[-1] = 79
        assert PromptLookup([*text, 9, 1], [], 1).find(1) == [found]


def test_fewer_tokens_than_least_find_nothing() -> None:
    assert PromptLookup([1, 2, 3, 9, 2, 3], [], 3).find(4) == []
    assert PromptLookup([1], [], 3).find(4) == []
    assert PromptLookup([1, 2, 3, 1, 2], [], 2).find(0) == []


def test_a_text_that_repeats_itself_is_guessed_beyond_its_end() -> None:
    assert PromptLookup([5, 1, 2, 3, 1, 2, 3], [], 3).find(7) == [1, 2, 3, 1, 2, 3, 1]
    assert PromptLookup([4, 4, 4], [], 1).find(3) == [4, 4, 4]


def test_wrong_guesses_make_pauses_that_double_and_a_right_one_ends_them() -> None:
    output: list[int] = []
    lookup = PromptLookup([1], output, 1)
    pauses = []
    for _ in range(8):
        lookup.note(0)
        count = 0
        while not lookup.find(1):
            output.append(1)
            count += 1
        pauses.append(count)
    assert pauses == [2, 4, 8, 16, 32, 64, 64, 64]
    lookup.note(1)
    assert lookup.find(1) == [1]
    lookup.note(0)
    output += [1, 1]
    assert lookup.find(1) == [1]


def test_a_long_prompt_is_read_in_parts_and_nothing_is_found_until_all_of_it_is() -> None:
    prompt, output = [*range(3 * 4096), 5, 6], [7]
    lookup = PromptLookup(prompt, output, 2)
    for _ in range(2):
        assert lookup.find(3) == []
        output.append(output[-1] + 1)
    assert lookup.find(3) == [10, 11, 12]
