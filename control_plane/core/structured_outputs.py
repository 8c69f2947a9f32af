"""The form that a caller wants an answer to have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from planes.errors import ValidationError

FIELD: Final = "structured_outputs"
KINDS: Final = ("json", "json_object", "regex", "choice", "grammar")

MAX_SCHEMA_CHARACTERS: Final = 65_536
MAX_REGEX_CHARACTERS: Final = 4_096
MAX_GRAMMAR_CHARACTERS: Final = 8_192
MAX_CHOICES: Final = 1_024
MAX_CHOICE_CHARACTERS: Final = 16_384


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """What an answer must be, whatever the model would say; one of the fields is given.

    `json`: a JSON value that a JSON Schema allows; the schema as its JSON text, or as an object. At
    most 65 536 characters.
    `json_object`: any JSON object.
    `regex`: a text that a regular expression matches as a whole, of at most 4096 characters.
    `choice`: one of these texts; at most 1024 of together 16 384 characters.
    `grammar`: a text of a context-free grammar in Lark's notation, of at most 8192 characters.
    `name`: what the caller calls all this, for errors.
    """

    json: str | Mapping[str, object] | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] = ()
    grammar: str | None = None
    name: str = field(default=FIELD, compare=False)

    @property
    def kind(self) -> str:
        """Which of its fields is given, once it is validated."""
        return next(kind for kind in KINDS if self._is_given(kind))

    def wrong(self, kind: str, message: str) -> ValidationError:
        """Return the error that a field of it is wrong."""
        place = f"{self.name}.{kind}" if self.name == FIELD else self.name
        return ValidationError(f"{place} {message}", field=place)

    def __post_init__(self) -> None:
        """Take a schema that is an object, and a list of choices, as plain values."""
        if isinstance(self.json, Mapping | bool):
            try:
                object.__setattr__(self, "json", json.dumps(self.json, allow_nan=False))
            except (TypeError, ValueError, RecursionError) as error:
                raise self.wrong("json", f"must be a JSON Schema: {error}") from None
        if isinstance(self.choice, list) and self.choice:  # an empty list is given, () is not
            object.__setattr__(self, "choice", tuple(self.choice))

    def validate(self) -> None:
        """Raise ValidationError naming the first field that cannot be, its limit and its value."""
        given = [name for name in KINDS if self._is_given(name)]
        if len(given) != 1:
            raise ValidationError(
                f"{FIELD} must have one of {', '.join(KINDS)}, got {' and '.join(given) or 'none'}",
                field=FIELD,
            )
        name = given[0]
        if name == "choice":
            self._validate_choice()
        elif name == "json_object":
            if self.json_object is not True:
                raise self.wrong(name, f"must be true or left out, got {self.json_object!r}")
        else:
            self._validate_text(name)

    def _is_given(self, name: str) -> bool:
        value = getattr(self, name)
        return value is not None and value is not False and value != ()

    def _validate_text(self, name: str) -> None:
        text = getattr(self, name)
        if not isinstance(text, str):
            kind = "an object or JSON text" if name == "json" else "text"
            raise self.wrong(name, f"must be {kind}, got {text!r:.100}")
        limit = {
            "json": MAX_SCHEMA_CHARACTERS,
            "regex": MAX_REGEX_CHARACTERS,
            "grammar": MAX_GRAMMAR_CHARACTERS,
        }[name]
        if not 1 <= len(text) <= limit:
            raise self.wrong(name, f"must have 1 to {limit} characters, got {len(text)}")

    def _validate_choice(self) -> None:
        choice = self.choice
        if not isinstance(choice, tuple) or not all(
            isinstance(text, str) and text for text in choice
        ):
            raise self.wrong(
                "choice", f"must be one text or more, none of them empty, got {choice!r:.100}"
            )
        if len(choice) > MAX_CHOICES:
            raise self.wrong("choice", f"must have at most {MAX_CHOICES} texts, got {len(choice)}")
        size = sum(map(len, choice))
        if size > MAX_CHOICE_CHARACTERS:
            raise self.wrong(
                "choice", f"must have at most {MAX_CHOICE_CHARACTERS} characters, got {size}"
            )
