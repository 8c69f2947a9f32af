"""Why a structure is refused: what the library says of it, in words for who wrote the structure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

MAX_ERROR_CHARACTERS: Final = 300

LIBRARY: Final = "the grammar library says"
"""Before its own words, where there are none here for what it says."""

NO_TOKENS: Final = "what it wants next has characters that the model has no tokens for"

_WORDS: Final = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (
            r"NoExtensionBias",
            "no text can keep to it: it leads back to itself, contradicts itself, or has "
            "characters that the model has no tokens for",
        ),
        (r"forced bytes: got", NO_TOKENS),
        (r"schema too large", "it is too large, or its alternatives multiply"),
        (
            r"fuel exhausted|lexer configuration .* too big|class too large|too many expressions",
            "telling its texts, patterns and numbers apart takes too much",
        ),
        (
            r"Too many items|too many states",
            "what it leaves open takes too much to follow",
        ),
        (r"Resource '", "it refers to another document; references within it are followed"),
        (r"Pointer (?P<what>'.*') does not exist", "it refers to {what}, which does not exist"),
        (r"Unimplemented keys: \[(?P<what>.*)\]", "answers cannot keep to {what}"),
        (
            r"oneOf constraints are not supported",
            "oneOf is only for alternatives that exclude one another; anyOf is for others",
        ),
        (r"Unsatisfiable schema: (?P<what>.*)", "no JSON keeps to it: {what}"),
        (r"Invalid type: (?P<what>.*)", "there is no type '{what}'"),
        (r"no start rule found", "there is no rule start"),
        (r"^panic: ", "it is more than can be compiled"),
    )
)


def reason_of(error: str, *, has_places: bool = True) -> str:
    """Return in one line what a caller is told of an error of the library.

    `has_places`: the caller wrote the grammar, so that a place in it means something.
    """
    lines = error.strip().splitlines()
    line = lines[0] if lines else "no reason is given"
    if line.endswith("regex parse error:"):
        return _reason_of_regex(lines, has_places=has_places)[:MAX_ERROR_CHARACTERS]
    for pattern, words in _WORDS:
        found = pattern.search(line)
        if found is not None:
            return words.format(**found.groupdict())[:MAX_ERROR_CHARACTERS]
    return f"{LIBRARY}: {line}"[:MAX_ERROR_CHARACTERS]


def _reason_of_regex(lines: Sequence[str], *, has_places: bool) -> str:
    """Return the reason, which comes last; the first line has all of the expression."""
    is_told = has_places and lines[0].startswith("at ")
    place = f"{lines[0].partition(': ')[0]}: " if is_told else ""
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return f"{place}regex parse error: {reasons[-1] if reasons else 'no reason is given'}"


class NameRefusedError(ValueError):
    """A function has a name that a format cannot write."""
