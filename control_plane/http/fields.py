"""What every generating endpoint lets a caller say, and what of it reaches the engine.

Ranges stand here as well as in `GenerationParams`, whose word counts, so that `/openapi.json` says
them and a mistake is named as the caller spelled it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal, Self, TypeAlias

from pydantic import (
    BeforeValidator,
    Field,
    JsonValue,
    Tag,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from control_plane.core.generation_params import (
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIASES,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_SAMPLES,
    MAX_SEED,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    MAX_TEMPERATURE,
    MAX_TOP_K,
    GenerationParams,
)
from control_plane.core.request_options import MAX_PRIORITY, MAX_SALT_BYTES, RequestOptions
from control_plane.core.structured_outputs import (
    MAX_CHOICES,
    MAX_GRAMMAR_CHARACTERS,
    MAX_REGEX_CHARACTERS,
    StructuredOutputs,
)
from control_plane.http.wire import OnlyFalse, OnlyTrue, Wire, one_of, text_or_list, wrong
from control_plane.text.bounds import MAX_JSON_BYTES
from control_plane.text.template_kwargs import MAX_DEPTH, MAX_VARIABLES

MAX_TOKEN_ID: Final = 2**32 - 1
MAX_TOKENS: Final = 2**31 - 1

MAX_METADATA: Final = 16
MAX_METADATA_KEY: Final = 64
MAX_METADATA_VALUE: Final = 512
"""OpenAI's."""

DEFAULT_TEMPERATURE: Final = 1.0
DEFAULT_TOP_P: Final = 1.0
"""OpenAI's defaults, also where the engine's own differ."""

FIELD_NAMES: Final[Mapping[str, str]] = {
    "include_stop": "include_stop_str_in_output",
    "token_ids": "prompt",
}
"""Names of the engine that the endpoints spell otherwise; each endpoint adds its own."""


Conversation: TypeAlias = tuple[
    list[dict[str, object]], list[dict[str, object]], Mapping[str, object] | None
]
"""Messages, tools and variables of the chat template, as values."""


StopText: TypeAlias = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]

Stop: TypeAlias = Annotated[
    Annotated[StopText, Tag("~text")]
    | Annotated[list[StopText], Field(fail_fast=True, max_length=MAX_STOP_STRINGS), Tag("~list")],
    one_of(text_or_list, "a string or a list of strings"),
]

TokenId: TypeAlias = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]


def _check_bias(given: object) -> object:
    """Check the number of entries and the keys first: a mistake may have a million."""
    if not isinstance(given, dict):
        return given
    if len(given) > MAX_LOGIT_BIASES:
        raise ValueError(f"at most {MAX_LOGIT_BIASES} entries, got {len(given)}")
    for key in given:
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10):
            raise ValueError("keys must be token ids")
        if key != str(int(key)):  # else two keys could mean one token
            raise ValueError(f"keys must be token ids without leading zeros, got {key!r}")
    return given


LogitBias: TypeAlias = Annotated[
    dict[str, Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]],
    BeforeValidator(_check_bias),
    Field(description=f"token id → bias, at most {MAX_LOGIT_BIASES} entries"),
]


_MetadataKey: TypeAlias = Annotated[str, Field(max_length=MAX_METADATA_KEY)]
_MetadataValue: TypeAlias = Annotated[str, Field(max_length=MAX_METADATA_VALUE)]

Metadata: TypeAlias = Annotated[dict[_MetadataKey, _MetadataValue], Field(max_length=MAX_METADATA)]
MessageMetadata: TypeAlias = Annotated[
    dict[_MetadataKey, _MetadataValue | None], Field(max_length=MAX_METADATA)
]
"""Anthropic's, whose values may be null."""


TemplateKwargs: TypeAlias = Annotated[
    dict[str, JsonValue],
    Field(
        max_length=MAX_VARIABLES,
        description="variables of the model's chat template, such as enable_thinking, over the "
        "server's own defaults; at most "
        f"{MAX_JSON_BYTES} bytes as JSON, {MAX_DEPTH} objects and lists deep",
    ),
]


class StreamOptions(Wire):
    """How a stream is written."""

    include_usage: bool | None = Field(None, description="end with a chunk that holds the usage")
    continuous_usage_stats: bool | None = Field(
        None, description="every chunk holds the usage so far, by vLLM's name"
    )
    include_obfuscation: OnlyFalse | None = None


REGEX_LENGTHS: Final[JsonDict] = {"minLength": 1, "maxLength": MAX_REGEX_CHARACTERS}
"""What the document says; who breaks it is told so by the engine, with the number."""


def _schema(given: object) -> object:
    if given is None or isinstance(given, dict | str | bool):
        return given
    message = "Input should be a JSON Schema: an object, its text, true or false"
    raise PydanticCustomError("wrong", "{message}", {"message": message})


class StructuredFields(Wire):
    """What an answer must be; one of these, by vLLM's names."""

    json_: Annotated[dict[str, JsonValue] | str | bool | None, BeforeValidator(_schema)] = Field(
        None, alias="json", description="a JSON Schema: the answer is JSON that it allows"
    )
    json_object: OnlyTrue | None = Field(None, description="any JSON object")
    regex: str | None = Field(
        None, description="matches the whole answer", json_schema_extra=REGEX_LENGTHS
    )
    choice: list[str] | None = Field(None, min_length=1, max_length=MAX_CHOICES)
    grammar: str | None = Field(
        None,
        description="of the answer, in Lark's notation",
        json_schema_extra={"minLength": 1, "maxLength": MAX_GRAMMAR_CHARACTERS},
    )

    @property
    def structure(self) -> StructuredOutputs:
        """The same as the engine takes it. Raises ValidationError."""
        return StructuredOutputs(
            self.json_, bool(self.json_object), self.regex, self.choice or (), self.grammar
        )


class SamplingFields(Wire):
    """How tokens are drawn and when a text ends; OpenAI's parameters and some that are ours."""

    temperature: float | None = Field(None, ge=0, le=MAX_TEMPERATURE)
    top_p: float | None = Field(None, gt=0, le=1)
    stop: Stop | None = None
    presence_penalty: float | None = Field(None, ge=-MAX_PENALTY, le=MAX_PENALTY)
    frequency_penalty: float | None = Field(None, ge=-MAX_PENALTY, le=MAX_PENALTY)
    logit_bias: LogitBias | None = None
    seed: int | None = Field(
        None,
        ge=-(2**63),
        le=MAX_SEED,
        description="makes sampling repeatable; a negative one counts as itself + 2^64",
    )
    top_k: int | None = Field(None, ge=-1, le=MAX_TOP_K, description="0 or -1: from all tokens")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=MAX_REPETITION_PENALTY)
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(
        None,
        ge=0,
        le=MAX_TOKENS,
        description="tokens before which nothing ends an answer, but that its form is whole; at "
        "most max_tokens",
    )
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = Field(
        None, max_length=MAX_STOP_TOKENS
    )
    include_stop_str_in_output: bool | None = None
    priority: int | None = Field(
        None, ge=-MAX_PRIORITY - 1, le=MAX_PRIORITY, description="lower ones are served first"
    )
    structured_outputs: StructuredFields | None = None
    cache_salt: str | None = Field(
        None,
        description="share cached prompts only with requests of the same salt; "
        f"at most {MAX_SALT_BYTES} bytes",
    )

    @property
    def structure(self) -> StructuredOutputs | None:
        """What an answer must be. Raises ValidationError."""
        given = self.structured_outputs
        return None if given is None else given.structure

    def params(
        self,
        *,
        max_tokens: int,
        n: int = 1,
        num_logprobs: int | None = None,
        num_prompt_logprobs: int | None = None,
    ) -> GenerationParams:
        """Return what the engine is asked for."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return GenerationParams(
            max_tokens=max_tokens,
            temperature=_or(self.temperature, DEFAULT_TEMPERATURE),
            top_p=_or(self.top_p, DEFAULT_TOP_P),
            seed=None if self.seed is None else self.seed % (MAX_SEED + 1),
            ignore_eos=bool(self.ignore_eos),
            top_k=max(0, self.top_k or 0),
            min_p=_or(self.min_p, 0.0),
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            logit_bias={int(key): bias for key, bias in (self.logit_bias or {}).items()},
            num_logprobs=num_logprobs,
            n=n,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            include_stop=bool(self.include_stop_str_in_output),
            num_prompt_logprobs=num_prompt_logprobs,
            structured_outputs=self.structure,
            min_tokens=self.min_tokens or 0,
        )

    def options(self, name: str) -> RequestOptions:
        """Return what changes no token; `name`: what the request is called where it is listed."""
        return RequestOptions(
            priority=self.priority or 0, cache_salt=self.cache_salt or "", name=name
        )


class HarmlessFields(Wire):
    """What OpenAI's clients may say of a request that changes nothing here, if it fits.

    Ends for billing, retention and abuse reports are not served; what asks for more is refused.
    The list is told in `docs/openai-http.md`.
    """

    user: str | None = Field(None, description="taken, changes nothing")
    metadata: Metadata | None = Field(None, description="taken, changes nothing")
    store: OnlyFalse | None = Field(None, description="nothing is stored")
    service_tier: Literal["auto", "default"] | None = Field(None, description="there is one")
    parallel_tool_calls: bool | None = Field(None, description="changes nothing without tools")
    safety_identifier: str | None = Field(None, description="taken, changes nothing")
    prompt_cache_key: str | None = Field(
        None, description="changes nothing: equal prompts are found whatever it is"
    )
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = Field(
        None, description="changes nothing: prompts stay as long as there is room"
    )


class StreamFields(Wire):
    """Whether the answer comes in pieces."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options", "stream_options is only allowed with stream")
        return self

    @property
    def wants_usage_chunk(self) -> bool:
        """Whether the stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_usage_so_far(self) -> bool:
        """Whether every chunk has the usage until then."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


Samples: TypeAlias = Annotated[int, Field(ge=1, le=MAX_SAMPLES)]


def _or(given: float | None, default: float) -> float:
    return default if given is None else given
