"""The form that an answer of a conversation must have, as OpenAI's two endpoints spell it.

Chats take Hugging Face's spelling too, which `huggingface_hub` makes of OpenAI's by itself.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

from pydantic import BeforeValidator, Field, JsonValue, Tag

from control_plane.core.structured_outputs import StructuredOutputs
from control_plane.http.fields import REGEX_LENGTHS
from control_plane.http.wire import Wire, one_of, wrong

NAME: Final = "response_format"
NAME_IN_RESPONSES: Final = "text.format"
MAX_NAME_CHARACTERS: Final = 64
"""OpenAI's."""


class TextFormat(Wire):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Wire):
    """A JSON object, whichever."""

    type: Literal["json_object"]


class JsonSchema(Wire):
    """A JSON Schema; an answer keeps to it, `strict` or not."""

    name: str = Field(min_length=1, max_length=MAX_NAME_CHARACTERS)
    description: str | None = None
    schema_: dict[str, JsonValue] = Field(alias="schema")
    strict: bool | None = Field(None, description="changes nothing: every answer keeps to it")


class JsonSchemaFormat(Wire):
    """JSON that a schema allows."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class NamedSchemaFormat(JsonSchema):
    """JSON that a schema allows, as `/v1/responses` spells it."""

    type: Literal["json_schema"]


class ValueOrObjectFormat(JsonObjectFormat):
    """A JSON object, whichever, or one that a schema allows."""

    value: dict[str, JsonValue] | None = Field(None, description="a JSON Schema; Hugging Face's")


class ValueFormat(Wire):
    """JSON that a schema allows, as Hugging Face's TGI spells it."""

    type: Literal["json"]
    value: dict[str, JsonValue]


class RegexFormat(Wire):
    """A text that a regular expression matches as a whole, as Hugging Face's TGI spells it."""

    type: Literal["regex"]
    value: str = Field(json_schema_extra=REGEX_LENGTHS)


def _kind(given: object) -> str:
    """Tell the formats apart for `one_of`."""
    kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
    return f"~{kind}"


def _check_type(*others: str) -> BeforeValidator:
    """Name the type as what is wrong, where the rest may be anything. `others`: beside OpenAI's."""
    types = ("text", "json_object", "json_schema", *others)
    known = f"{', '.join(map(repr, types[:-1]))} or {types[-1]!r}"

    def check(given: object) -> object:
        if isinstance(given, dict) and given.get("type") not in types:
            raise wrong("type", f"Input should be {known}")
        return given

    return BeforeValidator(check)


_ONE_OF_THEM: Final = one_of(_kind, "an object")

ResponseFormat: TypeAlias = Annotated[
    Annotated[TextFormat, Tag("~text")]
    | Annotated[ValueOrObjectFormat, Tag("~json_object")]
    | Annotated[JsonSchemaFormat, Tag("~json_schema")]
    | Annotated[ValueFormat, Tag("~json")]
    | Annotated[RegexFormat, Tag("~regex")],
    _ONE_OF_THEM,
    _check_type("json", "regex"),
]

FormatOfText: TypeAlias = Annotated[
    Annotated[TextFormat, Tag("~text")]
    | Annotated[JsonObjectFormat, Tag("~json_object")]
    | Annotated[NamedSchemaFormat, Tag("~json_schema")],
    _ONE_OF_THEM,
    _check_type(),
]


def structure_of(
    wanted: ResponseFormat | FormatOfText | None, name: str = NAME
) -> StructuredOutputs | None:
    """Return what the engine is asked for; `name`: of the field. Raises ValidationError."""
    if isinstance(wanted, RegexFormat):
        return StructuredOutputs(regex=wanted.value, name=name)
    schema = wanted.value if isinstance(wanted, ValueOrObjectFormat | ValueFormat) else None
    if schema is not None:
        return StructuredOutputs(json=schema, name=name)
    if isinstance(wanted, JsonObjectFormat):
        return StructuredOutputs(json_object=True, name=name)
    if isinstance(wanted, JsonSchemaFormat):
        return StructuredOutputs(json=wanted.json_schema.schema_, name=name)
    if isinstance(wanted, NamedSchemaFormat):
        return StructuredOutputs(json=wanted.schema_, name=name)
    return None
