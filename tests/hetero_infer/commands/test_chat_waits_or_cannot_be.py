"""What `hetero-infer chat` says of a server that lets it wait, or whose model cannot chat."""

from __future__ import annotations

import contextlib
import io
from types import SimpleNamespace

import pytest

from control_plane.errors import QueueFullError, TokenRateError
from hetero_infer.cli import main
from hetero_infer.client import AnswerParts
from planes.errors import ValidationError

USED_UP = "max_tokens_per_minute of this token, 20, is used up; retry in 7.0 s"
INVALID = "the model's chat template is invalid: unexpected '}'"


class Answered:
    """A stream that is over."""

    text, is_finished, parts = "", True, AnswerParts("")

    def __iter__(self):
        return iter(())

    def answer(self):
        return SimpleNamespace(finish_reason="stop")


class Server:
    """A client whose calls wait as `waits` says; `refusal`: why there is no chat."""

    waits = ()
    refusal = None

    def __init__(self, *_args, on_wait, **_keywords):
        self._on_wait = on_wait

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def model_info(self, _model):
        has_template = self.refusal is None
        return SimpleNamespace(model="m", has_chat_template=has_template, max_model_len=1000)

    def apply_chat_template(self, _messages, **_keywords):
        if self.refusal is not None:
            raise ValidationError(self.refusal, field="messages")
        for wait in self.waits:
            self._on_wait(*wait)
        return SimpleNamespace(token_ids=(1,))

    def chat_stream(self, *_args, **_keywords):
        return contextlib.nullcontext(Answered())


@pytest.fixture
def talk(monkeypatch, capsys):
    """Say one thing to a server; the status, and what was said beside the answer."""

    def run(server):
        monkeypatch.setattr("hetero_infer.commands.chat.Client", server)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"hello\n")))
        status = main(["chat", "--target=unix:/nowhere"])
        return status, capsys.readouterr().err.splitlines()

    return run


def test_a_wait_is_told_before_it_begins_unless_nobody_would_notice_it(talk):
    class Waiting(Server):
        waits = (
            (TokenRateError(USED_UP, retry_after_s=7.0), 7.0),
            (QueueFullError("4 requests wait already"), 0.1),
        )

    status, said = talk(Waiting)
    assert (status, said) == (0, [f"hetero-infer: waiting 7 s for the server: {USED_UP}"])


@pytest.mark.parametrize("why", ["the model has no chat template", INVALID])
def test_why_a_model_cannot_chat_is_the_servers_word(talk, why):
    class Refusing(Server):
        refusal = why

    status, said = talk(Refusing)
    assert status == 2
    assert said == [
        f"hetero-infer: error: m: {why}; without one there is only `--input` (give a template with "
        "--chat-template FILE)"
    ]
