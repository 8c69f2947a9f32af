"""What is asked of an embedding and what it is: plain values, for engines, servers and clients."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from planes.errors import ValidationError

FIELD: Final = "inputs"
MAX_INPUTS: Final = 2048
"""OpenAI's."""

Input = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class EmbeddingParams:
    """What is made of hidden states.

    `dimensions`: the first so many numbers; None: all. `normalize`: to a length of 1, what is left.
    """

    dimensions: int | None = None
    normalize: bool = True


@dataclass(frozen=True, slots=True)
class TextEmbedding:
    """The embedding of one text.

    `values`: float32, which NumPy takes as they are (`numpy.asarray`). `num_tokens`: of the text,
    with what the tokenizer puts around it; `cached_tokens` of them were found computed.
    """

    values: array[float]
    num_tokens: int
    cached_tokens: int = 0


def inputs_of(given: object) -> list[Input]:
    """Return the texts of a call. Raises ValidationError for what is no list of such.

    A text alone would be taken for its characters, and token ids alone for texts.
    """
    if isinstance(given, str | bytes | bytearray) or not isinstance(given, Iterable):
        raise ValidationError(
            f"{FIELD} must be a list of texts, or of lists of token ids, got {given!r:.60}",
            field=FIELD,
        )
    found = list(given)
    for index, one in enumerate(found):
        is_text = isinstance(one, str)
        if not is_text and (isinstance(one, bytes) or not isinstance(one, Sequence)):
            raise ValidationError(
                f"{FIELD}[{index}] must be text or a list of token ids, got {one!r:.60}",
                field=f"{FIELD}[{index}]",
            )
    return found
