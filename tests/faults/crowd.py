"""Clients that read streams at once, how far they are in tokens, and what each was told in all."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType

from control_plane.core.generation_params import GenerationParams
from hetero_infer.client import (
    RESUMABLE,
    Client,
    Delta,
    Event,
    Finished,
    SampleFinished,
)
from planes.address import Address
from planes.errors import EngineError
from tests.judging import Judge, Said
from tests.waiting import PATIENCE_S, POLL_S

MAX_READERS = 64


@dataclass(frozen=True, slots=True)
class Asked:
    """A request."""

    prompt: str
    params: GenerationParams


@dataclass(slots=True)
class Answer:
    """What a client was told, by sample."""

    texts: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    is_whole: bool = False

    def take(self, event: Event) -> int:
        """Add what an event says; how many tokens it brought. None may be missing or come again."""
        if isinstance(event, Delta):
            tokens = self.tokens.setdefault(event.index, [])
            assert event.offset == len(tokens)
            tokens += event.token_ids
            self.texts[event.index] = self.texts.get(event.index, "") + event.text
            return len(event.token_ids)
        if isinstance(event, SampleFinished):
            self.reasons[event.index] = event.finish_reason
        elif isinstance(event, Finished):
            self.reasons.setdefault(0, event.finish_reason)
            self.is_whole = True
            assert event.completion_tokens == self.num_tokens
        return 0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))

    def is_beginning_of(self, whole: Answer) -> bool:
        """Whether everything here stands there too."""
        return all(
            whole.tokens[k][: len(tokens)] == tokens and whole.texts[k].startswith(self.texts[k])
            for k, tokens in self.tokens.items()
        ) and all(whole.reasons[k] == reason for k, reason in self.reasons.items())


class Progress:
    """Tokens that all readers have seen, and the readers that are not at their end."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.num_tokens = 0
        self.num_open = 0

    def note(self, num_tokens: int = 0, num_open: int = 0) -> None:
        with self._changed:
            self.num_tokens += num_tokens
            self.num_open += num_open
            self._changed.notify_all()

    def wait_for(self, num_tokens: int) -> None:
        """Wait until so many tokens have been seen, or nobody reads any more."""
        with self._changed:
            is_there = self._changed.wait_for(
                lambda: self.num_tokens >= num_tokens or self.num_open == 0, PATIENCE_S
            )
        assert is_there, f"{self.num_tokens} of {num_tokens} tokens in time"


class Reader:
    """One client with one stream.

    It resumes where the client can; for several samples it asks anew, and what it was told before
    (`given_up`) must be the beginning of what it is told then.
    """

    def __init__(self, address: Address, asked: Asked, progress: Progress) -> None:
        self.asked = asked
        self.given_up: list[Answer] = []
        self.longest_gap_s = 0.0
        self._progress = progress
        self._client = Client(address)
        self._is_leaving = threading.Event()
        progress.note(num_open=1)

    def leave(self) -> None:
        """Close the connection, whatever the stream is doing."""
        self._is_leaving.set()
        self._client.close()

    def read(self) -> Answer:
        """Read to the end, or until this client leaves."""
        try:
            answer = self._read_once()
            while not answer.is_whole and not self._is_leaving.is_set():
                self.given_up.append(answer)
                self._is_leaving.wait(POLL_S)  # a client's pause; its leaving ends it
                answer = self._read_once()
            return answer
        finally:
            self._client.close()
            self._progress.note(num_open=-1)

    def _read_once(self) -> Answer:
        answer = Answer()
        can_resume = self.asked.params.n == 1
        last_s: float | None = None
        try:
            for event in self._client.stream(
                self.asked.prompt, self.asked.params, resume=can_resume
            ):
                num_tokens = answer.take(event)
                if num_tokens:
                    now = time.monotonic()
                    self.longest_gap_s = max(self.longest_gap_s, now - (last_s or now))
                    last_s = now
                    self._progress.note(num_tokens)
        except (EngineError, ValueError) as error:  # gRPC's for a channel closed: ValueError
            is_lost = not can_resume and isinstance(error, RESUMABLE)
            if not is_lost and not self._is_leaving.is_set():
                raise
        return answer


class Crowd:
    """Readers of one deployment; leaving the block makes those leave that still read."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._pool = ThreadPoolExecutor(MAX_READERS)
        self.progress = Progress()
        self.readers: list[Reader] = []
        self._answers: list[Future[Answer]] = []

    def ask(self, requests: Sequence[Asked]) -> None:
        for asked in requests:
            reader = Reader(self._address, asked, self.progress)
            self.readers.append(reader)
            self._answers.append(self._pool.submit(reader.read))
        assert len(self.readers) <= MAX_READERS

    def answers(self) -> list[Answer]:
        """Wait for all; what each was told, in the order in which they were asked."""
        return [answer.result(PATIENCE_S) for answer in self._answers]

    @property
    def longest_gap_s(self) -> float:
        """The longest that a reader of a stream that had begun waited for its next tokens."""
        return max(reader.longest_gap_s for reader in self.readers)

    def __enter__(self) -> Crowd:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for reader in self.readers:
            reader.leave()
        self._pool.shutdown()


def check_answers(
    judge: Judge, readers: Sequence[Reader], answers: Sequence[Answer], expected: Sequence[Answer]
) -> None:
    """Check what readers were told, now and before they asked anew, beside an undisturbed run.

    Every token that was told is in an answer, once: so it is kept, whatever came after.
    """
    if judge.target.keeps_bits:
        assert list(answers) == list(expected)
    for reader, answer, other in zip(readers, answers, expected, strict=True):
        if judge.target.keeps_bits:
            assert all(beginning.is_beginning_of(answer) for beginning in reader.given_up)
            continue
        assert answer.is_whole
        assert answer.reasons.keys() == other.reasons.keys()
        for told in (answer, *reader.given_up):
            for index, tokens in told.tokens.items():
                said = Said(reader.asked.prompt, reader.asked.params, tokens, index)
                judge.check([said], [other.tokens[index]])


def hear_all(address: Address, requests: Sequence[Asked]) -> list[Answer]:
    """Ask everything at once and disturb nothing."""
    with Crowd(address) as crowd:
        crowd.ask(requests)
        return crowd.answers()
