"""What one answer does to the library's limits is no matter to the others of its form."""

from __future__ import annotations

import random

import pytest

from control_plane.core.constraint import Constraint
from control_plane.core.generation_params import GenerationParams
from control_plane.core.request import Request
from control_plane.core.structured_outputs import StructuredOutputs
from control_plane.structured import grammars as grammars_module
from control_plane.structured.grammars import Grammars
from control_plane.text.simple_tokenizer import EOS_TOKEN_ID, SimpleTokenizer

SUBSETS = StructuredOutputs(regex="[ab]*a[ab]{14}c")
"""Each text of new letters needs new states of the lexer, of which there are 2^15."""


@pytest.fixture
def grammars(monkeypatch: pytest.MonkeyPatch) -> Grammars:
    monkeypatch.setitem(grammars_module.LIMITS, "max_lexer_states", 300)
    return Grammars(SimpleTokenizer(), vocab_size=300, eos_token_ids=(EOS_TOKEN_ID,))


def constraint(grammars: Grammars) -> Constraint:
    request = Request(1, [1], GenerationParams(structured_outputs=SUBSETS))
    (made,) = grammars.constrain(request).result(timeout=60)
    return made


def say(made: Constraint, text: str) -> None:
    for token in text.encode():
        if made.error is None:
            made.draft(3)
            made.constrainer.advance([(made, [token])])


def letters(seed: int, count: int) -> str:
    return "".join(random.Random(seed).choices("ab", k=count))


def test_an_answer_that_takes_too_many_states_ends_no_other_and_nobody_after_it(
    grammars: Grammars,
) -> None:
    beside, greedy = constraint(grammars), constraint(grammars)
    say(beside, "ab")
    say(greedy, letters(1, 400))
    assert greedy.error == "what it leaves open takes too much to follow"
    for made in (beside, constraint(grammars)):
        say(made, letters(2, 20))
        assert made.error is None


def test_a_form_that_many_have_asked_for_is_followed_as_it_was_at_first(grammars: Grammars) -> None:
    for seed in range(40):
        made = constraint(grammars)
        say(made, letters(seed, 30))
        assert made.error is None, seed
