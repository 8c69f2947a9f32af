"""Embeddings of texts: what is asked for, what each text is as a request, what comes of it.

A call has one text or many. Each is a request of its own, which ends with its prompt: it queues, is
computed beside all others, and is seen in lists and counts like them.
"""

from __future__ import annotations

import contextlib
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from control_plane.core.embedding import AUTO, Pooling
from control_plane.core.embedding_params import (
    FIELD,
    MAX_INPUTS,
    EmbeddingParams,
    Input,
    TextEmbedding,
)
from control_plane.core.errors import ContextLengthError
from control_plane.core.request import Request
from control_plane.core.request_options import RequestOptions
from control_plane.engine.admission import Admission
from control_plane.engine.events import RequestEnd
from control_plane.engine.plane import PlaneDescription
from control_plane.errors import RequestCancelledError
from planes.errors import EngineError, ValidationError

MAX_TOKENS: Final = 300_000
"""Of all texts of a call; OpenAI's."""
MAX_AT_ONCE: Final = 64
"""Texts of a call that the engine has; the others leave its queue to everybody."""
MAX_NUMBERS: Final = 4_100_000
"""Of all embeddings of an answer: as float32, which they are, they fit into a gRPC message."""


def pooling_of(configured: str, said: str) -> Pooling:
    """Return how a model's texts are pooled.

    `configured`: one of POOLINGS. `said`: by the model's files; empty: nothing, and the hidden
    states of the last token are taken. Raises ValidationError for a pooling that there is not.
    """
    name = configured if configured != AUTO else said or Pooling.LAST.value
    try:
        return Pooling(name)
    except ValueError:
        raise ValidationError(
            f"the model's embeddings are pooled by {name!r}, which is not supported; the server's "
            f"--pooling takes {' or '.join(pooling.value for pooling in Pooling)} instead",
            field=FIELD,
        ) from None


class EmbeddingDesk:
    """Makes requests of texts, and embeddings of what became of them.

    `text_end`: token ids behind a text. `pooling`: one of POOLINGS. Methods raise ValidationError
    and its kin, whose fields are `inputs`, `inputs[i]` where there are several, or those of
    `EmbeddingParams`.
    """

    def __init__(
        self,
        admission: Admission,
        plane: PlaneDescription,
        *,
        text_end: Sequence[int] = (),
        pooling: str = AUTO,
    ) -> None:
        self._admission = admission
        self._plane = plane
        self._text_end = list(text_end)
        self._pooling = pooling

    def check(self, inputs: Sequence[Input], params: EmbeddingParams) -> None:
        """Refuse what needs no look at the texts."""
        if not 1 <= len(inputs) <= MAX_INPUTS:
            raise ValidationError(
                f"{FIELD} must be 1 to {MAX_INPUTS} texts, got {len(inputs)}", field=FIELD
            )
        size, wanted = self._plane.hidden_size, params.dimensions
        if wanted is not None and (
            isinstance(wanted, bool) or not isinstance(wanted, int) or not 1 <= wanted <= size
        ):
            raise ValidationError(
                f"dimensions must be 1 to {size}, the model's own, got {wanted!r}",
                field="dimensions",
            )
        if not isinstance(params.normalize, bool):
            raise ValidationError(
                f"normalize must be true or false, got {params.normalize!r}", field="normalize"
            )
        num_numbers = len(inputs) * (size if wanted is None else wanted)
        if num_numbers > MAX_NUMBERS:
            raise ValidationError(
                f"{FIELD} times dimensions must be at most {MAX_NUMBERS} numbers in one answer, "
                f"got {num_numbers}",
                field=FIELD,
            )

    def with_end(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens of a text as the model wants it for an embedding."""
        return [*tokens, *self._text_end]

    def tokens_of(self, inputs: Sequence[Input]) -> list[Sequence[int]]:
        """Return the tokens of each input, on this thread."""
        found: list[Sequence[int]] = []
        for index, given in enumerate(inputs):
            with named_input(index, len(inputs)):
                if isinstance(given, str):
                    found.append(self.with_end(self._admission.tokenize(given)))
                else:
                    found.append(given)
        return found

    def make_requests(
        self, texts: Sequence[Sequence[int]], options: RequestOptions, *, arrival_time: float
    ) -> list[Request]:
        """Return a request for the tokens of each text; all of them are checked first."""
        pooling = pooling_of(self._pooling, self._plane.pooling)
        total = sum(map(len, texts))
        if total > MAX_TOKENS:
            raise ContextLengthError(
                f"{FIELD} must have at most {MAX_TOKENS} tokens together, got {total}", field=FIELD
            )
        requests = []
        for index, tokens in enumerate(texts):
            named = options
            if len(texts) > 1:
                named = replace(options, name=f"{options.name}-{index}")
            with named_input(index, len(texts)):
                requests.append(
                    self._admission.make_embedding_request(
                        tokens, pooling, arrival_time=arrival_time, options=named
                    )
                )
        return requests


def embedding_of(request: Request, end: RequestEnd, params: EmbeddingParams) -> TextEmbedding:
    """Return what a request has come to. Raises its error, RequestCancelledError."""
    if end.error is not None:
        raise end.error
    if end.embedding is None:
        raise RequestCancelledError("the request was cancelled by the server")
    values = end.embedding[: params.dimensions]
    if params.normalize:
        length = math.hypot(*values) or 1.0  # nothing but zeros stays so
        values = array("d", [value / length for value in values])
    return TextEmbedding(array("f", values), request.num_prompt_tokens, end.cached_tokens)


@contextlib.contextmanager
def named_input(index: int, count: int) -> Iterator[None]:
    """Say in errors of a text that it is one of the inputs, and which of several."""
    try:
        yield
    except EngineError as error:
        if error.field in ("prompt", "token_ids"):
            place = FIELD if count == 1 else f"{FIELD}[{index}]"
            error.message = f"{place}: {error.message.removeprefix(f'{error.field}: ')}"
            error.args = (error.message, *error.args[1:])  # what `str` says
            error.field = place
        raise
