"""Embeddings for tasks of the event loop: the texts of a call go through the engine in a window."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from control_plane.access.principal import Lease
from control_plane.core.embedding_params import EmbeddingParams, Input, TextEmbedding
from control_plane.core.request import Request
from control_plane.core.request_options import RequestOptions
from control_plane.engine.embedding import EmbeddingDesk, embedding_of, named_input
from control_plane.engine.generation import Generation
from control_plane.engine.text_service import TextService
from control_plane.groups import first_error

Begin = Callable[[Request, Lease | None], Generation]


class Embedder:
    """Embeds the texts of one call. `begin`: hands a request to the engine.

    `max_at_once`: texts of a call that the engine has; no more than may wait there, so that none is
    refused because of the others.
    """

    def __init__(
        self, desk: EmbeddingDesk, text: TextService, begin: Begin, *, max_at_once: int
    ) -> None:
        self._desk = desk
        self._text = text
        self._begin = begin
        self._max_at_once = max_at_once

    async def embed(
        self,
        inputs: Sequence[Input],
        params: EmbeddingParams,
        options: RequestOptions,
        lease: Lease | None,
        *,
        arrival_time: float,
    ) -> list[TextEmbedding]:
        """Return an embedding for each input; none is computed before all are checked.

        One that fails ends the others. Raises EngineError.
        """
        desk = self._desk
        desk.check(inputs, params)
        options.validate()
        texts: list[Sequence[int]] = []
        for index, given in enumerate(inputs):
            with named_input(index, len(inputs)):
                if isinstance(given, str):
                    texts.append(desk.with_end(await self._text.tokenize(given)))
                else:
                    texts.append(given)
            await asyncio.sleep(0)  # each may take a millisecond; others come between
        requests = desk.make_requests(texts, options, arrival_time=arrival_time)
        waiting = iter(enumerate(requests))
        found: dict[int, TextEmbedding] = {}

        async def work() -> None:
            for index, request in waiting:
                with named_input(index, len(requests)):
                    found[index] = await self._embed_one(request, params, lease)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(len(requests), self._max_at_once)):
                    group.create_task(work())
        except BaseExceptionGroup as errors:  # they are the same kind of thing as one alone
            raise first_error(errors) from None
        return [found[index] for index in range(len(requests))]

    async def _embed_one(
        self, request: Request, params: EmbeddingParams, lease: Lease | None
    ) -> TextEmbedding:
        share = None if lease is None else lease.share()
        async with self._begin(request, share) as generation:
            while True:
                delta = await generation.next_delta()
                if delta.end is not None:
                    return embedding_of(request, delta.end, params)
