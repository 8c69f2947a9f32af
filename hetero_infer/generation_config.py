"""What one generation may be asked for on the command line, in the environment, in a JSON file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from control_plane.core.generation_params import (
    MAX_BEAM_WIDTH,
    MAX_LENGTH_PENALTY,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
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
from control_plane.core.request_options import MAX_PRIORITY, RequestOptions
from control_plane.core.structured_outputs import StructuredOutputs
from planes.errors import ConfigError
from planes.settings import setting, spell

T = TypeVar("T")

DEFAULT_PARAMS = GenerationParams()


def read_texts(given: object) -> tuple[str, ...]:
    """Read one text, or a list of them; from the environment, a list is JSON."""
    if isinstance(given, str):
        given = _json_texts(given) or given
    return tuple(_all_of(str, _listed(given), "text, or a list of texts"))


def read_token_ids(given: object) -> tuple[int, ...]:
    """Read token ids, a list of numbers; as text, with commas between them."""
    return tuple(_all_of(int, _cut(_listed(given), int), "token ids with commas between them"))


def read_schema(given: str) -> str:
    """Return the text of a JSON Schema: itself, or that of the file of this name.

    Raises ConfigError for a file that cannot be read, and for what is no JSON.
    """
    text = given if given.lstrip().startswith("{") else _text_of_file(given)
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"json_schema: not valid JSON: {error}", field="json_schema") from None
    return text


def _text_of_file(given: str) -> str:
    try:
        return Path(given).read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(
            f"json_schema: must be an object as JSON, or a file: {given}: {why}",
            field="json_schema",
        ) from None


def read_logit_bias(given: object) -> dict[int, float]:
    """Read TOKEN=BIAS, several with commas between them; in JSON, an object with these keys."""
    what = "TOKEN=BIAS, several with commas between them"
    if isinstance(given, Mapping):
        given = [f"{token}={bias}" for token, bias in given.items()]
    found = {}
    for pair in _all_of(str, _cut(_listed(given), str), what):
        token, _, bias = pair.partition("=")
        try:
            found[int(token)] = float(bias)
        except ValueError:
            raise ValueError(f"{what}, got {pair!r}") from None
    return found


def _listed(given: object) -> Sequence[object]:
    return given if isinstance(given, list | tuple) else [given]


def _json_texts(text: str) -> list[str] | None:
    """Return the texts of a JSON list of texts; None for any other text."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_list = isinstance(found, list) and all(isinstance(part, str) for part in found)
    return found if is_list else None


def _cut(given: Iterable[object], kind: Callable[[str], object]) -> Iterator[object]:
    """Yield the parts of texts between their commas, as `kind` if they can be; the rest as it is.

    ASCII only, like all numbers of the configuration.
    """
    for value in given:
        for part in value.split(",") if isinstance(value, str) else (value,):
            try:
                yield kind(part.strip()) if isinstance(part, str) and part.isascii() else part
            except ValueError:
                yield part


def _all_of(kind: type[T], given: Iterable[object], what: str) -> Iterator[T]:
    """Yield what is given. Raises ValueError, saying what it must be, for another kind."""
    for value in given:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{what}, got {value!r}")  # noqa: TRY004 - as settings say it
        yield value


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """One generation as the command line, the environment and the JSON file may give it."""

    input: str | None = setting(None, help="prompt; serving clients is `serve`")
    max_tokens: int = setting(
        DEFAULT_PARAMS.max_tokens, help="tokens to generate at most", minimum=1, maximum=1 << 30
    )
    temperature: float = setting(
        DEFAULT_PARAMS.temperature,
        help="sampling temperature, 0: greedy",
        minimum=0,
        maximum=MAX_TEMPERATURE,
    )
    top_p: float = setting(
        DEFAULT_PARAMS.top_p, help="nucleus sampling threshold", above=0, maximum=1
    )
    top_k: int = setting(
        DEFAULT_PARAMS.top_k,
        help="draw from so many of the likeliest tokens; 0: from all",
        minimum=0,
        maximum=MAX_TOP_K,
    )
    min_p: float = setting(
        DEFAULT_PARAMS.min_p,
        help="draw from tokens at least so many times as likely as the best; 0: off",
        minimum=0,
        maximum=1,
    )
    repetition_penalty: float = setting(
        DEFAULT_PARAMS.repetition_penalty,
        help="logits of tokens in prompt and answer are divided by it; 1: off",
        above=0,
        maximum=MAX_REPETITION_PENALTY,
    )
    presence_penalty: float = setting(
        DEFAULT_PARAMS.presence_penalty,
        help="subtracted from the logits of tokens in the answer; 0: off",
        minimum=-MAX_PENALTY,
        maximum=MAX_PENALTY,
    )
    frequency_penalty: float = setting(
        DEFAULT_PARAMS.frequency_penalty,
        help="the same for each time they are in it; 0: off",
        minimum=-MAX_PENALTY,
        maximum=MAX_PENALTY,
    )
    logit_bias: dict[int, float] | None = setting(  # noqa: RUF009 - it makes a field
        None,
        help=(
            "what is added to the logit of a token, "
            f"{spell(-MAX_LOGIT_BIAS)} to {spell(MAX_LOGIT_BIAS)}; may be given again"
        ),
        read=read_logit_bias,
        metavar="TOKEN=BIAS",
    )
    seed: int | None = setting(
        None, help="makes sampling repeatable; default: drawn", minimum=0, maximum=MAX_SEED
    )
    stop: tuple[str, ...] = setting(
        (),
        help=(
            f"text that ends the answer where it is complete, 1 to {MAX_STOP_CHARACTERS} "
            f"characters; may be given {MAX_STOP_STRINGS} times"
        ),
        read=read_texts,
        metavar="TEXT",
    )
    stop_token_ids: tuple[int, ...] = setting(
        (),
        help=f"tokens that end the answer, at most {MAX_STOP_TOKENS}; may be given again",
        read=read_token_ids,
        metavar="ID,…",
    )
    include_stop: bool = setting(False, help="show what ended the answer, too")
    ignore_eos: bool = setting(False, help="go on to --max-tokens past the end of the text")
    min_tokens: int = setting(
        DEFAULT_PARAMS.min_tokens,
        help="least tokens of an answer, at most --max-tokens: nothing ends it before",
        minimum=0,
    )
    logprobs: int | None = setting(
        None,
        help="tell each token's log-probability, and those of so many likeliest ones (--json)",
        minimum=0,
        maximum=MAX_LOGPROBS,
    )
    prompt_logprobs: int | None = setting(
        None, help="the same of the prompt's tokens", minimum=0, maximum=MAX_LOGPROBS
    )
    n: int = setting(
        DEFAULT_PARAMS.n,
        help="samples of the prompt; of a beam search, its best answers",
        minimum=1,
        maximum=MAX_SAMPLES,
    )
    beam_width: int | None = setting(
        None, help="beams of a beam search instead of sampling", minimum=1, maximum=MAX_BEAM_WIDTH
    )
    length_penalty: float = setting(
        DEFAULT_PARAMS.length_penalty,
        help="a beam's score is divided by its length to this power",
        minimum=-MAX_LENGTH_PENALTY,
        maximum=MAX_LENGTH_PENALTY,
    )
    early_stopping: bool = setting(False, help="end the search when --beam-width beams have ended")
    priority: int = setting(
        0, help="lower ones are served first", minimum=-MAX_PRIORITY - 1, maximum=MAX_PRIORITY
    )
    cache_salt: str | None = setting(
        None, help="share cached prompts only with requests of the same salt"
    )
    adapter: str | None = setting(
        None, help="adapter that computes it, by its name in --lora; default: none", metavar="NAME"
    )

    json_schema: str | None = setting(
        None,
        help="the answer is JSON that this JSON Schema allows; its text, or the name of a file",
        metavar="SCHEMA",
    )
    regex: str | None = setting(
        None, help="the answer is what this regular expression matches", metavar="REGEX"
    )

    @property
    def structured_outputs(self) -> StructuredOutputs | None:
        """The form of the answer. Raises ConfigError for a schema that cannot be read."""
        if self.json_schema is None and self.regex is None:
            return None
        schema = None if self.json_schema is None else read_schema(self.json_schema)
        return StructuredOutputs(json=schema, regex=self.regex)

    @property
    def options(self) -> RequestOptions:
        """What changes no token of it, as the engine takes it."""
        return RequestOptions(priority=self.priority, cache_salt=self.cache_salt or "")

    @property
    def params(self) -> GenerationParams:
        """The same as the engine takes it."""
        return GenerationParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias or {},
            num_logprobs=self.logprobs,
            n=self.n,
            beam_width=self.beam_width,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            include_stop=self.include_stop,
            num_prompt_logprobs=self.prompt_logprobs,
            structured_outputs=self.structured_outputs,
            min_tokens=self.min_tokens,
        )
