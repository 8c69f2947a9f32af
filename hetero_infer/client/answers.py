"""What a server answers: the events of a stream, and the whole answer they make."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from control_plane.core.batch import TokenLogprobs
from control_plane.core.generation_params import GenerationParams
from hetero_infer.client.conversation import Message, ToolCall

STOP: Final = "stop"
LENGTH: Final = "length"
CANCELLED: Final = "cancelled"
ERROR: Final = "error"
"""The finish reasons: the model's end token or a stop of the request's own; `max_tokens`; ended by
somebody else; failed."""


@dataclass(frozen=True, slots=True)
class StateReached:
    """A request entered a state (pending, prefill, decode, …) so many seconds after its receipt."""

    state: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Started:
    """The request is admitted. `params` are the effective ones, the seed included.

    `received_tokens`: tokens of the answer that are not sent, because a resumed stream has them.
    """

    request_id: str
    model: str
    prompt_tokens: int
    params: GenerationParams
    received_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of the prompt's tokens from the second on, if they were asked for."""

    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What is new of call `index` of a sample; `id` and `name` come with its first piece."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class PartsDelta:
    """What is new of the parts of an answer to a conversation."""

    content: str = ""
    reasoning_content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerParts:
    """What the text of an answer to a conversation comes apart into."""

    content: str = ""
    reasoning_content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of sample `index` (whole characters only, maybe none), and its new tokens.

    `offset`: its tokens before. `logprobs`: one for each token, if they were asked for. `parts`:
    what is certain now of what the text comes apart into; None: all of it is content.
    """

    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    offset: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    parts: PartsDelta | None = None


@dataclass(frozen=True, slots=True)
class SampleFinished:
    """The end of one sample of several. `finish_reason`: stop, length, cancelled or error.

    `matched_stop`: the text of `stop` or token of `stop_token_ids` that ended it, if one did.
    `parts`: what was held back of it.
    """

    index: int
    finish_reason: str
    completion_tokens: int
    matched_stop: str | int | None = None
    parts: PartsDelta | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of the request. Times in seconds from receipt.

    `finish_reason`, `matched_stop`: of the first sample. `completion_tokens`: of all.
    `cached_tokens`: tokens of the prompt that had been computed before. `states`: every state it
    entered, in order. `parts`: what was held back of the one sample of a stream.
    `reasoning_tokens`: of `completion_tokens`, those any text of which is reasoning; 0 but for
    conversations.
    """

    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    queue_s: float
    time_to_first_token_s: float
    total_s: float
    cached_tokens: int = 0
    matched_stop: str | int | None = None
    states: tuple[StateReached, ...] = ()
    parts: PartsDelta | None = None
    reasoning_tokens: int = 0


Event = Started | PromptLogprobs | Delta | SampleFinished | Finished


@dataclass(frozen=True, slots=True)
class SampleAnswer:
    """One text. `finish_reason` and `matched_stop` as in SampleFinished.

    `logprobs`: one for each token, if they were asked for. `parts`: what the text comes apart into;
    None: all of it is content.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    matched_stop: str | int | None = None
    parts: AnswerParts | None = None

    @property
    def message(self) -> Message:
        """What the assistant said, to be handed back in the next turn."""
        parts = self.parts or AnswerParts(self.text)
        return Message(
            "assistant",
            parts.content,
            tool_calls=parts.tool_calls,
            reasoning_content=parts.reasoning_content,
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. `samples`: as many as were asked for, one at least.

    `prompt_logprobs`: of the prompt's tokens from the second on; None: not asked for.
    """

    started: Started
    samples: tuple[SampleAnswer, ...]
    finished: Finished
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None

    @property
    def text(self) -> str:
        """The text of the first sample."""
        return self.samples[0].text

    @property
    def message(self) -> Message:
        """What the assistant said in the first sample: content, reasoning, the tools it calls."""
        return self.samples[0].message

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of the first sample."""
        return self.samples[0].token_ids

    @property
    def finish_reason(self) -> str:
        """Why the first sample ended: stop, length, cancelled or error."""
        return self.finished.finish_reason

    @property
    def request_id(self) -> str:
        """Under which the server's log has it."""
        return self.started.request_id

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the time from receipt to the end."""
        finished = self.finished
        return finished.completion_tokens / finished.total_s if finished.total_s > 0 else 0.0


@dataclass(slots=True)
class _Sample:
    """One text as far as it came."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str = ""
    matched_stop: str | int | None = None
    has_parts: bool = False
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, tuple[str, str, list[str]]] = field(default_factory=dict)

    def add(self, parts: PartsDelta | None) -> None:
        """Add what is new of its parts."""
        if parts is None:
            return
        self.has_parts = True
        self.content.append(parts.content)
        self.reasoning.append(parts.reasoning_content)
        for call in parts.tool_calls:
            _, _, arguments = self.calls.setdefault(call.index, (call.id, call.name, []))
            arguments.append(call.arguments)

    @property
    def parts(self) -> AnswerParts | None:
        """What came of its parts."""
        if not self.has_parts:
            return None
        calls = (
            ToolCall(call_id, name, "".join(arguments))
            for call_id, name, arguments in self.calls.values()
        )
        return AnswerParts("".join(self.content), "".join(self.reasoning), tuple(calls))


class AnswerSoFar:
    """Collects the events of a stream. `started` and `finished` are None until they came."""

    def __init__(self) -> None:
        self.started: Started | None = None
        self.finished: Finished | None = None
        self._prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self._samples: dict[int, _Sample] = {0: _Sample()}

    def take(self, event: Event) -> None:
        """Add what an event brought."""
        match event:
            case Delta():
                sample = self._sample(event.index)
                sample.text.append(event.text)
                sample.token_ids += event.token_ids
                sample.logprobs += event.logprobs
                sample.add(event.parts)
            case Started():
                self.started = event
            case PromptLogprobs():
                self._prompt_logprobs = event.logprobs
            case SampleFinished():
                sample = self._sample(event.index)
                sample.finish_reason = event.finish_reason
                sample.matched_stop = event.matched_stop
                sample.add(event.parts)
            case Finished():
                self.finished = event
                self._samples[0].add(event.parts)

    @property
    def text(self) -> str:
        """The text of the first sample."""
        return "".join(self._samples[0].text)

    @property
    def parts(self) -> AnswerParts:
        """What the text of the first sample comes apart into."""
        return self._samples[0].parts or AnswerParts(self.text)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of the first sample."""
        return tuple(self._samples[0].token_ids)

    def answer(self) -> Answer | None:
        """Return the whole answer; None before its end."""
        if self.started is None or self.finished is None:
            return None
        end = self.finished
        for index in range(self.started.params.n):
            self._sample(index)
        first = self._samples[0]
        if not first.finish_reason:  # told of samples only if there are several
            first.finish_reason, first.matched_stop = end.finish_reason, end.matched_stop
        return Answer(
            self.started,
            tuple(
                SampleAnswer(
                    index,
                    "".join(sample.text),
                    tuple(sample.token_ids),
                    sample.finish_reason or end.finish_reason,
                    tuple(sample.logprobs),
                    sample.matched_stop,
                    sample.parts,
                )
                for index, sample in sorted(self._samples.items())
            ),
            end,
            self._prompt_logprobs,
        )

    def _sample(self, index: int) -> _Sample:
        return self._samples.setdefault(index, _Sample())
