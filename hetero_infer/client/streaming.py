"""What the streams of both clients have in common: how they are begun, and what they tell."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from control_plane.core.generation_params import GenerationParams
from hetero_infer.client.answers import AnswerParts
from hetero_infer.client.attempts import RESUME_PATIENCE_S, OnLost, OnWait
from hetero_infer.client.conversation import AnyMessage, AnyTool, messages_of, tools_of
from hetero_infer.client.progress import Going, StreamProgress
from hetero_infer.client.requests import ChatRequest, Request, TextRequest, prompt_of
from hetero_infer.client.tool_choice import AnyToolChoice

StreamT = TypeVar("StreamT")


class StreamingMethods(ABC, Generic[StreamT]):
    """The methods of a client that begin a stream. Nothing is sent before it is read.

    `retries`: how often any of its calls is made again at most. `on_wait`: told before each.
    """

    def __init__(self, retries: int, on_wait: OnWait | None) -> None:
        self._retries = retries
        self._on_wait = on_wait

    def stream(  # noqa: PLR0913 - each has a name, and a default
        self,
        prompt: str | Sequence[int],
        params: GenerationParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        model: str = "",
        resume: bool = False,
        patience_s: float = RESUME_PATIENCE_S,
        timeout_s: float | None = None,
        on_lost: OnLost | None = None,
    ) -> StreamT:
        """Go on with a prompt piece by piece; arguments as of `generate`.

        `resume`: when the server is lost, go on behind the tokens that came as soon as it is back,
        within `patience_s` of the loss; the text is the one it would have been. Only with `n` 1 and
        no beams. `on_lost`: called with the error and `patience_s` at each loss that is waited for,
        on the thread that reads the stream.
        """
        return self.stream_request(
            TextRequest(prompt_of(prompt), params, priority, cache_salt, model),
            resume=resume,
            patience_s=patience_s,
            timeout_s=timeout_s,
            on_lost=on_lost,
        )

    def chat_stream(  # noqa: PLR0913 - each has a name, and a default
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
        resume: bool = False,
        patience_s: float = RESUME_PATIENCE_S,
        timeout_s: float | None = None,
        on_lost: OnLost | None = None,
    ) -> StreamT:
        """Answer a conversation piece by piece; arguments as of `chat` and `stream`."""
        return self.stream_request(
            ChatRequest(
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
            ),
            resume=resume,
            patience_s=patience_s,
            timeout_s=timeout_s,
            on_lost=on_lost,
        )

    def stream_request(
        self,
        request: Request,
        *,
        resume: bool = False,
        patience_s: float = RESUME_PATIENCE_S,
        timeout_s: float | None = None,
        on_lost: OnLost | None = None,
    ) -> StreamT:
        """Stream the answer of a request that is made already; arguments as of `stream`."""
        going = Going(self._retries, resume, patience_s, timeout_s, on_lost, self._on_wait)
        return self._stream_of(StreamProgress(request, going))

    def resume(
        self,
        request: Request,
        received_token_ids: Iterable[int],
        *,
        patience_s: float = RESUME_PATIENCE_S,
        timeout_s: float | None = None,
    ) -> StreamT:
        """Go on with an answer of which some came, maybe in another process.

        `request`: the broken stream's `request`, whose parameters have the seed.
        `received_token_ids`: its `received_token_ids`; they do not come again.
        """
        going = Going(self._retries, True, patience_s, timeout_s)
        return self._stream_of(StreamProgress(request, going, received_token_ids))

    @abstractmethod
    def _stream_of(self, progress: StreamProgress) -> StreamT:
        """Return the stream, in the client's own way of waiting."""


class StreamFacts:
    """What a stream tells beside its events."""

    def __init__(self, progress: StreamProgress) -> None:
        self._progress = progress

    @property
    def request(self) -> Request:
        """What was asked for; with the effective parameters, seed and model, once it started."""
        return self._progress.request

    @property
    def received_token_ids(self) -> tuple[int, ...]:
        """The tokens of the first sample that came, for the client's `resume`."""
        return self._progress.received_token_ids

    @property
    def is_finished(self) -> bool:
        """Whether the last event has come."""
        return self._progress.is_finished

    @property
    def text(self) -> str:
        """The text of the first sample so far."""
        return self._progress.so_far.text

    @property
    def parts(self) -> AnswerParts:
        """What the first sample says, thinks and calls so far, without the marks in its text."""
        return self._progress.so_far.parts
