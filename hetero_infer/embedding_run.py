"""The texts of one `InferenceEngine.embed`, on their way through the engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from control_plane.core.embedding_params import EmbeddingParams, TextEmbedding
from control_plane.core.request import Request
from control_plane.engine.embedding import embedding_of, named_input
from control_plane.engine.events import RequestEnd, RequestUpdate
from control_plane.engine.inbox import Inbox


class EmbeddingRun:
    """Hands requests to an engine, `max_at_once` at a time, and collects their ends."""

    def __init__(self, requests: Sequence[Request], inbox: Inbox, *, max_at_once: int) -> None:
        self._requests = requests
        self._max_at_once = max_at_once
        self._inbox = inbox
        self._waiting = deque(requests)
        self._under_way: set[int] = set()
        self._ends: dict[int, RequestEnd] = {}
        self._has_failed = False

    @property
    def is_over(self) -> bool:
        """Whether all have ended, or one as it should not have."""
        return self._has_failed or len(self._ends) == len(self._requests)

    def submit_some(self) -> None:
        """Let the engine have as many as it may."""
        while self._waiting and len(self._under_way) < self._max_at_once:
            request = self._waiting.popleft()
            self._under_way.add(request.id)
            self._inbox.submit(request)

    def take(self, update: RequestUpdate) -> None:
        """Note the news of a request, if it is one of these."""
        if update.end is not None and update.request_id in self._under_way:
            self._under_way.discard(update.request_id)
            self._ends[update.request_id] = update.end
            self._has_failed |= update.end.embedding is None

    def leave(self) -> None:
        """End those that go on: nobody wants them any more."""
        for request_id in self._under_way:
            self._inbox.cancel(request_id)

    def embeddings(self, params: EmbeddingParams) -> list[TextEmbedding]:
        """Return what came of all. Raises the error of one that failed."""
        found = []
        for index, request in enumerate(self._requests):
            end = self._ends.get(request.id)
            if end is not None:  # else another one has failed
                with named_input(index, len(self._requests)):
                    found.append(embedding_of(request, end, params))
        return found
