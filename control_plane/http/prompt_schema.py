"""What a text or several may be given as: strings or token ids, one or a list of either."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

from pydantic import Field

from control_plane.http.fields import TokenId

Text: TypeAlias = Annotated[str, Field(min_length=1)]
TokenIds: TypeAlias = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]

KINDS: Final = "a string, token ids, or a list of either"


def kind_of_prompt(given: object) -> str:
    """Tell the four kinds apart by their first member, for `one_of`."""
    if isinstance(given, str):
        return "~text"
    if not isinstance(given, list):
        return ""
    first = given[0] if given else ""
    if isinstance(first, list):
        return "~token_lists"
    # A number with a fraction is meant for a token, too, and is told that it is none.
    return "~tokens" if isinstance(first, int | float) else "~texts"


def all_of(
    given: str | list[str] | list[int] | list[list[int]],
) -> list[str] | list[list[int]]:
    """Return every text, of a kind told apart before."""
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], int):
        return [given]
    return given
