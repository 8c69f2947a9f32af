"""What a structure lets a sample say, token by token, over a vocabulary of bytes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from control_plane.core.generation_params import GenerationParams
from control_plane.core.request import Request
from control_plane.core.structured_outputs import StructuredOutputs
from control_plane.errors import QueueFullError
from control_plane.structured.grammars import Grammars
from control_plane.structured.matcher import Matchers
from control_plane.structured.vocabulary import Vocabulary
from control_plane.text.simple_tokenizer import EOS_TOKEN_ID, SimpleTokenizer
from planes.errors import ValidationError

PATIENCE_S = 60.0
VOCAB_SIZE = 300  # wider than the tokenizer's 259


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(SimpleTokenizer(), vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_TOKEN_ID,))


def asked(structure: StructuredOutputs, known: str = "", **params) -> Request:
    return Request(
        id=1,
        input_tokens=[1],
        params=GenerationParams(structured_outputs=structure, **params),
        eos_token_ids=frozenset({EOS_TOKEN_ID}),
        output_tokens=list(known.encode()),
    )


def constraints(grammars: Grammars, structure: StructuredOutputs, known: str = "", **params):
    return grammars.constrain(asked(structure, known, **params)).result(timeout=60)


def allowed(constraint) -> str:
    """What may come next; an end is `$`."""
    mask = constraint.allowed_tokens
    assert len(mask) == -(-VOCAB_SIZE // 8)
    tokens = [i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1]
    assert all(token < 256 or token == EOS_TOKEN_ID for token in tokens)
    return "".join("$" if token == EOS_TOKEN_ID else chr(token) for token in tokens)


def say(constraint, text: str) -> None:
    for token in text.encode():
        assert chr(token) in allowed(constraint)
        constraint.constrainer.advance([(constraint, [token])])
        assert constraint.error is None


def test_a_choice_ends_where_nothing_may_follow(grammars):
    (one,) = constraints(grammars, StructuredOutputs(choice=("no", "not", 'd"\\\n', "ü")))
    assert allowed(one) == "dn\u00c3"
    say(one, "no")
    assert allowed(one) == "t$"
    assert not one.is_complete
    say(one, "t")
    assert one.is_complete


def test_more_than_can_wait_are_refused_and_those_that_are_given_up_make_room(monkeypatch):
    monkeypatch.setattr("control_plane.structured.grammars.MAX_WAITING", 2)
    grammars = Grammars(SimpleTokenizer(), vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_TOKEN_ID,))
    may_go_on = threading.Event()
    monkeypatch.setattr(Vocabulary, "make", lambda *_: may_go_on.wait(PATIENCE_S))
    first, second = (grammars.constrain(asked(StructuredOutputs(choice=("a",)))) for _ in range(2))
    with pytest.raises(QueueFullError, match="2 requests wait for structured_outputs already"):
        grammars.constrain(asked(StructuredOutputs(choice=("a",))))
    assert second.cancel()
    third = grammars.constrain(asked(StructuredOutputs(choice=("a",))))
    assert not third.done()
    may_go_on.set()
    assert first.exception(PATIENCE_S) is not None  # that was no vocabulary


def test_a_choice_may_have_any_character(grammars):
    text = "\x00\x1f\x7f\x85\u2028/\U0001f600"
    (one,) = constraints(grammars, StructuredOutputs(choice=(text, "no")))
    for byte in text.encode():
        assert not one.is_complete
        one.constrainer.advance([(one, [byte])])
        assert one.error is None
    assert one.is_complete


class WithoutAByte(SimpleTokenizer):
    """No token has the byte F2, as in vocabularies whose texts had none of its characters."""

    def encode_plain(self, text: str) -> list[int]:
        return [byte for byte in text.encode() if byte != 0xF2]

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if token_id == 0xF2 else super().token_bytes(token_id)


@pytest.fixture(scope="module")
def without_a_byte() -> Grammars:
    return Grammars(WithoutAByte(), vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_TOKEN_ID,))


@pytest.mark.parametrize(
    "structure",
    [
        StructuredOutputs(regex="\U000a9698x"),
        StructuredOutputs(choice=("\U000a9698", "\U000a9699")),
        StructuredOutputs(grammar='start: "\U000a9698"+'),
    ],
    ids=lambda structure: structure.kind,
)
def test_a_form_that_no_token_begins_is_refused(without_a_byte, structure):
    with pytest.raises(ValidationError, match="characters that the model has no tokens"):
        constraints(without_a_byte, structure)


def test_a_text_that_no_token_continues_ends_in_an_error_that_says_so(without_a_byte):
    (one,) = constraints(without_a_byte, StructuredOutputs(regex="ab\U000a9698c"))
    say(one, "a")
    one.constrainer.advance([(one, [ord("b")])])
    assert one.error is not None
    assert "characters that the model has no tokens for" in one.error
    assert not one.is_complete


def test_what_no_token_says_is_left_out_where_there_is_a_choice(without_a_byte):
    (one,) = constraints(without_a_byte, StructuredOutputs(choice=("\U000a9698", "no")))
    assert allowed(one) == "n"


def test_an_ignored_end_comes_only_where_it_must(grammars):
    structure = StructuredOutputs(regex="a{1,3}")
    (one,) = constraints(grammars, structure, ignore_eos=True)
    say(one, "a")
    assert allowed(one) == "a"
    say(one, "aa")
    assert one.is_complete


def test_a_grammar_counts_parentheses(grammars):
    (one,) = constraints(grammars, StructuredOutputs(grammar='start: "x" | "(" start ")"'))
    say(one, "((x)")
    assert allowed(one) == ")"
    say(one, ")")
    assert one.is_complete


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "k": {"enum": ["a", "b"]}},
    "required": ["n", "k"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("text", ['{"n":-12,"k":"b"}', '{\n  "n": 0,\n  "k": "a"\n}'])
@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)])
def test_json_follows_its_schema(grammars, schema, text):
    (one,) = constraints(grammars, StructuredOutputs(json=schema))
    say(one, text)
    assert one.is_complete


def test_white_space_in_json_comes_to_an_end(grammars):
    (one,) = constraints(grammars, StructuredOutputs(json_object=True))
    say(one, "{" + " " * 16)
    assert " " not in allowed(one)
    say(one, "}")
    assert one.is_complete


def test_samples_of_a_request_go_their_own_ways_together(grammars):
    first, second = constraints(grammars, StructuredOutputs(regex="ab|cde"), n=2)
    assert allowed(first) == allowed(second) == "ac"
    first.constrainer.advance([(first, [ord("a")]), (second, [ord("c")])])
    assert (allowed(first), allowed(second)) == ("b", "d")
    first.constrainer.advance([(first, [ord("b")]), (second, [ord("d")])])
    assert (first.is_complete, second.is_complete) == (True, False)
    assert allowed(second) == "e"


def test_a_token_that_may_not_come_is_an_error_of_its_sample_alone(grammars):
    first, second = constraints(grammars, StructuredOutputs(regex="ab|cde"), n=2)
    first.constrainer.advance([(first, [ord("x")]), (second, [ord("c")])])
    assert first.error is not None
    assert "\n" not in first.error
    assert (second.error, allowed(second)) == (None, "d")


def test_an_answer_that_is_continued_stands_where_its_tokens_end(grammars):
    structure = StructuredOutputs(json=SCHEMA)
    (one,) = constraints(grammars, structure, '{"n":1,"k":"')
    assert allowed(one) == "ab"
    (whole,) = constraints(grammars, structure, '{"n":1,"k":"a"}')
    assert whole.is_complete
    with pytest.raises(ValidationError, match="continued does not follow") as caught:
        constraints(grammars, structure, '{"m')
    assert caught.value.field == "continued"


def test_what_may_follow_is_computed_once_for_all_tokens_of_a_continued_answer(
    grammars, monkeypatch
):
    computed = []
    fill = Matchers._fill

    def note(self, matchers):
        computed.extend(matchers)
        fill(self, matchers)

    monkeypatch.setattr(Matchers, "_fill", note)
    (one,) = constraints(grammars, StructuredOutputs(regex="a*b"), "a" * 500)
    assert computed == [one]
    assert allowed(one) == "ab"


def test_a_grammar_that_is_read_in_ever_more_ways_ends_its_sample_while_steps_are_short(grammars):
    (one,) = constraints(grammars, StructuredOutputs(grammar='start: s\ns: s s s | s s | "a" | '))
    for _ in range(100):
        one.constrainer.advance([(one, [ord("a")])])
        if one.error is not None:
            break
    assert one.error is not None
    assert "items" in one.error


def test_a_schema_may_refer_to_itself_in_what_it_holds(grammars):
    tree = {"type": "array", "items": {"$ref": "#/$defs/tree"}}
    schema = {"$ref": "#/$defs/tree", "$defs": {"tree": tree}}
    (one,) = constraints(grammars, StructuredOutputs(json=schema))
    say(one, "[[],[[]]]")
    assert one.is_complete


def test_who_asks_for_no_structure_does_not_pay_for_the_library():
    code = (
        "import sys, control_plane.app, hetero_infer.engine;"
        "assert not {'llguidance', 'numpy'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
