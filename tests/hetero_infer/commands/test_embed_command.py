"""`hetero-infer embed`: texts from where they are, JSON Lines out."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from compute_plane.executor.simulated import hidden_states
from hetero_infer.commands import embed as command


def embedding_of(text: str) -> list[float]:
    values = hidden_states(np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32))
    return (values / math.hypot(*values)).tolist()


@pytest.fixture
def embed(server, run):
    def embed(*argv, stdin=""):
        done = run("embed", f"--target={server}", *argv, stdin=stdin)
        return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr

    return embed


def test_one_text_a_line_from_a_pipe_and_from_a_file(embed, tmp_path):
    texts = [f"text {number}" for number in range(300)]
    assert len(texts) > command.TEXTS_AT_ONCE
    status, lines, said = embed(stdin="\n".join(texts))
    assert (status, said) == (0, "")
    assert [line["index"] for line in lines] == list(range(300))
    for text, line in zip(texts, lines, strict=True):
        assert line["embedding"] == pytest.approx(embedding_of(text), rel=1e-6)
        assert line["prompt_tokens"] == len(text)
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(texts) + "\n")
    assert embed("--input-file", file) == (0, lines, "")


def test_the_text_of_the_command_line_as_it_is_asked_for(embed):
    status, [line], _ = embed("--input=hello", "--dimensions=1", "--no-normalize")
    assert status == 0
    assert len(line["embedding"]) == 1
    assert abs(line["embedding"][0]) != 1.0


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    ("argv", "stdin", "said"),
    [
        ((), "", "standard input is empty: give --input TEXT"),
        ((), "one\n\nthree\n", "standard input, line 2 is empty"),
        (("--input=",), "one\n", "input must not be empty, got ''"),
        (("--input=a", "--input-file=b"), "", "input_file means nothing beside --input"),
        (("--input-file=/nowhere",), "", "input_file: /nowhere cannot be read: No such file"),
        (("--input=a", "--dimensions=0"), "", "dimensions"),
        (("--input=a", "--dimensions=9"), "", "dimensions must be 1 to 2, the model's own, got 9"),
        (("--input=a", "--temperature=1"), "", "--temperature"),
        (("--input=a", "--pooling=mean"), "", "--pooling means nothing with --target"),
    ],
)
def test_what_is_wrong_is_one_line_and_status_2(embed, argv, stdin, said):
    status, lines, told = embed(*argv, stdin=stdin)
    assert (status, lines) == (2, [])
    assert said in told
    assert told.count("\n") == 1


def test_texts_are_sent_so_many_bytes_at_a_time(monkeypatch):
    monkeypatch.setattr(command, "BYTES_AT_ONCE", 10)
    texts = ["a" * 4, "b" * 4, "c" * 4, "d" * 30, "e"]
    assert list(command._calls(iter(texts))) == [texts[:2], texts[2:3], texts[3:4], texts[4:]]
