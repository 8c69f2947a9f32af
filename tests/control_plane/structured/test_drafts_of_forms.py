"""The drafts of a constraint, and that they change nothing of its own text."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from control_plane.core.constraint import Constraint, Draft
from control_plane.core.generation_params import GenerationParams
from control_plane.core.request import Request
from control_plane.core.structured_outputs import StructuredOutputs
from control_plane.structured import grammars as grammars_module
from control_plane.structured import habits as habits_module
from control_plane.structured.grammars import Grammars
from control_plane.structured.habits import Habits
from control_plane.structured.matcher import MAX_DRAFTING_S, REST_TOKENS
from control_plane.text.simple_tokenizer import EOS_TOKEN_ID, SimpleTokenizer

VOCAB_SIZE = 300
LETTER = "letter { /[a-z]/ }"


@pytest.fixture(autouse=True)
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing take long: on a busy machine a draft may, and those after it are left out."""
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(SimpleTokenizer(), vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_TOKEN_ID,))


def constraint(
    grammars: Grammars, structure: StructuredOutputs, salt: str = "", **params: bool
) -> Constraint:
    request = Request(
        id=1,
        input_tokens=[1],
        params=GenerationParams(structured_outputs=structure, **params),
        eos_token_ids=frozenset({EOS_TOKEN_ID}),
        cache_salt=salt,
    )
    (made,) = grammars.constrain(request).result(timeout=60)
    return made


def say(made: Constraint, text: str) -> None:
    """Give it a text token by token, asking it each time what comes."""
    for token in text.encode():
        made.draft(3)
        made.constrainer.advance([(made, [token])])
        assert made.error is None


def drafted(made: Constraint, most: int = 7) -> str:
    return bytes(draft.token_id for draft in made.draft(most)).decode()


def test_what_a_form_leaves_no_choice_about_is_drafted_at_once(grammars: Grammars) -> None:
    made = constraint(grammars, StructuredOutputs(regex=r"(yes|no), it is(!|\?)"))
    assert drafted(made) == ""
    say(made, "y")
    assert drafted(made) == "es, it "
    assert drafted(made, 2) == "es"
    say(made, "es, it ")
    assert drafted(made) == "is"


def test_what_ends_a_text_is_not_drafted(grammars: Grammars) -> None:
    made = constraint(grammars, StructuredOutputs(choice=("red", "blue")))
    say(made, "r")
    assert drafted(made) == "e"
    say(made, "ed")
    assert made.is_complete


def test_what_was_said_last_in_a_place_is_expected_there_again(grammars: Grammars) -> None:
    array = StructuredOutputs(json={"type": "array", "items": {"enum": [1, 2]}})
    made = constraint(grammars, array)
    say(made, "[1, 1")
    assert drafted(made) == ", 1, 1,"
    say(made, ", 2")
    assert drafted(made) == ""  # nothing has followed it
    say(made, ", 2, 2")
    assert drafted(made) == ", 2, 2,"
    another = constraint(grammars, array)  # of the same form
    say(another, "[1")
    assert drafted(another, 4) == ", 2,"
    stranger = constraint(grammars, array, salt="another tenant's")
    say(stranger, "[1")
    assert drafted(stranger) == ""


def test_habits_are_kept_of_what_was_asked_for_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "MAX_CACHED", 3)
    grammars = Grammars(SimpleTokenizer(), vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_TOKEN_ID,))
    array = StructuredOutputs(json={"type": "array", "items": {"enum": [1, 2]}})
    for tenant in "abc":
        say(constraint(grammars, array, tenant), "[1, 1")
    constraint(grammars, array, "a")
    constraint(grammars, array, "d")
    for tenant, expected in (("a", ", 1"), ("c", ", 1"), ("b", "")):
        made = constraint(grammars, array, tenant)
        say(made, "[1")
        assert drafted(made, 3) == expected, tenant


def test_what_came_with_drafts_before_it_is_learned_too(grammars: Grammars) -> None:
    array = StructuredOutputs(json={"type": "array", "items": {"enum": [1, 2]}, "title": "another"})
    made = constraint(grammars, array)
    say(made, "[1, 1")
    assert drafted(made) == ", 1, 1,"
    made.constrainer.advance([(made, list(b", 2"))])
    say(made, ", ")
    assert drafted(made) == ""  # 1 and 2 stood behind a space once each


def test_where_nobody_asks_what_comes_nothing_is_learned(grammars: Grammars) -> None:
    array = StructuredOutputs(json={"type": "array", "items": {"enum": [1, 2]}, "title": "a crowd"})
    made = constraint(grammars, array)
    assert drafted(made) == "["  # what else
    for token in b"[1, 1":
        made.constrainer.advance([(made, [token])])
    assert drafted(made) == ""
    say(made, ", 1")
    assert drafted(made) == ", 1, 1,"


def test_the_middle_of_a_text_is_not_drafted(grammars: Grammars) -> None:
    made = constraint(grammars, StructuredOutputs(regex='"[^"]*"'))
    say(made, '"aaaaaaaa')
    assert VOCAB_SIZE < habits_module.MAX_CHOICE  # of this vocabulary everything would be
    limit, habits_module.MAX_CHOICE = habits_module.MAX_CHOICE, 100
    try:
        assert drafted(made) == ""
    finally:
        habits_module.MAX_CHOICE = limit


FORMS = [
    StructuredOutputs(
        json={
            "type": "object",
            "properties": {
                "name": {"enum": ["Anna", "Annika", "Bert"]},
                "years": {"type": "integer"},
                "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
                "more": {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
            },
            "required": ["name", "more"],
        }
    ),
    StructuredOutputs(regex=r"(ab|abc|abd)*(x{3}|y{5})[0-9]{2}"),
    StructuredOutputs(grammar='start: s\ns: s s s | s s | "a" | "b" | "c" "d" "e"'),
    StructuredOutputs(choice=("abcdef", "abcxyz", "b")),
]


@pytest.mark.spread(2)
@pytest.mark.parametrize("structure", FORMS, ids=["json", "regex", "grammar", "choice"])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_who_drafts_allows_what_one_allows_who_does_not(
    grammars: Grammars, structure: StructuredOutputs, ignore_eos: bool
) -> None:
    """Tokens come alone, or several at once where they were drafted; often drafts are wrong."""
    for seed in range(12):
        draw = random.Random(seed)
        plain = constraint(grammars, structure, salt="plain", ignore_eos=ignore_eos)
        made = constraint(grammars, structure, ignore_eos=ignore_eos)
        num_tokens = 0
        while not plain.is_complete and num_tokens < 60:
            assert made.allowed_tokens == plain.allowed_tokens
            taken: list[int] = []
            for draft in made.draft(draw.randrange(1, 8)):
                if draft.token_id != (token := drawn(plain, draw)):
                    break
                plain.constrainer.advance([(plain, [token])])
                assert plain.allowed_tokens == draft.allowed_tokens
                assert not plain.is_complete
                taken.append(token)
            token = drawn(plain, draw)
            plain.constrainer.advance([(plain, [token])])
            made.constrainer.advance([(made, [*taken, token])])
            assert (made.is_complete, made.error) == (plain.is_complete, plain.error)
            num_tokens += len(taken) + 1


def drawn(made: Constraint, draw: random.Random) -> int:
    """A token that may come, the lowest ones most of the time."""
    bits = int.from_bytes(made.allowed_tokens, "little") & ~(1 << EOS_TOKEN_ID)
    allowed = [token for token in range(VOCAB_SIZE) if bits >> token & 1]
    return allowed[0] if draw.random() < 0.7 else draw.choice(allowed)


def test_a_form_whose_drafts_take_long_rests(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = constraint(grammars, StructuredOutputs(regex="(ab){500}"))
    assert len(made.draft(7)) == 7
    clock = itertools.chain([0.0, 0.0], itertools.repeat(3600.0))
    monkeypatch.setattr(time, "thread_time", lambda: next(clock))
    assert len(made.draft(7)) == 1  # it took an hour
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)
    for number in range(REST_TOKENS):
        assert len(made.draft(7)) == 0, number
        made.constrainer.advance([(made, [b"ab"[number % 2]])])
    assert len(made.draft(7)) == 7


def test_drafts_that_take_long_together_are_fewer_and_no_reason_to_rest(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = constraint(grammars, StructuredOutputs(regex="(ab){500}"))
    clock = itertools.count(0.0, 0.45 * MAX_DRAFTING_S)
    monkeypatch.setattr(time, "thread_time", lambda: next(clock))
    assert len(made.draft(7)) == 2
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)
    assert len(made.draft(7)) == 7


def test_tokens_that_were_not_asked_about_are_taken_in_all_the_same(grammars: Grammars) -> None:
    made = constraint(grammars, StructuredOutputs(regex="(ab){500}"))
    assert len(made.draft(2)) == 2
    made.constrainer.advance([(made, list(b"ababa"))])
    assert made.draft(1)[0].token_id == ord("b")


def test_a_token_that_may_not_come_is_an_error_though_another_was_drafted(
    grammars: Grammars,
) -> None:
    made = constraint(grammars, StructuredOutputs(regex="(ab){500}"))
    assert [type(draft) for draft in made.draft(2)] == [Draft] * 2
    made.constrainer.advance([(made, list(b"axb"))])
    assert made.error is not None


TWO = (0b11).to_bytes(1, "little")


def test_trust_in_a_habit_outlives_an_exception_and_not_two() -> None:
    habits = Habits()
    assert habits.draft(5, TWO) is None
    for token, expected in ((0, 0), (0, 0), (1, 0), (1, None), (1, 1)):
        habits.learn(5, TWO, token)
        assert habits.draft(5, TWO) == expected
    assert habits.draft(6, TWO) is None
    assert habits.draft(5, b"\x07") is None


def test_a_habit_of_a_long_time_is_given_up_as_soon_as_any() -> None:
    habits = Habits()
    for _ in range(50):
        habits.learn(5, TWO, 0)
    for expected in (0, 0, None, 1):
        habits.learn(5, TWO, 1)
        assert habits.draft(5, TWO) == expected


def test_where_nothing_is_to_choose_or_nearly_all_no_place_is_taken() -> None:
    habits = Habits()
    habits.learn(5, TWO, 1)
    for before in range(habits_module.MAX_PLACES):
        habits.learn(before, b"\x01", 0)
        habits.learn(before, bytes([255] * (habits_module.MAX_CHOICE // 8 + 1)), 0)
    assert habits.draft(5, TWO) == 1


def test_habits_forget_the_places_met_first() -> None:
    habits = Habits()
    for before in range(habits_module.MAX_PLACES + 1):
        habits.learn(before, TWO, 1)
    assert habits.draft(0, TWO) is None
    assert habits.draft(1, TWO) == 1
