"""What `hetero-infer chat` says when its server is lost in the middle of an answer."""

from __future__ import annotations

import contextlib
import io
from types import SimpleNamespace

import pytest

from hetero_infer.cli import main
from hetero_infer.client import AnswerParts, Delta
from hetero_infer.wire_errors import ServerLostError

TURNS = "hello\nagain\n"


class LosingClient:
    """Loses the server behind the first piece of each answer; `comes_back`: and finds it again."""

    comes_back = False

    def __init__(self, *_args, **_keywords):
        self.asked = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def model_info(self, _model):
        return SimpleNamespace(model="m", has_chat_template=True, max_model_len=1000)

    def apply_chat_template(self, messages, **_keywords):
        self.asked.append([message.content for message in messages])
        return SimpleNamespace(token_ids=(1,))

    def chat_stream(self, *_args, on_lost, **_keywords):
        return contextlib.nullcontext(HalfAnswer(on_lost, comes_back=self.comes_back))


class HalfAnswer:
    """A stream whose server is lost in the middle."""

    def __init__(self, on_lost, *, comes_back):
        self.text, self.is_finished = "", False
        self._on_lost = on_lost
        self._comes_back = comes_back

    @property
    def parts(self):
        return AnswerParts(self.text)

    def answer(self):
        return SimpleNamespace(finish_reason="stop")

    def __iter__(self):
        self.text = "half"
        yield Delta("half", (1,))
        self._on_lost(ServerLostError("it broke"), 60.0)
        if not self._comes_back:
            raise ServerLostError("nothing answers")
        self.text = "half and half"
        yield Delta(" and half", (2,))
        self.is_finished = True


@pytest.fixture
def talk(monkeypatch, capsysbinary):
    """Talk to a client that loses its server; status, answers, what was said, what was asked."""

    def run(*, comes_back):
        clients = []

        def make(*args, **keywords):
            clients.append(LosingClient(*args, **keywords))
            clients[-1].comes_back = comes_back
            return clients[-1]

        monkeypatch.setattr("hetero_infer.commands.chat.Client", make)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(TURNS.encode())))
        status = main(["chat", "--target=unix:/nowhere"])
        printed = capsysbinary.readouterr()
        (client,) = clients
        return status, printed.out.decode(), printed.err.decode().splitlines(), client.asked

    return run


LOST = "hetero-infer: the server is lost (it broke): trying to reach it for 60 s"


def test_a_lost_server_is_told_at_once_and_so_is_what_becomes_of_the_half_answer(talk):
    status, answers, said, asked = talk(comes_back=False)
    assert status == 1
    assert answers == "half\nhalf\n"
    forgotten = "neither the question nor its half answer stays in the conversation"
    each = [LOST, "hetero-infer: error: nothing answers", f"hetero-infer: {forgotten}"]
    assert said == each * 2
    assert asked == [["hello"], ["again"]]


def test_an_answer_goes_on_where_the_server_comes_back(talk):
    status, answers, said, asked = talk(comes_back=True)
    assert status == 0
    assert answers == "half and half\nhalf and half\n"
    assert said == [LOST, "hetero-infer: the server is back, the answer goes on"] * 2
    assert asked == [["hello"], ["hello", "half and half", "again"]]
