"""How tool calls are named, so that a conversation can go on with what came of them."""

from __future__ import annotations

from control_plane.core.generation_params import GenerationParams
from control_plane.text.answers.call_ids import CallIds
from control_plane.text.answers.parts import CallPiece
from control_plane.text.answers.reader import AnswerReader
from control_plane.text.answers.recognition import AnswerFormats
from control_plane.text.simple_tokenizer import SimpleTokenizer


def test_a_call_has_the_same_id_whenever_the_same_request_makes_it():
    ids = CallIds([1, 2, 300_000], seed=2**64 - 1)
    known = {ids.name(sample, call) for sample in range(3) for call in range(3)}
    assert len(known) == 9
    assert ids.name(1, 11) != ids.name(11, 1)
    assert all(len(name) == 9 and name.isalnum() and name.isascii() for name in known)
    assert CallIds([1, 2, 300_000], seed=2**64 - 1).name(2, 1) == ids.name(2, 1)
    assert CallIds([1, 2], seed=2**64 - 1).name(0, 0) not in known
    assert CallIds([1, 2, 300_000], seed=1).name(0, 0) not in known


TOOL = {"type": "function", "function": {"name": "f"}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [{}, {}]}
MESSAGES = [{"role": "user", "content": "Hi"}, CALLED, {"role": "tool", "content": ""}, CALLED]


def reader_of(parser: str, messages=()) -> AnswerReader:
    formats = AnswerFormats(SimpleTokenizer(), None, tool_call_parser=parser)
    found = formats.of("A: ", messages=messages, tools=[TOOL])
    assert found is not None
    return AnswerReader(found, [1, 2], GenerationParams(seed=1))


def test_kimis_calls_are_named_by_their_function_and_counted_through_the_conversation():
    first = CallPiece(0, "f", "")
    assert reader_of("kimi_k2").call_id(0, first) == "functions.f:0"
    assert reader_of("kimi_k2", MESSAGES).call_id(0, first) == "functions.f:4"
    assert reader_of("kimi_k2", MESSAGES).call_id(1, CallPiece(2, "g", "{}")) == "functions.g:6"


def test_calls_of_other_formats_have_ids_of_their_own():
    ids = CallIds([1, 2], 1)
    assert reader_of("hermes", MESSAGES).call_id(1, CallPiece(2, "f", "")) == ids.name(1, 2)
