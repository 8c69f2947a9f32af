"""One request under way, as the task that reads it sees it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from control_plane.access.principal import Lease
from control_plane.core.batch import TokenLogprobs
from control_plane.core.request import Request
from control_plane.engine.streams import RequestStream, TextDelta


class Generation:
    """One request under way, read by one task; leaving its `async with` ends the request.

    Raises the error of a request that was refused or failed, from `admitted` or `next_delta`.

    `params`: the effective ones, seed included. `continued_token_ids`: of the answer, which the
    reader has already, with `continued_text`; they are not sent again. `lease`: is told of every
    token, those of a prompt once it is admitted, or left before it is refused, and released at the
    end.
    """

    def __init__(
        self,
        request: Request,
        stream: RequestStream,
        *,
        abandon: Callable[[Generation], None],
        lease: Lease | None = None,
    ) -> None:
        self.params = request.params
        self.engine_id = request.id
        self.arrival_time = request.arrival_time
        self.prompt_token_ids = request.input_tokens
        self.num_prompt_tokens = len(request.input_tokens)
        self.continued_token_ids = tuple(request.output_tokens)
        self.continued_text = stream.texts[0].primed_text
        self._stream = stream
        self._abandon = abandon
        self._ready: deque[TextDelta] = deque()
        self._lease = lease
        self._num_booked_tokens = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._abandon(self)
        self._stream.leave()
        if self._lease is not None:
            if not self._stream.is_refused:  # what was submitted may be computed, read or not
                self._book()
            self._lease.release()

    @property
    def has_ended(self) -> bool:
        """Whether the engine is done with the request."""
        return self._stream.has_ended

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of all samples: those of pieces not taken yet, and continued ones, included."""
        return sum(text.num_tokens for text in self._stream.texts)

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """One entry for each token of the prompt, the first of which is None.

        None unless `params.num_prompt_logprobs` asks for them; they come with the first piece.
        """
        logprobs = self._stream.prompt_logprobs
        return None if logprobs is None else (None, *logprobs)

    async def admitted(self) -> None:
        """Wait until the engine has taken the request."""
        await self._fetch()  # tokens may have come together with the admission

    async def next_delta(self) -> TextDelta:
        """Wait for the next piece of the answer; not to be called after one with an `end`."""
        while not self._ready:
            await self._fetch()
        return self._ready.popleft()

    async def _fetch(self) -> None:
        """Wait for news."""
        self._ready.extend(await self._stream.next_deltas())
        self._book()

    def _book(self) -> None:
        """Tell the lease of the tokens that have come since."""
        if self._lease is not None:
            num_tokens = self.num_prompt_tokens + self.num_generated_tokens
            self._lease.book(num_tokens - self._num_booked_tokens)
            self._num_booked_tokens = max(num_tokens, self._num_booked_tokens)
