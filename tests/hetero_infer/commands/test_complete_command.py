"""`hetero-infer complete`: what it is given, what it writes, and how it goes on."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import time

import pytest

from hetero_infer.cli import main
from hetero_infer.client import Client
from hetero_infer.commands.batch_output import ResultFile
from hetero_infer.generation_config import GenerationConfig
from hetero_infer.wire_errors import ServerLostError
from planes.errors import ExecutionError
from tests.hetero_infer.commands.conftest import COMMAND, PATIENCE_S

SAMPLING = ("--seed=3", "--ignore-eos", "--temperature=1")


def lines_of(text):
    return [json.loads(line) for line in text.splitlines()]


def answer_to(server, prompt, **params):
    params = GenerationConfig(**{"seed": 3, "ignore_eos": True, "max_tokens": 6, **params}).params
    with Client(server) as client:
        return client.generate(prompt, params).text


@pytest.fixture
def complete(server, capsys):
    """Run the command in this process; status, results printed, what was said."""

    def run(*argv):
        arguments = ["complete", f"--target={server}", *SAMPLING, "--max-tokens=6"]
        status = main([*arguments, *map(str, argv)])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


@pytest.fixture
def batch(tmp_path):
    """Write a batch; its file."""

    def write(*lines):
        file = tmp_path / "in.jsonl"
        file.write_text(
            "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        )
        return file

    return write


def test_each_line_has_its_own_parameters_and_its_own_error(complete, batch, server, tmp_path):
    file = batch(
        {"prompt": "one"},
        {"id": "two", "prompt": [104, 105], "max_tokens": 3, "seed": 9, "stop": "zz"},
        {"id": "three", "messages": [{"role": "user", "content": "hi"}], "n": 2},
        "",
        "{torn",
        {"id": "five", "prompt": "x", "temperature": 9},
        {"id": "six", "prompt": "x", "best_of": 2},
        {"id": "seven", "prompt": "x", "max_tokens": 99999},
        {"id": "eight", "prompt": "x", "messages": []},
        {"id": "nine", "prompt": "\ud800"},
        {"id": "ten", "prompt": "x", "logit_bias": {"65": 100.0}, "temperature": 0},
    )
    out = tmp_path / "out.jsonl"
    status, printed, said = complete("--input-file", file, "--output", out, "--concurrency=3")
    assert (status, printed) == (1, "")
    assert said.startswith("hetero-infer: 4 done, 6 failed; ")
    results = {result["id"]: result for result in lines_of(out.read_text())}
    assert results[1]["text"] == answer_to(server, "one")
    assert results["two"]["text"] == answer_to(server, "hi", max_tokens=3, seed=9)
    assert len(results["three"]["samples"]) == 2
    assert len(results["ten"]["text"]) == 6
    errors = {key: result["error"] for key, result in results.items() if "error" in result}
    assert {key: error.get("field") for key, error in errors.items()} == {
        5: None,
        "five": "temperature",
        "six": "best_of",
        "seven": "max_tokens",
        "eight": "prompt",
        "nine": "prompt",
    }
    assert errors["seven"]["reason"] == "CONTEXT_LENGTH_EXCEEDED"


def test_files_and_stdin_are_one_prompt_each(complete, tmp_path, server, monkeypatch):
    names = []
    for text in ("first\n", "second"):
        names.append(tmp_path / text.strip())
        names[-1].write_text(text)
    status, printed, _ = complete("--ordered", *names)
    assert status == 0
    assert [(result["id"], result["text"]) for result in lines_of(printed)] == [
        (str(names[0]), answer_to(server, "first")),
        (str(names[1]), answer_to(server, "second")),
    ]
    with names[0].open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        status, printed, _ = complete()
    (result,) = lines_of(printed)
    assert (status, result["id"]) == (0, "stdin")
    assert result["text"] == answer_to(server, "first")


@pytest.mark.parametrize(("argv", "given"), [((), b""), ((), b"\n"), (("-",), b"")])
def test_an_empty_standard_input_is_one_line_and_status_2(
    complete, tmp_path, monkeypatch, argv, given
):
    (tmp_path / "empty").write_bytes(given)
    with (tmp_path / "empty").open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        status, printed, said = complete(*argv)
    assert (status, printed) == (2, "")
    assert said == (
        "hetero-infer: error: standard input is empty: give files with prompts, "
        "--input-file F.jsonl, or pipe a prompt in\n"
    )


def test_order_is_that_of_the_input_if_asked_for(complete, batch, tmp_path):
    # The first is the longest.
    file = batch(*({"prompt": "x", "max_tokens": 200 // n, "id": n} for n in range(1, 9)))
    status, printed, _ = complete("--input-file", file, "--ordered")
    assert status == 0
    assert [result["id"] for result in lines_of(printed)] == list(range(1, 9))
    out = tmp_path / "out.jsonl"
    assert complete("--input-file", file, "--ordered", "--output", out)[0] == 0
    assert [result["id"] for result in lines_of(out.read_text())] == list(range(1, 9))


def test_a_run_goes_on_where_the_last_one_ended(complete, batch, tmp_path):
    file = batch(*({"prompt": f"number {n}", "id": n} for n in range(6)))
    out = tmp_path / "out.jsonl"
    assert complete("--input-file", file, "--output", out, "--ordered")[0] == 0
    whole = out.read_bytes()
    lines = whole.splitlines(keepends=True)
    # 0 failed, 3 and 4 are there, 5 was torn off, and the file is not in order.
    error = json.dumps({"id": 0, "error": {"reason": "X", "message": "x"}}).encode() + b"\n"
    done = lines[4].replace(b'"text": "', b'"text": "kept ')
    out.write_bytes(done + error + lines[3] + lines[5][:20])
    status, _, said = complete("--input-file", file, "--output", out)
    assert status == 0
    assert said.startswith("hetero-infer: 4 done, 2 done before; ")
    texts = {result["id"]: result["text"] for result in lines_of(out.read_text())}
    assert texts.pop(4).startswith("kept ")
    expected = {result["id"]: result["text"] for result in lines_of(whole.decode())}
    assert texts == {key: text for key, text in expected.items() if key != 4}
    # Nothing is left to do, and it may be put in order; then no server is asked.
    status, _, said = complete("--input-file", file, "--output", out, "--ordered")
    assert (status, said) == (0, "hetero-infer: 0 done, 6 done before\n")
    assert [result["id"] for result in lines_of(out.read_text())] == list(range(6))
    assert list(tmp_path.glob("*.tmp")) == []


def test_a_torn_last_line_is_cut_away_and_one_that_only_lacks_its_end_counts(tmp_path):
    out = tmp_path / "out.jsonl"
    whole = '{"id": 1, "request_hash": "a", "text": "x"}\n'
    for before, done in ((whole + '{"id": 2, "te', {"1"}), (whole[:-1], {"1"})):
        out.write_text(before)
        with contextlib.closing(ResultFile(str(out), {"1": "a", "2": "b"})) as results:
            assert results.done == done
            results.write({"id": 2, "text": "y"})
        assert out.read_text() == whole + '{"id": 2, "text": "y"}\n'


def test_errors_of_requests_that_are_gone_count_for_nothing(complete, batch, tmp_path):
    out = tmp_path / "out.jsonl"
    wrong = {"prompt": "two", "temperature": 9}
    asked = ("--input-file", batch({"prompt": "one"}, wrong), "--output", out)
    assert complete(*asked)[0] == 1
    lines = out.read_bytes().splitlines(keepends=True)
    (answer,) = (line for line in lines if b'"text"' in line)
    batch({"prompt": "one"})  # the wrong line was taken out
    assert complete(*asked) == (0, "", "hetero-infer: 0 done, 1 done before\n")
    assert out.read_bytes() == answer


def test_an_answer_to_another_request_is_not_taken_for_this_one(complete, batch, tmp_path, server):
    out = tmp_path / "out.jsonl"
    asked = ("--input-file", batch({"prompt": "one"}, {"prompt": "two"}), "--output", out)
    assert complete(*asked)[0] == 0
    before = out.read_bytes()
    # A line in front: without ids, what follows is called by other numbers than before.
    batch({"prompt": "zero"}, {"prompt": "one"}, {"prompt": "two"})
    status, _, said = complete(*asked)
    assert status == 2
    assert "an answer to another request than the input has now for the id 1 and 1 more" in said
    # Other parameters, from the command line.
    batch({"prompt": "one"}, {"prompt": "two"})
    status, _, said = complete(*asked, "--max-tokens=7")
    assert (status, said.count("for the id 1 and 1 more: prompt or parameters")) == (2, 1)
    assert out.read_bytes() == before
    # When it is served changes no answer.
    assert complete(*asked, "--priority=3", "--cache-salt=x")[0] == 0
    assert out.read_bytes() == before
    batch({"prompt": "one"}, {"prompt": "other"})
    status, _, said = complete(*asked, "--redo-changed")
    assert status == 0
    assert said.startswith("hetero-infer: answering anew what has changed since: 1\n")
    assert "1 done, 1 done before" in said
    results = {result["id"]: result["text"] for result in lines_of(out.read_text())}
    assert results == {1: answer_to(server, "one"), 2: answer_to(server, "other")}


def test_answers_of_another_model_are_pointed_out(complete, batch, tmp_path):
    out = tmp_path / "out.jsonl"
    asked = ("--input-file", batch({"prompt": "one"}, {"prompt": "two"}), "--output", out)
    assert complete(*asked)[0] == 0
    first, _ = out.read_text().splitlines()
    out.write_text(first.replace('"simulated"', '"other"') + "\n")
    status, _, said = complete(*asked)
    assert status == 0
    assert "there are answers of 'other' already; this server runs 'simulated'" in said


@pytest.mark.parametrize(
    ("before", "what"),
    [
        ("my notes\n", "holds something else than results, see line 1"),
        (
            '{"id": 98, "error": {}}\n{"id": 99, "text": "x"}\n',
            "has a result for the id 99 (line 2), which is not in the input; give another "
            "--output, or put that line back",
        ),
    ],
)
def test_a_file_of_something_else_is_left_alone(complete, batch, tmp_path, before, what):
    out = tmp_path / "out.jsonl"
    out.write_text(before)
    status, _, said = complete("--input-file", batch({"prompt": "x"}), "--output", out)
    assert status == 2
    assert what in said
    assert out.read_text() == before


@pytest.mark.parametrize(
    ("argv", "lines", "what"),
    [
        (
            [],
            ['{"id": 2, "prompt": "x"}', '{"prompt": "y"}'],
            "the id 2 is used twice, in line 1 and in line 2; results are matched by id (without",
        ),
        (["--input-file=/nowhere"], None, "/nowhere cannot be read"),
        (["/nowhere"], None, "/nowhere cannot be read"),
        (["--concurrency=0"], ["{}"], "concurrency (from --concurrency) must be at least 1"),
        (["x"], ["{}"], "give files with prompts or --input-file, not both"),
        (["--output=/nowhere/x"], ["{}"], "output: /nowhere/x cannot be written"),
    ],
)
def test_what_cannot_be_is_one_line_and_status_2(complete, batch, argv, lines, what):
    if lines is not None:
        argv = [*argv, "--input-file", batch(*lines)]
    status, printed, said = complete(*argv)
    assert (status, printed) == (2, "")
    assert what in said
    assert said.count("\n") == 1


def test_a_terminal_that_pipes_nothing_in_is_told_what_to_do(complete, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", terminal)
    status, _, said = complete()
    assert status == 2
    assert "nothing to do: give files" in said


def test_a_server_that_is_not_there_is_one_error_and_not_one_a_line(capsys, batch, tmp_path):
    out = tmp_path / "out.jsonl"
    arguments = ["--input-file", str(batch({"prompt": "x"})), "--output", str(out)]
    assert main(["complete", f"--target=unix:{tmp_path}/none.sock", *arguments]) == 1
    assert out.read_text() == ""
    assert "0 done, 1 not done" in capsys.readouterr().err


@pytest.mark.wide
def test_ctrl_c_leaves_whole_lines_and_the_next_run_does_the_rest(
    complete, environ, batch, server, tmp_path
):
    file = batch(*({"prompt": f"number {n}", "id": n, "max_tokens": 60} for n in range(24)))
    out = tmp_path / "out.jsonl"
    asked = [f"--input-file={file}", f"--output={out}"]
    process = subprocess.Popen(
        [*COMMAND, "complete", f"--target={server}", *SAMPLING, *asked, "--concurrency=2"],
        env=environ,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + PATIENCE_S
    while not out.exists() or out.read_bytes().count(b"\n") < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    # Another one keeps its hands off meanwhile.
    assert complete(*asked)[0] == 2
    os.kill(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, said
    assert "not done" in said
    assert "Traceback" not in said
    done = lines_of(out.read_text())
    assert 3 <= len(done) < 24
    with Client(server) as client:
        assert client.list_requests() == ()
    status, _, said = complete(*asked)
    assert status == 0
    assert f"{24 - len(done)} done, {len(done)} done before" in said
    results = lines_of(out.read_text())
    assert results[: len(done)] == done
    assert sorted(result["id"] for result in results) == list(range(24))


def test_an_unknown_key_comes_with_the_one_that_was_meant(complete, batch):
    file = batch({"prompt": "x", "logprobs": 1}, {"prompt": "x", "zebra": 1})
    status, printed, _ = complete("--input-file", file, "--ordered")
    assert status == 1
    assert [line["error"]["message"] for line in lines_of(printed)] == [
        "unknown key 'logprobs': did you mean 'num_logprobs'?",
        "unknown key 'zebra'",
    ]


class LosingClient:
    """Loses the server in the middle of each answer, and never gets to its end."""

    def __init__(self, *_args, **_keywords):
        pass

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    @contextlib.asynccontextmanager
    async def stream_request(self, _request, *, on_lost, patience_s, **_):
        on_lost(ServerLostError("it broke"), patience_s)
        yield self

    async def answer(self):
        raise ExecutionError("no answer")


def test_a_server_that_is_waited_for_is_told_once_for_all_jobs(complete, batch, monkeypatch):
    monkeypatch.setattr("hetero_infer.commands.complete.AsyncClient", LosingClient)
    file = batch({"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"})
    status, _, said = complete("--input-file", file)
    assert status == 1
    assert said.splitlines() == [
        "hetero-infer: waiting up to 120 s for the server: it broke",
        "hetero-infer: 0 done, 3 failed",
    ]
