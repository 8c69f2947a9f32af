"""`--chat-template-kwargs` of `chat` and `complete`, and of the lines of a batch."""

from __future__ import annotations

import io
import json

import pytest

from hetero_infer.cli import main
from hetero_infer.client import Client
from hetero_infer.commands.batch_input import Defaults, read_jobs
from hetero_infer.generation_config import GenerationConfig

SAMPLING = ("--seed=3", "--ignore-eos", "--temperature=1", "--max-tokens=6")
PARAMS = GenerationConfig(seed=3, ignore_eos=True, max_tokens=6).params
HI = [{"role": "user", "content": "hi"}]


def answer_to(server, **variables):
    with Client(server) as client:
        return client.chat(HI, PARAMS, chat_template_kwargs=variables).text


def test_a_chat_is_told_them_in_every_turn(server, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"hi\n/reset\nhi\n")))
    flag = '--chat-template-kwargs={"mood": "glad"}'
    assert main(["chat", f"--target={server}", *SAMPLING, flag]) == 0
    glad = answer_to(server, mood="glad")
    assert capsys.readouterr().out.splitlines() == [glad, glad]
    assert glad != answer_to(server)


def test_a_chat_that_would_tell_what_is_not_read_does_not_begin(server, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"hi\nhi\n")))
    assert main(["chat", f"--target={server}", '--chat-template-kwargs={"mod": 1}']) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "does not read 'mod'; it reads mood" in printed.err


def test_a_line_says_its_own_over_those_of_the_command(server, capsys, tmp_path):
    lines = [
        {"messages": HI},
        {"messages": HI, "chat_template_kwargs": {"mood": "gruff"}},
        {"messages": HI, "chat_template_kwargs": {"other": 1}},
        {"messages": HI, "chat_template_kwargs": "{}"},
        {"prompt": "hi", "chat_template_kwargs": {"mood": "gruff"}},
    ]
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    flag = '--chat-template-kwargs={"mood": "glad"}'
    arguments = [f"--target={server}", f"--input-file={file}", "--ordered", *SAMPLING, flag]
    assert main(["complete", *arguments]) == 1
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [result.get("text") for result in results[:2]] == [
        answer_to(server, mood="glad"), answer_to(server, mood="gruff")
    ]  # fmt: skip
    assert [result["error"]["field"] for result in results[2:]] == ["chat_template_kwargs"] * 3


def test_answers_without_them_are_those_of_earlier_versions(tmp_path):
    defaults = GenerationConfig()

    def hash_of(line, **variables):
        file = tmp_path / "in.jsonl"
        file.write_text(json.dumps(line))
        told = Defaults(defaults.params, defaults.options, variables)
        (job,) = read_jobs([], str(file), told)
        return job.request_hash

    plain = hash_of({"messages": HI})
    assert plain == hash_of({"messages": HI, "chat_template_kwargs": {}}) == "04e5942197a739d7"
    glad = hash_of({"messages": HI}, mood="glad")
    assert glad == hash_of({"messages": HI, "chat_template_kwargs": {"mood": "glad"}})
    assert len({plain, glad, hash_of({"messages": HI}, mood="gruff")}) == 3


@pytest.mark.parametrize("command", ["chat", "complete", "serve"])
def test_what_is_no_object_is_one_line_and_status_2(command, capsys):
    for flag, said in (
        (
            "{mood: glad}",
            "chat_template_kwargs (from --chat-template-kwargs) must be a JSON object",
        ),
        ('{"tools": []}', "must not set 'tools': the server does"),
    ):
        assert main([command, f"--chat-template-kwargs={flag}"]) == 2
        told = capsys.readouterr().err
        assert said in told
        assert told.count("\n") == 1
