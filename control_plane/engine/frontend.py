"""The engine as API tasks see it: submit a prompt, read text, stop reading."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Self

from control_plane.access.principal import Lease, current_principal
from control_plane.core.embedding_params import EmbeddingParams, Input, TextEmbedding
from control_plane.core.generation_params import GenerationParams
from control_plane.core.kv_cache import MemoryStats
from control_plane.core.request import Request
from control_plane.core.request_options import PLAIN, RequestOptions
from control_plane.engine.asking import ask
from control_plane.engine.continued import end_of_continued
from control_plane.engine.embedder import Embedder
from control_plane.engine.embedding import MAX_AT_ONCE, EmbeddingDesk
from control_plane.engine.engine_parts import EngineParts
from control_plane.engine.events import RequestInfo
from control_plane.engine.generation import Generation
from control_plane.engine.plane import PlaneDescription
from control_plane.engine.sample_text import SampleText
from control_plane.engine.streams import RequestStream, TextDelta
from control_plane.engine.text_service import MAX_INLINE_TOKENS, ChatPrompt, TextService
from control_plane.errors import RequestNotFoundError
from control_plane.telemetry import EngineMetrics
from control_plane.text.answers.text_form import PLAIN as PLAIN_TEXT
from control_plane.text.answers.text_form import TextForm
from control_plane.text.reasoning_effort import ReasoningEffort, ThinkingWish
from control_plane.text.tokenizer import Tokenizer

__all__ = ["ChatPrompt", "EngineFrontend", "EngineParts", "Generation", "TextDelta"]


class EngineFrontend:
    """Submits requests from tasks of one event loop, to the model or to one of its adapters."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._adapter = 0
        self._text = TextService(
            parts.tokenizer,
            parts.admission,
            parts.chat_template,
            parts.answer_formats,
            vocab_size=parts.plane.vocab_size,
            why_no_chat=parts.why_no_chat,
        )
        desk = EmbeddingDesk(
            parts.admission, parts.plane, text_end=parts.text_end, pooling=parts.pooling
        )
        self._embedder = Embedder(
            desk,
            self._text,
            lambda request, lease: self._begin(
                request, self._open_stream(request, PLAIN_TEXT), lease
            ),
            max_at_once=min(MAX_AT_ONCE, parts.max_queued_requests),
        )

    def of_model(self, name: str) -> Self:
        """Return the front end of what is called so: this one's model, or an adapter of it.

        Raises ModelNotFoundError.
        """
        found = copy.copy(self)
        found._adapter = self.plane.adapter_of(name)
        return found

    @property
    def model(self) -> str:
        """The name of what is asked here: the model, or one of its adapters."""
        return self.plane.name_of(self._adapter)

    @property
    def plane(self) -> PlaneDescription:
        """The compute plane and its model."""
        return self._parts.plane

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._parts.tokenizer

    @property
    def max_model_len(self) -> int:
        """Prompt and completion tokens of one request."""
        return self._parts.admission.max_model_len

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be made prompts of."""
        return self._parts.chat_template is not None

    @property
    def metrics(self) -> EngineMetrics:
        """Counts as of the engine's last turn."""
        return self._parts.metrics()

    @property
    def memory_stats(self) -> MemoryStats:
        """Use of the block pool as of the engine's last turn."""
        return self._parts.memory_stats()

    # Requests

    def check_places(self, num_requests: int) -> None:
        """Raise the error of the limit that so many requests more would break, before any work.

        They are those of one call, handed over together: ValidationError for more than may ever
        wait.
        """
        self._parts.check_together(num_requests)
        if self._parts.wants_principal:
            current_principal().check(num_requests)

    async def submit(
        self,
        prompt: str | Sequence[int],
        params: GenerationParams,
        options: RequestOptions = PLAIN,
        *,
        continued: Sequence[int] = (),
        form: TextForm = PLAIN_TEXT,
    ) -> Generation:
        """Hand a prompt, text or token ids, to the engine.

        `continued`: the first tokens of the answer, which the caller has from an earlier stream of
        the same prompt and parameters: the answer goes on behind them, and with the same seed it
        is the same. They count to `max_tokens`; only with `n` 1 and no beams. `form`: of the text.

        The result must be left through its `async with`. Raises EngineError for what is wrong with
        the request or with the server's state, and for what its principal may not use.
        """
        if not self._parts.wants_principal:
            return await self._submit(prompt, params, options, continued, form, None)
        principal = current_principal()
        lease = principal.lease()
        try:
            options = principal.scope(options)
            return await self._submit(prompt, params, options, continued, form, lease)
        except BaseException:  # whatever it is, a cancelled task's too: nobody else has the lease
            lease.release()
            raise

    async def _submit(
        self,
        prompt: str | Sequence[int],
        params: GenerationParams,
        options: RequestOptions,
        continued: Sequence[int],
        form: TextForm,
        lease: Lease | None,
    ) -> Generation:
        """Do it; the generation takes the lease over."""
        parts = self._parts
        arrival_time = time.monotonic()
        parts.gate.check()
        params.validate()
        options.validate()
        options = replace(options, adapter=self._adapter)
        token_ids = await self._text.tokenize(prompt) if isinstance(prompt, str) else prompt
        parts.gate.check()
        request = parts.admission.make_request(
            token_ids, params, arrival_time=arrival_time, options=options, continued=continued
        )
        if params.structured_outputs is not None:
            request.constraints = await asyncio.wrap_future(parts.grammars.constrain(request))
            parts.gate.check()
        if len(continued) <= MAX_INLINE_TOKENS:
            stream = self._open_stream(request, form)
        else:
            stream = await asyncio.to_thread(self._open_stream, request, form)
            parts.gate.check()
        return self._begin(request, stream, lease)

    def _begin(self, request: Request, stream: RequestStream, lease: Lease | None) -> Generation:
        """Hand a request to the engine, unless it is at its end already."""
        generation = Generation(request, stream, abandon=self._abandon, lease=lease)
        end = end_of_continued(request, stream, time.monotonic())
        if end is not None:
            stream.push(end)
        else:
            self._parts.hub.open(request.id, stream, request.name)
            self._parts.inbox.submit(request)
        return generation

    async def embed(
        self,
        inputs: Sequence[Input],
        params: EmbeddingParams,
        options: RequestOptions = PLAIN,
    ) -> list[TextEmbedding]:
        """Return an embedding for each input, text or token ids.

        Texts get the end that the model's tokenizer puts behind them. To its principal a call is
        one request, however many inputs it has. Raises EngineError as `submit`.
        """
        arrival_time = time.monotonic()
        with self._place() as lease:
            if lease is not None:
                options = current_principal().scope(options)
            self._parts.gate.check()
            options = replace(options, adapter=self._adapter)
            return await self._embedder.embed(
                inputs, params, options, lease, arrival_time=arrival_time
            )

    def _open_stream(self, request: Request, form: TextForm) -> RequestStream:
        """Make the stream of a request, which knows the text of its first tokens."""
        parts, request_id, params = self._parts, request.id, request.params
        texts = [SampleText(parts.tokenizer, params, form) for _ in range(params.n)]
        texts[0].prime(request.output_tokens)

        def stop_sample(index: int, num_tokens: int) -> None:
            parts.inbox.end_sample(request_id, index, num_tokens)

        return RequestStream(
            texts,
            stop_sample=stop_sample,
            give_up=lambda: parts.inbox.cancel(request_id),
            max_unread_tokens=parts.max_unread_tokens,
            watch=parts.watch(request),
        )

    def abort(self, request: str | int) -> None:
        """End requests by their name, or one by its id; their readers see them cancelled.

        Raises RequestNotFoundError if there is none.
        """
        found = self._parts.hub.under_way(request)
        if not found:
            raise RequestNotFoundError(f"no request {request!r} is under way", field="request_id")
        for request_id in found:
            self._parts.inbox.cancel(request_id)

    async def list_requests(self, *, include_ended: bool = False) -> list[RequestInfo]:
        """Return what the requests are doing, also those that ended not long ago if wanted.

        Raises EngineStoppedError if the engine does not answer.
        """
        inbox = self._parts.inbox
        return await ask(lambda reply: inbox.inspect(reply, include_ended=include_ended))

    # Text: while it is worked on it holds a place of its principal, whose limits come before the
    # work. Its tokens are not booked: nothing is computed of them.

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, field: str = "prompt"
    ) -> list[int]:
        """Return the token ids of a text, as a prompt of it would have them.

        `add_special_tokens`: put the BOS token in front where the model wants one. `field`: what
        errors call the text. Raises ValidationError for a text longer than any prompt may be,
        TokenizationError, and for what its principal may not use.
        """
        with self._place():
            return await self._text.tokenize(
                text, add_special_tokens=add_special_tokens, may_be_empty=True, field=field
            )

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str:
        """Return the text of token ids, of special ones their names or nothing.

        Raises as `tokenize`.
        """
        with self._place():
            return await self._text.detokenize(token_ids, skip_special_tokens=skip_special_tokens)

    async def text_of_prompt(self, token_ids: Sequence[int]) -> str:
        """Return the text of a prompt that was submitted: its request has a place already."""
        return await self._text.detokenize(token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes one token stands for, those of U+FFFD where it has no text alone."""
        return self._text.token_bytes(token_id)

    async def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        reasoning_effort: ReasoningEffort | None = None,
        thinking: ThinkingWish | None = None,
    ) -> ChatPrompt:
        """Return a conversation as the prompt the model was trained on, text and token ids.

        `chat_template_kwargs`: variables of the template, over the operator's defaults.
        `continue_final_message`: end where the last message ends, which the answer goes on with.
        `add_generation_prompt`: end where the assistant's answer begins; None: unless the last
        message is gone on with. `reasoning_effort`: told to the template in the variable it has
        for it; `thinking`: the same as a wish, for which it needs none.

        Raises ValidationError if the model has no template or the messages are longer than any
        prompt may be, TokenizationError if the template refuses them, and for what its principal
        may not use.
        """
        with self._place():
            return await self._text.apply_chat_template(
                messages,
                tools,
                chat_template_kwargs,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                reasoning_effort=reasoning_effort,
                thinking=thinking,
            )

    @contextlib.contextmanager
    def _place(self) -> Iterator[Lease | None]:
        """Count work that generates nothing among the principal's requests while it lasts."""
        if not self._parts.wants_principal:
            yield None
            return
        with current_principal().lease() as lease:
            yield lease

    # Administration

    async def flush_prefix_cache(self) -> int:
        """Let no request find what earlier ones have left; how many idle blocks held something.

        Raises EngineStoppedError if the engine does not answer.
        """
        return await ask(self._parts.inbox.flush_prefix_cache)

    def drain(self) -> None:
        """Take no new requests from now on; those under way go on to their ends."""
        self._parts.gate.drain()
        if self._parts.on_drain is not None:
            self._parts.on_drain()

    def _abandon(self, generation: Generation) -> None:
        """Forget the stream, and end the request if it goes on."""
        self._parts.hub.close(generation.engine_id)
        if not generation.has_ended:
            self._parts.inbox.cancel(generation.engine_id)
