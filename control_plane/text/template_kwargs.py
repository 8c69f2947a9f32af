"""`chat_template_kwargs`: variables of a chat template that callers set, by whichever surface.

Templates have switches of their own, such as `enable_thinking` of Qwen3. The name is that of vLLM
and llama-server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from control_plane.text.bounds import MAX_JSON_BYTES
from control_plane.text.conversation import json_object
from planes.errors import ValidationError

FIELD: Final = "chat_template_kwargs"

MAX_VARIABLES: Final = 64
MAX_DEPTH: Final = 16
"""Lists and objects in each other; the object of the variables is the first."""

OWN_VARIABLES: Final = frozenset(
    {
        "messages",
        "tools",
        "add_generation_prompt",
        "bos_token",
        "eos_token",
        "raise_exception",
        "strftime_now",
    }
)
"""What the server itself tells a template: requests say it elsewhere, or not at all."""


def check_template_kwargs(given: Mapping[str, object]) -> None:
    """Raise ValidationError unless these are a few JSON values with names that callers may set."""
    if len(given) > MAX_VARIABLES:
        raise _refusal(f"must have at most {MAX_VARIABLES} entries, got {len(given)}")
    for name in given:
        if name in OWN_VARIABLES:
            raise _refusal(f"must not set {name!r}: the server does")
    _check_depth(given, 1)
    try:
        text = json.dumps(given, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise _refusal(f"must be JSON values: {error}") from None
    size = len(text.encode(errors="surrogatepass"))
    if size > MAX_JSON_BYTES:
        raise _refusal(f"must have at most {MAX_JSON_BYTES} bytes as JSON, got {size}")


def read_template_kwargs(given: object) -> str:
    """Read a setting: the JSON text of an object, or the object itself; return its JSON text.

    Of a list, as flags that may be given again are, all objects together; the later ones win.
    Raises ValueError that says what it must be.
    """
    found: dict[str, Any] = {}
    for part in given if isinstance(given, list) else [given]:
        if not isinstance(part, str | Mapping):
            raise ValueError(f"a JSON object, got {part!r}")  # noqa: TRY004 - as settings say it
        try:
            found |= json_object(part) if isinstance(part, str) else part
        except ValueError as error:
            raise ValueError(
                f'a JSON object, such as {{"enable_thinking": false}}: {error}'
            ) from None
    try:
        check_template_kwargs(found)
    except ValidationError as error:
        raise ValueError(f"a JSON object of variables: {error.message}") from None
    return json.dumps(found, ensure_ascii=False)


def _check_depth(value: object, depth: int) -> None:
    if not isinstance(value, Mapping | list | tuple):
        return
    if depth > MAX_DEPTH:
        raise _refusal(f"must not be nested more than {MAX_DEPTH} deep")
    for part in value.values() if isinstance(value, Mapping) else value:
        _check_depth(part, depth + 1)


def _refusal(what: str) -> ValidationError:
    return ValidationError(f"{FIELD} {what}", field=FIELD)
