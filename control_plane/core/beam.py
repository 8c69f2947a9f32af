"""Beam search: which continuations of a prompt are followed, and which are the answer.

The rules are those of the transformers library (`GenerationMixin._beam_search`, version 5), so that
the results can be compared: each step ranks the continuations of all beams together; those that end
are candidates for the answer if they are among the best `width`, and the best `width` of the others
go on. Scores are sums of log-probabilities, in float32 as there; a finished one is divided by its
length to the power of `length_penalty`.

Of one beam the best `width` + number of end tokens are enough for that: among them are `width` that
do not end, and whatever of it is among the best `width` of all. (transformers takes the best
(1 + number of end tokens, at least 2) · `width` of all beams, which comes to the same.)

Pure policy: it knows tokens and scores, no blocks and no slots. What it needs of the scheduler is
one operation: every beam of the next step is the continuation of a beam of this one by one token
(`Continuation.parent`), so beams are forked and dropped.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from control_plane.core.batch import TokenLogprobs

_FLOAT32 = struct.Struct("f")


class Continuation(NamedTuple):
    """A beam of the next step: beam `parent` of this one, and a token more."""

    parent: int
    token_id: int
    score: float


class Hypothesis(NamedTuple):
    """A finished beam; `tokens` without an end token."""

    score: float
    tokens: tuple[int, ...]
    has_ended: bool


class Beam(NamedTuple):
    """Tokens generated so far and the sum of their log-probabilities."""

    tokens: tuple[int, ...]
    score: float


@dataclass(slots=True)
class BeamSearch:
    """One search. Begins with one empty beam, then has `width` of them.

    `early_stopping`: end as soon as `width` beams have finished. Otherwise when the best running
    one can hardly become better than the worst finished, judged by its length now.
    """

    width: int
    max_tokens: int
    end_token_ids: frozenset[int]
    length_penalty: float = 1.0
    early_stopping: bool = False
    beams: list[Beam] = field(default_factory=lambda: [Beam((), 0.0)])
    finished: list[Hypothesis] = field(default_factory=list)  # the best first

    @property
    def num_candidates(self) -> int:
        """How many of the likeliest next tokens of each beam a step needs."""
        return num_candidates(self.width, len(self.end_token_ids))

    def step(self, logprobs: Sequence[TokenLogprobs]) -> list[Continuation]:
        """Take the likeliest next tokens of each beam; the beams that go on, the best first.

        `logprobs[i]`: `num_candidates` of beam i, or as many as the vocabulary has. None go on when
        the search is over.
        """
        candidates = self._candidates(logprobs)
        num_tokens = len(self.beams[0].tokens) + 1
        is_last = num_tokens >= self.max_tokens
        going_on: list[Continuation] = []
        for rank, candidate in enumerate(candidates):
            if is_last or candidate.token_id in self.end_token_ids:
                if rank < self.width:
                    self._finish(candidate, num_tokens)
            elif len(going_on) < self.width:
                going_on.append(candidate)
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self.finished[self.width :]
        if not going_on or self._is_over(going_on[0].score, num_tokens):
            self.beams = []
            return []
        self.beams = [Beam((*self.beams[c.parent].tokens, c.token_id), c.score) for c in going_on]
        return going_on

    def _candidates(self, logprobs: Sequence[TokenLogprobs]) -> list[Continuation]:
        """Return the best continuations of all beams, the best first."""
        candidates = [
            Continuation(parent, token_id, _float32(beam.score + logprob))
            for parent, (beam, top) in enumerate(zip(self.beams, logprobs, strict=True))
            for token_id, logprob in zip(top.top_token_ids, top.top_logprobs, strict=True)
        ]
        candidates.sort(key=lambda c: (-c.score, c.parent, c.token_id))
        return candidates

    def _finish(self, candidate: Continuation, num_tokens: int) -> None:
        has_ended = candidate.token_id in self.end_token_ids
        tokens = self.beams[candidate.parent].tokens
        if not has_ended:
            tokens = (*tokens, candidate.token_id)
        score = self._score(candidate.score, num_tokens)
        self.finished.append(Hypothesis(score, tokens, has_ended))

    def _is_over(self, best_running: float, num_tokens: int) -> bool:
        if len(self.finished) < self.width:
            return False
        return self.early_stopping or (
            self._score(best_running, num_tokens) <= self.finished[-1].score
        )

    def _score(self, sum_of_logprobs: float, num_tokens: int) -> float:
        divisor = _float32(num_tokens**self.length_penalty)
        if divisor == 0.0:  # 33 000 tokens to the power of −10 are none
            return -math.inf
        return _float32(sum_of_logprobs / divisor)


def num_candidates(width: int, num_end_tokens: int) -> int:
    """Return how many of the likeliest next tokens of a beam a search of this width needs."""
    return width + num_end_tokens


def _float32(value: float) -> float:
    """Round to the nearest float32."""
    rounded: float = _FLOAT32.unpack(_FLOAT32.pack(value))[0]
    return rounded
