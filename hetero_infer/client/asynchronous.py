"""The client for programs on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from control_plane.core.embedding_params import TextEmbedding
from control_plane.core.generation_params import GenerationParams
from control_plane.telemetry import EngineMetrics
from hetero_infer.channel import Route
from hetero_infer.client import calls
from hetero_infer.client.answers import Answer
from hetero_infer.client.async_stream import AsyncStream
from hetero_infer.client.attempts import DEFAULT_RETRIES, Attempts, Deadline, OnWait
from hetero_infer.client.conversation import AnyMessage, AnyTool, messages_of, tools_of
from hetero_infer.client.progress import StreamProgress
from hetero_infer.client.requests import ChatRequest, TextRequest, prompt_of
from hetero_infer.client.server_values import ChatPrompt, ModelInfo, PoolStats, ServedRequest
from hetero_infer.client.services import (
    CLIENT_CLOSED,
    DEFAULT_TARGET,
    RPC_TIMEOUT_S,
    Services,
    parse_target,
)
from hetero_infer.client.streaming import StreamingMethods
from hetero_infer.client.tool_choice import AnyToolChoice
from hetero_infer.client.unreached import error_of
from hetero_infer.wire_errors import ServerLostError
from planes.address import Address
from planes.tls_files import ClientFiles

T = TypeVar("T")


class AsyncClient(StreamingMethods["AsyncStream"]):
    """The same as `Client`, for an event loop: methods are coroutines, streams async iterators.

    Made anywhere, it belongs to the loop that runs at its first call.
    """

    def __init__(
        self,
        target: str | Address = DEFAULT_TARGET,
        *,
        token: str | None = None,
        tls: ClientFiles | None = None,
        retries: int = DEFAULT_RETRIES,
        on_wait: OnWait | None = None,
    ) -> None:
        super().__init__(retries, on_wait)
        self._route = Route(parse_target(target), token=token, tls=tls)
        self._channel: grpc.aio.Channel | None = None
        self._services: Services | None = None
        self._is_closed = False

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: GenerationParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        model: str = "",
        timeout_s: float | None = None,
    ) -> Answer:
        """Complete a prompt, text or token ids, and return the whole answer.

        `params`: None takes the server's defaults. `priority`: lower ones are served first.
        `cache_salt`: only requests of the same salt share cached prompts. `model`: what is loaded,
        or one of its adapters; empty: the former. `timeout_s`: None: as long as it takes; passed,
        the request is aborted.
        """
        request = TextRequest(prompt_of(prompt), params, priority, cache_salt, model)
        return await self._run(calls.generate(request), timeout_s)

    async def chat(  # noqa: PLR0913 - each has a name, and a default
        self,
        messages: Sequence[AnyMessage],
        params: GenerationParams | None = None,
        *,
        tools: Sequence[AnyTool] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        add_generation_prompt: bool | None = None,
        tool_choice: AnyToolChoice | None = None,
        parallel_tool_calls: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        model: str = "",
        timeout_s: float | None = None,
    ) -> Answer:
        """Answer a conversation: messages as `Message` or as OpenAI's JSON objects.

        `chat_template_kwargs`: variables of the model's chat template, such as `enable_thinking`.
        `continue_final_message`, `add_generation_prompt`, `tool_choice`, `parallel_tool_calls`: as
        of `ChatRequest`.
        """
        request = ChatRequest(
            messages_of(messages),
            tools_of(tools),
            params,
            priority,
            cache_salt,
            model,
            chat_template_kwargs,
            continue_final_message,
            add_generation_prompt,
            tool_choice,
            parallel_tool_calls,
        )
        return await self._run(calls.generate(request), timeout_s)

    async def embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        dimensions: int | None = None,
        normalize: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        model: str = "",
        timeout_s: float | None = None,
    ) -> list[TextEmbedding]:
        """Return an embedding of each input, text or token ids, in their order.

        `dimensions`: the first so many numbers; None: all. `normalize`: to a length of 1. The
        others as of `generate`.
        """
        call = calls.embed(
            inputs,
            dimensions=dimensions,
            normalize=normalize,
            priority=priority,
            cache_salt=cache_salt,
            model=model,
        )
        return await self._run(call, timeout_s)

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, timeout_s: float = RPC_TIMEOUT_S
    ) -> tuple[int, ...]:
        """Return the tokens of a text. `add_special_tokens`: as in prompts."""
        return await self._run(
            calls.tokenize(text, add_special_tokens=add_special_tokens), timeout_s
        )

    async def detokenize(
        self,
        token_ids: Iterable[int],
        *,
        skip_special_tokens: bool = True,
        timeout_s: float = RPC_TIMEOUT_S,
    ) -> str:
        """Return the text of tokens. `skip_special_tokens`: special ones have none."""
        call = calls.detokenize(token_ids, skip_special_tokens=skip_special_tokens)
        return await self._run(call, timeout_s)

    async def apply_chat_template(
        self,
        messages: Sequence[AnyMessage],
        *,
        tools: Sequence[AnyTool] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        add_generation_prompt: bool | None = None,
        timeout_s: float = RPC_TIMEOUT_S,
    ) -> ChatPrompt:
        """Return the prompt that `chat` makes of a conversation."""
        call = calls.apply_chat_template(
            messages,
            tools,
            chat_template_kwargs,
            continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt,
        )
        return await self._run(call, timeout_s)

    async def model_info(self, model: str = "", *, timeout_s: float = RPC_TIMEOUT_S) -> ModelInfo:
        """Return what is loaded; `model`: an adapter of it."""
        return await self._run(calls.model_info(model), timeout_s)

    async def list_models(self, *, timeout_s: float = RPC_TIMEOUT_S) -> tuple[ModelInfo, ...]:
        """Return everything that is loaded: a model, then its adapters."""
        return await self._run(calls.list_models(), timeout_s)

    async def get_metrics(self, *, timeout_s: float = RPC_TIMEOUT_S) -> EngineMetrics:
        """Return the engine's counts. For operators, like all methods below."""
        return await self._run(calls.metrics(), timeout_s)

    async def get_memory_stats(self, *, timeout_s: float = RPC_TIMEOUT_S) -> PoolStats:
        """Return the use of the KV pool."""
        return await self._run(calls.memory_stats(), timeout_s)

    async def list_requests(
        self, *, include_ended: bool = False, timeout_s: float = RPC_TIMEOUT_S
    ) -> tuple[ServedRequest, ...]:
        """Return what the requests are doing, oldest first; with those that ended last if asked."""
        return await self._run(calls.list_requests(include_ended=include_ended), timeout_s)

    async def abort(self, request_id: str, *, timeout_s: float = RPC_TIMEOUT_S) -> None:
        """End a request; its client sees it end as cancelled."""
        await self._run(calls.abort(request_id), timeout_s)

    async def drain(self, *, timeout_s: float = RPC_TIMEOUT_S) -> int:
        """Let the server take no new requests; how many are under way."""
        return await self._run(calls.drain(), timeout_s)

    async def flush_prefix_cache(self, *, timeout_s: float = RPC_TIMEOUT_S) -> int:
        """Let no request find what earlier ones left; how many idle blocks held something."""
        return await self._run(calls.flush_prefix_cache(), timeout_s)

    async def close(self) -> None:
        """Close the channel; calls under way are cancelled."""
        self._is_closed = True
        if self._channel is not None:
            await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def _stream_of(self, progress: StreamProgress) -> AsyncStream:
        return AsyncStream(self, progress)

    async def _run(self, call: calls.Call[T], timeout_s: float | None) -> T:
        retries = self._retries if call.is_repeatable else 0
        attempts = Attempts(retries, Deadline(timeout_s), self._on_wait)
        while True:
            method = self._method(call.service, call.method)
            timeout_left_s = attempts.deadline.left_s()
            try:
                answer = await method(
                    call.message, timeout=timeout_left_s, metadata=self._route.metadata
                )
            except grpc.RpcError as error:
                failure = error_of(error, self._route)
            else:
                return call.read(answer)
            # Out here gRPC's own error, which says less, is no part of the traceback.
            await asyncio.sleep(attempts.pause_after(failure))

    def _open_stream(self, progress: StreamProgress) -> Any:  # noqa: ANN401 - gRPC's call
        """Make the next call of a stream. Raises EngineError."""
        call = progress.next_call()
        method = self._method("Inference", call.method)
        return method(call.message, timeout=call.timeout_s, metadata=self._route.metadata)

    def _method(self, service: str, name: str) -> Any:  # noqa: ANN401 - a callable of gRPC's
        self._check_open()
        if self._services is None:
            self._channel = self._route.open_async()
            self._services = Services(self._channel)
        return self._services.method(service, name)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ServerLostError(CLIENT_CLOSED)
