"""JSON objects as callers send them, whatever the endpoint: how one is read, and refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, model_validator
from pydantic_core import PydanticCustomError, PydanticKnownError

from control_plane.api.status import shorten
from control_plane.http.errors import PARAM

MAX_FIELDS: Final = 128
"""Of one object; no schema has half as many."""


class Wire(BaseModel):
    """An object as callers send it: no unknown field, no text for a number; null means unset.

    A field that is not known may be null, too: messages that OpenAI's packages hand back have
    fields that this server never had a value for, and later versions have more. The schema says so.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        json_schema_extra={"additionalProperties": {"type": "null"}, "maxProperties": MAX_FIELDS},
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:  # noqa: ANN401 - parsed JSON
        """OpenAI's own clients send null for what was not said, whatever the field.

        Fields are counted first: a mistake may have a million, and each would be told apart.
        """
        if isinstance(given, dict):
            if len(given) > MAX_FIELDS:
                message = f"an object has at most {MAX_FIELDS} fields, got {len(given)}"
                raise PydanticCustomError("wrong", "{message}", {"message": message})
            return {name: value for name, value in given.items() if value is not None}
        return given

    max_tokens_of_body: ClassVar[int] = 0
    """Tokens that a body may have where that is more than one prompt of the model may."""

    def prepare(self) -> None:
        """Do now what takes long for a long body: this is its thread, and not the event loop."""

    def forget(self) -> None:
        """Let go of what may be large, once a prompt is made of it: the answer may take long."""


def one_of(choose: Callable[[Any], str], expected: str) -> Discriminator:
    """Tell the members of a union apart by what is given, so that one of them says what is wrong.

    Tags begin with `~`: `field_path` leaves them out. `expected`: said where `choose` finds none.
    """
    return Discriminator(
        choose,
        custom_error_type="wrong_kind",
        custom_error_message=f"Input should be {expected}",
    )


def _no_number(given: Any) -> Any:  # noqa: ANN401 - parsed JSON
    if not isinstance(given, bool):
        raise PydanticKnownError("bool_type")
    return given


OnlyFalse: TypeAlias = Annotated[Literal[False], BeforeValidator(_no_number)]
OnlyTrue: TypeAlias = Annotated[Literal[True], BeforeValidator(_no_number)]
"""A literal alone would take 0 and 0.0, which equal it."""


def wrong(name: str, message: str) -> PydanticCustomError:
    """Return what a model raises for fields that do not go together, or its own check of one.

    `name`: the field that the answer names as `param`, below the model's own place.
    """
    return PydanticCustomError("wrong", "{message}", {"message": message, PARAM: name})


def word_of(name: str, words: Sequence[str], *, is_required: bool = True) -> BeforeValidator:
    """Name the field by which members of a union are told apart where its word is none of these.

    The rest of the object may be anything then. `is_required`: it is wrong to leave it out.
    """
    known = repr(words[-1])
    if len(words) > 1:
        known = f"{', '.join(map(repr, words[:-1]))} or {known}"

    def check(given: object) -> object:
        if not isinstance(given, dict):
            return given
        word = given.get(name)
        if word is None:
            if is_required:
                raise PydanticCustomError("missing", "Field required", {PARAM: name})
        elif not isinstance(word, str) or word not in words:
            told = f", got {shorten(repr(word), 60)}" if isinstance(word, str | int | float) else ""
            raise wrong(name, f"Input should be {known}{told}")
        return given

    return BeforeValidator(check)


def text_or_list(given: object) -> str:
    """Tell text and list apart for `one_of`; the tags are `~text` and `~list`."""
    if isinstance(given, str):
        return "~text"
    return "~list" if isinstance(given, list) else ""
