"""`hetero-infer chat` where answers come apart: what is shown, what the model is told again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from control_plane.core.generation_params import GenerationParams
from hetero_infer.client import (
    AnswerParts,
    Delta,
    Event,
    Finished,
    Message,
    PartsDelta,
    Started,
    TextRequest,
)
from hetero_infer.client.progress import Going, StreamProgress
from hetero_infer.client.streaming import StreamFacts
from hetero_infer.commands.chat import DIM, PLAIN, Answerer
from hetero_infer.commands.chat_history import INTERRUPTED, History
from hetero_infer.commands.chat_interrupts import Interrupts
from hetero_infer.generation_config import GenerationConfig

PARAMS = GenerationParams(seed=1)


class Stream(StreamFacts):
    """A stream of events that are there already."""

    def __init__(self, events: list[Event]) -> None:
        super().__init__(StreamProgress(TextRequest("", PARAMS), Going(0, True, 1.0, None)))
        self._events = events

    def __iter__(self) -> Iterator[Event]:
        for event in self._events:
            self._progress.so_far.take(event)
            yield event

    def answer(self):
        return self._progress.whole_answer()

    def close(self) -> None: ...


class Server:
    """A client whose server answers with such events. `asked`: the conversations so far."""

    def __init__(self, events: list[Event]) -> None:
        self._events = events
        self.asked: list[tuple[Message, ...]] = []

    def apply_chat_template(self, *_, **__):
        return type("Prompt", (), {"token_ids": (1,)})()

    def chat_stream(self, messages, *_, **__):
        self.asked.append(messages)
        return contextlib.nullcontext(Stream(self._events))


STARTED = Started("r", "m", 1, PARAMS)
FINISHED = Finished("stop", 1, 3, 0.0, 0.0, 0.0)
APART = [
    STARTED,
    Delta("<think>", (1,), parts=PartsDelta()),
    Delta("Ra", (2,), parts=PartsDelta(reasoning_content="Ra")),
    Delta("in?</think>It ra", (3,), parts=PartsDelta("It ra", "in?")),
    Delta("ins.", (4,), parts=PartsDelta("ins")),
    Finished("stop", 1, 4, 0.0, 0.0, 0.0, parts=PartsDelta(".")),
]
PLAIN_TEXT = [STARTED, Delta("It ra", (1,)), Delta("ins.", (2,)), FINISHED]


def answered(server: Server, *, interrupted: bool = False) -> tuple[Message, ...]:
    history = History()
    generation = GenerationConfig()
    answerer = Answerer(server, PARAMS, generation, template_kwargs={}, max_model_len=500)
    interrupts = Interrupts()
    interrupts.came = interrupted
    history.ask("And?")
    answerer.answer(history, interrupts)
    return history.messages


@pytest.mark.parametrize(
    ("events", "on_terminal", "shown"),
    [
        (PLAIN_TEXT, False, "It rains.\n"),
        (PLAIN_TEXT, True, "It rains.\n"),
        (APART, False, "It rains.\n"),
        (APART, True, f"{DIM}Ra{PLAIN}{DIM}in?{PLAIN}\n\nIt rains.\n"),
    ],
)
def test_marks_are_not_shown_and_thoughts_only_on_a_terminal(
    events, on_terminal, shown, capsys, monkeypatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: on_terminal)
    answered(Server(events))
    assert capsys.readouterr().out == shown


def test_the_model_is_told_again_what_it_said_and_thought_without_marks() -> None:
    said = Message("assistant", "It rains.", reasoning_content="Rain?")
    assert answered(Server(APART))[-1] == said
    assert answered(Server(PLAIN_TEXT))[-1] == Message("assistant", "It rains.")


def test_what_came_of_an_answer_that_was_interrupted_stays() -> None:
    message = answered(Server(APART[:4]), interrupted=True)[-1]
    assert (message.content, message.reasoning_content) == (f"It ra{INTERRUPTED}", "Rain?")


def test_a_stream_tells_its_parts_so_far() -> None:
    stream = Stream(APART)
    assert stream.parts == AnswerParts()
    parts = [stream.parts for _ in stream]
    assert parts[2:4] == [AnswerParts("", "Ra"), AnswerParts("It ra", "Rain?")]
    assert parts[-1] == AnswerParts("It rains.", "Rain?")
