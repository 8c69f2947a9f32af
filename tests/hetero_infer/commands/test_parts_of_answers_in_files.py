"""Messages that are gone on with, and answers in parts, in the lines of `complete`."""

from __future__ import annotations

import json

import pytest

from hetero_infer.client.answers import (
    Answer,
    AnswerParts,
    Finished,
    GenerationParams,
    SampleAnswer,
    Started,
)
from hetero_infer.client.conversation import Message, ToolCall, messages_of
from hetero_infer.commands.answer_object import answer_object
from hetero_infer.commands.batch_input import CHAT_KEYS, Defaults, read_jobs
from hetero_infer.generation_config import GenerationConfig
from planes.errors import ValidationError

BEGUN = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]


@pytest.fixture
def job_of(tmp_path):
    def read(**line):
        config, file = GenerationConfig(), tmp_path / "in.jsonl"
        file.write_text(json.dumps(line))
        (job,) = read_jobs([], str(file), Defaults(config.params, config.options))
        return job

    return read


def test_a_line_may_go_on_with_a_message(job_of):
    plain = job_of(messages=BEGUN)
    begun = job_of(messages=BEGUN, continue_final_message=True)
    bare = job_of(messages=BEGUN, add_generation_prompt=False)
    assert begun.request.continue_final_message
    assert bare.request.add_generation_prompt is False
    thought = job_of(messages=[*BEGUN[:1], {**BEGUN[1], "reasoning_content": "hm"}])
    assert len({job.request_hash for job in (plain, begun, bare, thought)}) == 4
    for wrong in ({"prompt": "x"}, {"messages": BEGUN, "add_generation_prompt": "no"}):
        job = job_of(**{"continue_final_message": True, **wrong})
        assert isinstance(job.request, ValidationError)


def test_a_line_may_say_whether_tools_are_called(job_of):
    asked = {"messages": BEGUN[:1], "tools": [{"function": {"name": "f"}}]}
    plain = job_of(**asked)
    named = job_of(**asked, tool_choice={"type": "function", "function": {"name": "f"}})
    required = job_of(**asked, tool_choice="required")
    single = job_of(**asked, parallel_tool_calls=False)
    strict = job_of(messages=BEGUN[:1], tools=[{"function": {"name": "f", "strict": True}}])
    assert named.request.tool_choice.names == ("f",)
    assert required.request.tool_choice.is_forced
    assert not single.request.parallel_tool_calls
    jobs = (plain, named, required, single, strict)
    assert len({job.request_hash for job in jobs}) == 5
    for wrong in ({"tool_choice": "any"}, {"parallel_tool_calls": "no"}):
        assert isinstance(job_of(**asked, **wrong).request, ValidationError)
    assert isinstance(job_of(prompt="x", tool_choice="auto").request, ValidationError)


def test_what_is_null_in_a_line_is_as_if_it_were_not_there(job_of):
    names = ("tools", "tool_choice", "parallel_tool_calls", "temperature", "stop", "seed", "model")
    job = job_of(id=None, prompt=None, messages=BEGUN, **dict.fromkeys((*names, *CHAT_KEYS)))
    assert (job.id, job.request) == (1, job_of(messages=BEGUN).request)
    assert isinstance(job_of(messages=BEGUN, unknown=None).request, ValidationError)


def test_the_hash_of_a_line_that_says_nothing_of_it_is_as_it_was(job_of):
    """Results of earlier versions count as done."""
    job = job_of(messages=BEGUN[:1], tools=[{"function": {"name": "f"}}])
    assert job.request_hash == "d07e44683fae7a51"


def answer(parts: AnswerParts | None) -> Answer:
    sample = SampleAnswer(0, "all of it", (1, 2), "stop", parts=parts)
    finished = Finished("stop", 3, 2, 0, 0, 0, reasoning_tokens=1 if parts else 0)
    return Answer(Started("1", "m", 3, GenerationParams()), (sample,), finished)


def test_a_result_has_the_message_beside_its_text():
    call = ToolCall("1", "f", '{"x": 1}')
    found = answer_object(answer(AnswerParts("Hi", "hm", (call,))))
    assert found["text"] == "all of it"
    assert found["message"] == {
        "role": "assistant",
        "content": "Hi",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
        ],
    }
    assert messages_of([found["message"]]) == (Message("assistant", "Hi", "", (call,), "", "hm"),)
    silent = answer_object(answer(AnswerParts("", "", (call,))))["message"]
    assert silent["content"] is None
    assert messages_of([silent]) == (Message("assistant", "", "", (call,)),)
    assert found["usage"]["reasoning_tokens"] == 1
    plain = answer_object(answer(None))
    assert "message" not in plain
    assert "reasoning_tokens" not in plain["usage"]
    assert answer(None).message == Message("assistant", "all of it")
