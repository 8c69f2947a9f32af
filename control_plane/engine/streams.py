"""Output streams, which tasks of the event loop read. `stream_hub` brings what they are made of.

Text is made as tokens arrive, so that a stop string ends its sample however slow the reader is.
What a reader has not taken yet is merged into one larger piece a sample, so a slow reader gets
fewer and larger ones; one that leaves more than a bound untaken loses its request.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import structlog

from control_plane.core.batch import EndToken, TokenLogprobs
from control_plane.core.request import FinishReason, RequestState
from control_plane.engine.events import RequestEnd, RequestUpdate
from control_plane.engine.sample_text import SampleText, TextPiece
from control_plane.engine.watch import NOBODY, StreamWatch
from control_plane.errors import RequestFailedError, SlowReaderError
from planes.errors import EngineError

SEND_PATIENCE_S = 60.0
"""A client that takes nothing of what is sent for so long is taken for gone."""

DEFAULT_MAX_UNREAD_TOKENS = 2048
"""With 20 log-probabilities each they take about 5 MB, without any 0.2 MB."""

_log = structlog.get_logger(__name__)


class TextDelta(NamedTuple):
    """A piece of the answer, of sample `sample_index`; `offset`: its generated tokens before it.

    `logprobs`: one for each token, if they were asked for. `finish_reason` is set on the last piece
    of each sample, with `matched_stop`, the string or token the caller gave that ended it, if one
    did, and `end_token`, the token that ended it and is not among its tokens, if log-probabilities
    were asked for. `end`: on the last piece of all.
    """

    text: str
    token_ids: list[int]
    offset: int
    end: RequestEnd | None
    sample_index: int = 0
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    matched_stop: str | int | None = None
    end_token: EndToken | None = None


@dataclasses.dataclass(slots=True)
class _Unread:
    """What came of one sample and was not taken yet."""

    offset: int
    text: list[str]
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    end_token: EndToken | None = None


class RequestStream:
    """The output of one request, for one reading task; lives on the event loop.

    `texts`: of its samples, in order. `stop_sample` is told of a sample that its text has ended,
    and its number of tokens; `give_up` that the request is of no use any more. With more
    than `max_unread_tokens` tokens of a sample untaken, the reader is too slow. `watch` looks on.
    """

    __slots__ = (
        "_end",
        "_ended",
        "_error",
        "_give_up",
        "_has_news",
        "_is_admitted",
        "_max_unread_tokens",
        "_stop_sample",
        "_unread",
        "_waiter",
        "_watch",
        "prompt_logprobs",
        "texts",
    )

    def __init__(
        self,
        texts: Sequence[SampleText],
        *,
        stop_sample: Callable[[int, int], None],
        give_up: Callable[[], None],
        max_unread_tokens: int = DEFAULT_MAX_UNREAD_TOKENS,
        watch: StreamWatch = NOBODY,
    ) -> None:
        self.texts = texts
        self._watch = watch
        self._is_admitted = False
        self.prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self._stop_sample = stop_sample
        self._give_up = give_up
        self._max_unread_tokens = max_unread_tokens
        self._unread: dict[int, _Unread] = {}  # by sample, in the order of their news
        self._ended: set[int] = set()  # samples of which the end is among the news
        self._end: RequestEnd | None = None
        self._error: EngineError | None = None
        self._has_news = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the end has arrived, read or not."""
        return self._end is not None

    @property
    def is_refused(self) -> bool:
        """Whether the engine would not have the request at all."""
        return not self._is_admitted and (self._end is not None or self._error is not None)

    def push(self, update: RequestUpdate) -> None:
        """Take an update in and wake the reader."""
        if self._error is not None:
            self._end = self._end or update.end
            return
        if not self._is_admitted and (update.end is None or update.end.error is None):
            self._is_admitted = True
            self._watch.admit()
        if update.prompt_logprobs is not None:
            self.prompt_logprobs = update.prompt_logprobs
        try:
            if update.new_token_ids or update.finish_reason is not None:
                self._take(update)
            if update.end is not None:
                self._close(update.end)
        except EngineError as error:
            self._fail(error)
        # The tokenizer may be a user's own, and other requests share this call: whatever it
        # raises ends this one alone.
        except Exception as error:  # noqa: BLE001
            _log.exception("the text of a request could not be made")
            self._fail(RequestFailedError(f"the tokenizer failed: {error}"))
        self._has_news = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def leave(self) -> None:
        """Note that nobody reads it any more."""
        self._watch.leave()

    async def next_deltas(self) -> list[TextDelta]:
        """Wait for news and take all of it; maybe nothing, if that is that it is admitted.

        After a piece with an `end` there is nothing more. Raises the error of a request that was
        refused or failed, once what came before it is taken, and SlowReaderError.
        """
        while not self._has_news:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        end = self._end
        failure = None if end is None else end.error
        error = self._error or (None if self._unread else failure)
        if error is not None:
            raise error
        self._has_news = failure is not None  # that is for the next call
        unread, self._unread = self._unread, {}
        deltas = [
            TextDelta(
                "".join(news.text),
                news.token_ids,
                news.offset,
                None,
                index,
                news.finish_reason,
                tuple(news.logprobs),
                news.matched_stop,
                news.end_token,
            )
            for index, news in unread.items()
        ]
        if end is not None and failure is None:
            last = deltas.pop() if deltas else TextDelta("", [], self.texts[0].num_tokens, None)
            deltas.append(last._replace(end=end))
        return deltas

    def _take(self, update: RequestUpdate) -> None:
        """Make text of a sample's new tokens; what comes behind its stop string is dropped."""
        index, reason = update.sample_index, update.finish_reason
        sample = self.texts[index]
        if index in self._ended:
            return
        offset = sample.num_tokens
        news = self._add(index, offset, sample.push(update.new_token_ids, update.logprobs))
        if sample.has_ended and reason is None:
            self._stop_sample(index, sample.num_tokens)
        if sample.has_ended or reason is not None:
            self._finish(index, news, reason, update.matched_stop, update.end_token)
        if update.new_token_ids:
            self._watch.take(index, sample.num_tokens - offset, update.at)
        elif sample.num_tokens > offset:
            self._watch.give(sample.num_tokens - offset)

    def _finish(
        self,
        index: int,
        news: _Unread,
        reason: FinishReason | None,
        matched_stop: int | None = None,
        end_token: EndToken | None = None,
    ) -> None:
        """Add the end of a sample."""
        self._ended.add(index)
        sample = self.texts[index]
        rest = sample.finish()
        news.text.append(rest.text)
        news.token_ids.extend(rest.token_ids)
        news.logprobs.extend(rest.logprobs)
        news.finish_reason = FinishReason.STOP if sample.ended_itself else reason
        news.matched_stop = sample.matched_stop if sample.ended_itself else matched_stop
        news.end_token = None if sample.ended_itself else end_token

    def _add(self, index: int, offset: int, piece: TextPiece) -> _Unread:
        """Append a piece to what is unread of a sample. Raises SlowReaderError at the bound."""
        text, token_ids, logprobs = piece
        news = self._unread.get(index)
        if news is None:
            news = _Unread(offset, [text], [*token_ids], [*logprobs])
            self._unread[index] = news
            return news
        if len(news.token_ids) + len(token_ids) > self._max_unread_tokens:
            raise SlowReaderError(
                f"the reader is too slow: more than {self._max_unread_tokens} tokens of the answer "
                "(max_unread_tokens) wait for it"
            )
        news.text.append(text)
        news.token_ids.extend(token_ids)
        news.logprobs.extend(logprobs)
        return news

    def _close(self, end: RequestEnd) -> None:
        """Note the end of the request, which is that of every sample that goes on.

        A failure is not: behind what came before it there is the error alone.
        """
        for index, sample in enumerate(self.texts):
            if index not in self._ended and end.error is None:
                offset = sample.num_tokens
                news = self._add(index, offset, TextPiece("", ()))
                self._finish(index, news, end.finish_reason)
                self._watch.give(sample.num_tokens - offset)
        if end.state is RequestState.COMPLETED and self.texts[0].ended_itself:
            end = dataclasses.replace(end, finish_reason=FinishReason.STOP)
        self._end = end
        self._watch.end(end)

    def _fail(self, error: EngineError) -> None:
        """Let the reader have an error instead of what it has not taken."""
        self._error = error
        self._watch.fail(error)
        self._unread.clear()
        self._give_up()
