"""What making the text of an answer takes to know of how it will be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, NamedTuple

from control_plane.core.generation_params import GenerationParams
from control_plane.text.answers.parser import AnswerFormat
from control_plane.text.detokenizer import NONE


class TextForm(NamedTuple):
    """How the text of a request's samples is made.

    `spelled`: special tokens that are to be in it, ids and names. `make_end`: makes what sees that
    one of the samples is whole; None: nobody looks.
    """

    spelled: Mapping[int, str] = NONE
    make_end: Callable[[], FirstCall] | None = None


PLAIN: Final = TextForm()


class FirstCall:
    """Sees that the first call of an answer has been read, its marks too."""

    def __init__(self, answer_format: AnswerFormat) -> None:
        self._spelled = answer_format.spelled
        knows_marks = answer_format.marks_are_tokens
        self._parser = answer_format.parser(max_calls=1, knows_marks=knows_marks)
        self._length = 0

    def push(self, text: str, token_id: int) -> bool:
        """Take the next token and its text; whether nothing is to follow it."""
        self._length += len(text)
        name = self._spelled.get(token_id)
        if name is not None:
            self._parser.note_mark(self._length - len(name), name)
        self._parser.push(text)
        return self._parser.is_over


def text_form_of(
    answer_format: AnswerFormat | None, params: GenerationParams, *, is_single: bool
) -> TextForm:
    """Return the form of an answer; `is_single`: it may have one call.

    Where the answer has another form, the end is for that to say.
    """
    if answer_format is None:
        return PLAIN
    looks = is_single and answer_format.calls is not None and params.structured_outputs is None
    make_end = partial(FirstCall, answer_format) if looks else None
    return TextForm(answer_format.spelled, make_end)
