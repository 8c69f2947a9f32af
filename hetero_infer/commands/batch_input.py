"""What `hetero-infer complete` is to do: prompts from files, from stdin, from JSON Lines.

A line is `{"id"?, "prompt" or "messages", …}`: `prompt` is text or a list of token ids, `messages`,
`tools`, `tool_choice` and `parallel_tool_calls` are OpenAI's, `chat_template_kwargs` is vLLM's,
everything else has the name of a generation parameter, or is `priority`, `cache_salt` or `model`.
What is null is as if it were not there.
Without an id a line is called by its number, a file by its name.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

from control_plane.core.generation_params import GenerationParams
from control_plane.core.request_options import RequestOptions
from control_plane.core.structured_outputs import FIELD, KINDS, StructuredOutputs
from hetero_infer.client import ChatRequest, TextRequest
from hetero_infer.client.arguments import object_of
from hetero_infer.client.conversation import messages_of, tools_of
from planes.errors import EngineError, ValidationError
from planes.near_names import did_you_mean
from planes.transport import MAX_CLIENT_MESSAGE_BYTES

STDIN: Final = "-"
STDIN_ID: Final = "stdin"

HOW: Final = "give files with prompts, --input-file F.jsonl, or pipe a prompt in"
NOTHING_TO_DO: Final = f"nothing to do: {HOW}"

PARAMS: Final = frozenset(field.name for field in dataclasses.fields(GenerationParams))
KWARGS: Final = "chat_template_kwargs"
ENDS: Final = ("continue_final_message", "add_generation_prompt")
CALLS: Final = ("tool_choice", "parallel_tool_calls")
CHAT_KEYS: Final = ("tools", *CALLS, KWARGS, *ENDS)
"""Of a line with messages."""

KEYS: Final = ("id", "prompt", "messages", *CHAT_KEYS, "priority", "cache_salt", "model")

HASH_DIGITS: Final = 16

Id = str | int


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a line that says nothing else is asked with. `model`: empty: the one that is loaded."""

    params: GenerationParams
    options: RequestOptions
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """One thing to do: a request, or why it is none. `place`: where it stands in the input."""

    id: Id
    place: str
    request: TextRequest | ChatRequest | EngineError

    @property
    def key(self) -> str:
        """The id as JSON: 1 is not "1"."""
        return key_of(self.id)

    @property
    def request_hash(self) -> str | None:
        """Tells whether an answer is one to this request; None: it is none.

        Of all that has a part in the answer: prompt or messages, tools, model, and the parameters
        that are not the usual ones, so that it stays as it is when others come to be.
        """
        if isinstance(self.request, EngineError):
            return None
        decisive = dataclasses.asdict(self.request)
        del decisive["priority"], decisive["cache_salt"]
        # These came later: without them, all is as before.
        unset_values = (None, False, None, None, True)
        for name, unset in zip((KWARGS, *ENDS, *CALLS), unset_values, strict=True):
            if decisive.get(name, unset) in (unset, {}):
                decisive.pop(name, None)
        for message in decisive.get("messages", ()):
            if not message["reasoning_content"]:
                del message["reasoning_content"]
        for tool in decisive.get("tools", ()):
            if not tool["strict"]:
                del tool["strict"]
        usual = dataclasses.asdict(GenerationParams())
        params = decisive["params"].items()
        decisive["params"] = {name: value for name, value in params if value != usual[name]}
        text = json.dumps(decisive, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]


def key_of(job_id: Id) -> str:
    """Return an id as JSON."""
    return json.dumps(job_id)


def read_jobs(files: Sequence[str], input_file: str | None, defaults: Defaults) -> list[Job]:
    """Return everything that is to be done, in order.

    Raises ValidationError for a file that cannot be read, and for ids that occur twice.
    """
    if files and input_file is not None:
        raise ValidationError(
            "give files with prompts or --input-file, not both", field="input_file"
        )
    if input_file is not None:
        jobs = list(_from_lines(input_file, defaults))
    else:
        jobs = [
            _from_text(name, number, defaults)
            for number, name in enumerate(files or (STDIN,), start=1)
        ]
    _check_ids(jobs)
    return jobs


def _check_ids(jobs: Iterable[Job]) -> None:
    places: dict[str, str] = {}
    for job in jobs:
        if job.key in places:
            raise ValidationError(
                f"the id {job.key} is used twice, {places[job.key]} and {job.place}; results are "
                "matched by id (without one, a line by its number, a file by its name)",
                field="id",
            )
        places[job.key] = job.place


# --- one prompt a file ---


def _from_text(name: str, number: int, defaults: Defaults) -> Job:
    options = defaults.options
    request = TextRequest(
        _read_text(name), defaults.params, options.priority, options.cache_salt, defaults.model
    )
    return Job(STDIN_ID if name == STDIN else name, f"as file {number}", request)


def _read_text(name: str) -> str:
    """Return the prompt in a file, without the line end that editors add."""
    with _open(name) as file:
        data = _read(file, name, MAX_CLIENT_MESSAGE_BYTES)
    if len(data) > MAX_CLIENT_MESSAGE_BYTES:
        raise ValidationError(
            f"{name}: a prompt has at most {MAX_CLIENT_MESSAGE_BYTES} bytes, got more",
            field="files",
        )
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ValidationError(
            f"{name} is not valid UTF-8 (at byte {error.start})", field="files"
        ) from None
    text = text.removesuffix("\n").removesuffix("\r")
    if not text and name == STDIN:
        raise ValidationError(f"standard input is empty: {HOW}", field="files")
    return text


def _open(name: str) -> BinaryIO:
    if name == STDIN:
        if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
            raise ValidationError(NOTHING_TO_DO, field="files")
        # Closing a duplicate leaves stdin as it is.
        return open(sys.stdin.fileno(), "rb", closefd=False)
    try:
        return Path(name).open("rb")
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ValidationError(f"{name} cannot be read: {why}", field="files") from None


def _read(file: BinaryIO, name: str, max_bytes: int = -1) -> bytes:
    try:
        return file.read(max_bytes + 1 if max_bytes >= 0 else -1)
    except OSError as error:
        raise ValidationError(f"{name} cannot be read: {error.strerror}", field="files") from None


# --- one job a line ---


def _from_lines(name: str, defaults: Defaults) -> Iterator[Job]:
    with _open(name) as file:
        data = _read(file, name)
    for number, line in enumerate(data.splitlines(), start=1):
        if line.strip():
            yield _from_line(number, line, defaults)


def _from_line(number: int, line: bytes, defaults: Defaults) -> Job:
    job_id: Id = number
    request: TextRequest | ChatRequest | EngineError
    try:
        values = _object(line)
        job_id = _id(values, number)
        request = _request(values, defaults)
    except EngineError as error:
        request = error
    return Job(job_id, f"in line {number}", request)


def _object(line: bytes) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValidationError(f"the line is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValidationError(f"the line must be a JSON object, got {type(values).__name__}")
    return values


def _id(values: Mapping[str, Any], number: int) -> Id:
    job_id = values.get("id")
    if job_id is None:
        return number
    if isinstance(job_id, bool) or not isinstance(job_id, str | int):
        raise ValidationError(f"id must be text or an integer, got {job_id!r}", field="id")
    return job_id


def _request(values: Mapping[str, Any], defaults: Defaults) -> TextRequest | ChatRequest:
    for key in values:
        if key not in KEYS and key not in PARAMS:
            raise ValidationError(
                f"unknown key {key!r}{did_you_mean(key, (*KEYS, *PARAMS))}", field=key
            )
    values = {key: value for key, value in values.items() if value is not None}
    if ("prompt" in values) == ("messages" in values):
        raise ValidationError("a line has either a prompt or messages", field="prompt")
    params = _params(values, defaults.params)
    options = RequestOptions(
        priority=values.get("priority", defaults.options.priority),
        cache_salt=values.get("cache_salt", defaults.options.cache_salt),
    )
    options.validate()
    model = values.get("model", defaults.model)
    if not isinstance(model, str):
        raise ValidationError(f"model must be text, got {model!r}", field="model")
    if "prompt" in values:
        for key in CHAT_KEYS:
            if key in values:
                raise ValidationError(f"{key} means nothing without messages", field=key)
        prompt = _prompt(values["prompt"])
        return TextRequest(prompt, params, options.priority, options.cache_salt, model)
    return ChatRequest(
        messages_of(values["messages"]),
        tools_of(values.get("tools", ())),
        params,
        options.priority,
        options.cache_salt,
        model,
        {**defaults.chat_template_kwargs, **object_of(values.get(KWARGS), KWARGS)},
        values.get("continue_final_message", False),
        values.get("add_generation_prompt"),
        values.get("tool_choice"),
        values.get("parallel_tool_calls", True),
    )


def _prompt(value: object) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(
        isinstance(token, int) and not isinstance(token, bool) for token in value
    ):
        return tuple(value)
    raise ValidationError("prompt must be text or a list of token ids", field="prompt")


def _params(values: Mapping[str, Any], defaults: GenerationParams) -> GenerationParams:
    """Return the parameters of a line. Raises ValidationError."""
    given: dict[str, Any] = {key: value for key, value in values.items() if key in PARAMS}
    if isinstance(given.get("stop"), str):
        given["stop"] = (given["stop"],)
    for name in ("stop", "stop_token_ids"):
        if isinstance(given.get(name), list):
            given[name] = tuple(given[name])
    bias = given.get("logit_bias")
    if isinstance(bias, dict):
        # Keys of JSON objects are text.
        given["logit_bias"] = {
            int(key) if key.isascii() and key.isdigit() else key: value
            for key, value in bias.items()
        }
    if FIELD in given:
        given[FIELD] = _structure(given[FIELD])
    params = dataclasses.replace(defaults, **given)
    params.validate()
    return params


def _structure(given: object) -> StructuredOutputs:
    """Return the form of an answer. Raises ValidationError."""
    if not isinstance(given, dict) or not given.keys() <= set(KINDS):
        raise ValidationError(
            f"{FIELD} must be an object with one of {', '.join(KINDS)}", field=FIELD
        )
    return StructuredOutputs(**given)
