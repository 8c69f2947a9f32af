"""Log-probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from control_plane.core.batch import TokenLogprobs
from control_plane.http.json_text import Spelled, SpelledList
from control_plane.http.spelling import Speller

LEAST_LOGPROB = -9999.0
"""What stands for minus infinity, which JSON does not have; as OpenAI does."""


class CompletionLogprobs(BaseModel):
    """Columns, one entry a token; `text_offset` counts characters of the choice's text.

    The first token of an echoed prompt has no log-probability. A token that ended the text is the
    last, although the text is without it.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(BaseModel):
    """A token that might have come. `bytes`: null for one that stands for no text."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token that came, and the most likely ones in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """One entry a token."""

    content: list[TokenLogprob]
    refusal: None


def completion_logprobs(
    speller: Speller,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    offsets: Sequence[int],
) -> dict[str, list[Any]]:
    """Spell log-probabilities for `/v1/completions`; the arguments have one entry a token each."""
    return {
        "tokens": [speller.spell(token_id).text for token_id in token_ids],
        "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in logprobs],
        "top_logprobs": [
            None if entry is None else _by_name(speller, token_id, entry)
            for token_id, entry in zip(token_ids, logprobs, strict=True)
        ],
        "text_offset": list(offsets),
    }


class Columns:
    """What `completion_logprobs` returns, spelled as it comes."""

    def __init__(self) -> None:
        self._lists: dict[str, SpelledList] = {}

    def extend(self, columns: dict[str, list[Any]]) -> None:
        """Append entries."""
        for name, members in columns.items():
            self._lists.setdefault(name, SpelledList()).extend(members)

    def joined(self, *others: Columns) -> dict[str, Spelled]:
        """Return these columns, each with that of others behind it."""
        names = CompletionLogprobs.model_fields
        return {
            name: SpelledList().joined(
                *(one._lists[name] for one in (self, *others) if name in one._lists)
            )
            for name in names
        }


def chat_logprobs(
    speller: Speller, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> list[dict[str, object]]:
    """Spell log-probabilities for chats and responses, one entry a token."""
    return [
        {
            **_named(speller, token_id, entry.logprob),
            "top_logprobs": [
                _named(speller, top_id, logprob)
                for top_id, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True)
            ],
        }
        for token_id, entry in zip(token_ids, logprobs, strict=True)
    ]


def _by_name(speller: Speller, token_id: int, entry: TokenLogprobs) -> dict[str, float]:
    """Return the most likely tokens and the one that came; of two of one name the likelier."""
    named: dict[str, float] = {}
    for top_id, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True):
        named.setdefault(speller.spell(top_id).text, _finite(logprob))
    named.setdefault(speller.spell(token_id).text, _finite(entry.logprob))
    return named


def _named(speller: Speller, token_id: int, logprob: float) -> dict[str, object]:
    spelled = speller.spell(token_id)
    return {"token": spelled.text, "logprob": _finite(logprob), "bytes": spelled.utf8}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
