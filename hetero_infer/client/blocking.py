"""The client for programs with threads, or with none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from control_plane.core.embedding_params import TextEmbedding
from control_plane.core.generation_params import GenerationParams
from control_plane.telemetry import EngineMetrics
from hetero_infer.channel import Route
from hetero_infer.client import calls
from hetero_infer.client.answers import Answer, Delta, Event
from hetero_infer.client.aside import AsideCall, Flag
from hetero_infer.client.attempts import DEFAULT_RETRIES, OnWait
from hetero_infer.client.blocking_calls import BlockingCalls
from hetero_infer.client.conversation import AnyMessage, AnyTool, messages_of, tools_of
from hetero_infer.client.progress import BROKEN_OFF, StreamProgress
from hetero_infer.client.requests import ChatRequest, TextRequest, prompt_of
from hetero_infer.client.server_values import ChatPrompt, ModelInfo, PoolStats, ServedRequest
from hetero_infer.client.services import DEFAULT_TARGET, RPC_TIMEOUT_S, parse_target
from hetero_infer.client.streaming import StreamFacts, StreamingMethods
from hetero_infer.client.tool_choice import AnyToolChoice
from hetero_infer.wire_errors import ServerLostError
from planes.address import Address
from planes.errors import EngineError
from planes.tls_files import ClientFiles

T = TypeVar("T")


class Client(StreamingMethods["Stream"]):
    """One channel to a server; any thread may use it.

    Every error that a method raises is an `EngineError`.

    `target`: `HOST:PORT` or `unix:PATH`. `token`: shown with every call. `tls`: None: plaintext.
    `retries`: how many times a call is retried if no server was reached or the server said to come
    back later; 0: never. A call that has begun to answer is never retried. `on_wait`: called before
    each wait, with the error and the seconds to be waited, on the thread that waits.

    Raises ConfigError for an address or TLS files that cannot be used, ValidationError for what is
    no token, and for a token that would travel in plaintext to another machine.
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
        self._calls = BlockingCalls(Route(parse_target(target), token=token, tls=tls))

    def generate(
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
        return self._run(calls.generate(request), timeout_s)

    def chat(  # noqa: PLR0913 - each has a name, and a default
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
        return self._run(calls.generate(request), timeout_s)

    def embed(
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
        return self._run(call, timeout_s)

    def tokenize(
        self, text: str, *, add_special_tokens: bool = True, timeout_s: float = RPC_TIMEOUT_S
    ) -> tuple[int, ...]:
        """Return the tokens of a text. `add_special_tokens`: as in prompts."""
        return self._run(calls.tokenize(text, add_special_tokens=add_special_tokens), timeout_s)

    def detokenize(
        self,
        token_ids: Iterable[int],
        *,
        skip_special_tokens: bool = True,
        timeout_s: float = RPC_TIMEOUT_S,
    ) -> str:
        """Return the text of tokens. `skip_special_tokens`: special ones have none."""
        call = calls.detokenize(token_ids, skip_special_tokens=skip_special_tokens)
        return self._run(call, timeout_s)

    def apply_chat_template(
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
        return self._run(call, timeout_s)

    def model_info(self, model: str = "", *, timeout_s: float = RPC_TIMEOUT_S) -> ModelInfo:
        """Return what is loaded; `model`: an adapter of it."""
        return self._run(calls.model_info(model), timeout_s)

    def list_models(self, *, timeout_s: float = RPC_TIMEOUT_S) -> tuple[ModelInfo, ...]:
        """Return everything that is loaded: a model, then its adapters."""
        return self._run(calls.list_models(), timeout_s)

    def get_metrics(self, *, timeout_s: float = RPC_TIMEOUT_S) -> EngineMetrics:
        """Return the engine's counts. For operators, like all methods below."""
        return self._run(calls.metrics(), timeout_s)

    def get_memory_stats(self, *, timeout_s: float = RPC_TIMEOUT_S) -> PoolStats:
        """Return the use of the KV pool."""
        return self._run(calls.memory_stats(), timeout_s)

    def list_requests(
        self, *, include_ended: bool = False, timeout_s: float = RPC_TIMEOUT_S
    ) -> tuple[ServedRequest, ...]:
        """Return what the requests are doing, oldest first; with those that ended last if asked."""
        return self._run(calls.list_requests(include_ended=include_ended), timeout_s)

    def abort(self, request_id: str, *, timeout_s: float = RPC_TIMEOUT_S) -> None:
        """End a request; its client sees it end as cancelled."""
        self._run(calls.abort(request_id), timeout_s)

    def drain(self, *, timeout_s: float = RPC_TIMEOUT_S) -> int:
        """Let the server take no new requests; how many are under way."""
        return self._run(calls.drain(), timeout_s)

    def flush_prefix_cache(self, *, timeout_s: float = RPC_TIMEOUT_S) -> int:
        """Let no request find what earlier ones left; how many idle blocks held something."""
        return self._run(calls.flush_prefix_cache(), timeout_s)

    def close(self) -> None:
        """Close the channel; calls under way are cancelled."""
        self._calls.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _stream_of(self, progress: StreamProgress) -> Stream:
        return Stream(self._calls, progress)

    def _run(self, call: calls.Call[T], timeout_s: float | None) -> T:
        return self._calls.run(call, timeout_s, self._retries, self._on_wait)


class Stream(StreamFacts, Iterator[Event]):
    """The events of one request: a Started, then any number of Delta, then a Finished.

    PromptLogprobs come before the first Delta, if asked for; with several samples, a SampleFinished
    after the last Delta of each. `request` has the effective parameters once Started came.

    Nothing is sent before the first event is asked for. `close`, the end of a `with` block, or
    giving the iterator up aborts the request; `close` may be called by any thread, and by a signal
    handler.
    """

    def __init__(self, calls_: BlockingCalls, progress: StreamProgress) -> None:
        super().__init__(progress)
        self._calls = calls_
        self._closed = Flag()
        self._call: AsideCall | None = None

    def texts(self) -> Iterator[str]:
        """Yield the pieces of the first sample's text, none of them empty; marks too (`parts`)."""
        for event in self:
            if isinstance(event, Delta) and event.index == 0 and event.text:
                yield event.text

    def answer(self) -> Answer:
        """Read what is left and return the whole answer.

        Of a resumed answer, text and tokens that came over this stream.
        """
        for _ in self:
            pass
        return self._progress.whole_answer()

    def __next__(self) -> Event:
        while not self._progress.is_finished and not self._closed.is_set():
            try:
                response = self._read()
            except EngineError as error:
                if self._closed.is_set():
                    break
                self._end()
                self._calls.check_open()
                pause_s = self._progress.pause_after(error)
            else:
                event = self._progress.take(response)
                if event is not None:
                    return event
                continue
            self._closed.wait(pause_s)
        self._end()
        raise StopIteration

    def close(self) -> None:
        """Abort the request if it is under way; nothing more comes."""
        self._closed.set()
        call = self._call
        if call is not None:
            call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_call"):  # else it never came to be
            self.close()

    def _read(self) -> Any:  # noqa: ANN401 - the message
        """Wait for the next message. Raises EngineError where there is none."""
        if self._call is None:
            self._call = self._calls.next_call(self._progress)
            if self._closed.is_set():  # by another thread, which saw no call yet
                self._call.cancel()
        try:
            return self._call.read(self._message_of)
        except EngineError:
            raise
        except BaseException:  # of a signal handler, most likely: where it broke in is not known
            self.close()
            raise

    def _message_of(self, call: Any) -> Any:  # noqa: ANN401 - gRPC's iterator
        try:
            response = next(call, None)
        except grpc.RpcError as error:
            raise self._calls.error_of(error) from None
        if response is None:
            raise ServerLostError(BROKEN_OFF)
        return response

    def _end(self) -> None:
        """Let go of the call. After its last message only its status is awaited."""
        call, self._call = self._call, None
        if call is None:
            return
        if self._progress.is_finished and not self._closed.is_set():
            call.read(_wait_for_status, is_last=True)
        else:
            call.cancel()


def _wait_for_status(call: Any) -> None:  # noqa: ANN401 - gRPC's iterator
    with contextlib.suppress(grpc.RpcError):  # everything has been said
        next(call, None)
    call.cancel()
