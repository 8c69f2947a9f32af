"""How long a step may take before something is wrong: from its cost and from steps before it.

A step's time is a constant, plus so much a token, plus so much for each pair of a token and a token
it looks at. None of the three is known, but they need not be: a step with at most k times the
tokens and k times the pairs of another one takes at most k times its time (k ≥ 1). So every step
seen bounds every step to come, and the least of these bounds is the estimate. What was seen is kept
by magnitude of tokens and pairs, so that a few entries stand for all steps.

Pure: no clock. Seconds everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.core.batch import StepBatch

GENEROSITY = 10.0
"""Times the estimate: neighbours may take the cores away, and a step computed anew costs more than
one that is waited for."""

LEAST_PATIENCE_S = 4.0
"""However small the step: a machine that swaps or is paused for a moment is no fault."""

FRESH_PATIENCE_S = 30.0
FRESH_PATIENCE_PER_TOKEN_S = 0.05
"""For the first steps of a plane, which may compile: the first of these, plus the second for each
token. 20 tokens a second is slower than any device worth serving from."""

NUM_FRESH_STEPS = 8

MAX_STRETCH = 4.0
"""A step more than so many times as large as any seen may be compiled for too."""

MAX_KINDS = 16

SMOOTHING = 0.25
OUTLIER = 4.0
"""A new time moves the mean of its kind by a quarter, and counts as at most four times the mean."""

MAX_DOUBLINGS = 4
"""Every step overdue in a row doubles patience: if it is too short, it does not stay so."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a step asks of the plane.

    `num_tokens`: that it computes. `num_pairs`: of such a token and one in its context.
    """

    num_tokens: int
    num_pairs: int

    @classmethod
    def of(cls, batch: StepBatch) -> StepCost:
        """Add a batch up."""
        num_tokens = batch.num_tokens
        if num_tokens == batch.num_rows:  # decode rows only, as most steps
            return cls(num_tokens, num_tokens + sum(batch.positions))
        lengths = zip(batch.query_lens, batch.positions, strict=True)
        return cls(num_tokens, sum(length * (position + length) for length, position in lengths))

    @property
    def kind(self) -> tuple[int, int]:
        """The magnitudes."""
        return self.num_tokens.bit_length(), self.num_pairs.bit_length()


@dataclass(slots=True)
class _Kind:
    """Steps of like cost: running means of cost and time."""

    num_tokens: float
    num_pairs: float
    took_s: float

    def stretch(self, cost: StepCost) -> float:
        """How many times this kind a step is, at most."""
        return max(
            1.0,
            cost.num_tokens / max(self.num_tokens, 1.0),
            cost.num_pairs / max(self.num_pairs, 1.0),
        )


class StepDeadlines:
    """Learns from each step and says how long the next ones may take."""

    __slots__ = ("_kinds", "_num_overdue", "_num_seen")

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, int], _Kind] = {}
        self._num_seen = 0
        self._num_overdue = 0

    def forget(self) -> None:
        """Begin again: the plane may be another process, with everything to compile."""
        self._kinds.clear()
        self._num_seen = 0

    def note(self, cost: StepCost, took_s: float) -> None:
        """Learn from a step that has ended."""
        self._num_seen += 1
        self._num_overdue = 0
        kind = self._kinds.pop(cost.kind, None)
        if kind is None:
            kind = _Kind(cost.num_tokens, cost.num_pairs, took_s)
            if len(self._kinds) >= MAX_KINDS:
                del self._kinds[next(iter(self._kinds))]  # the one not seen for longest
        else:
            kind.num_tokens += SMOOTHING * (cost.num_tokens - kind.num_tokens)
            kind.num_pairs += SMOOTHING * (cost.num_pairs - kind.num_pairs)
            kind.took_s += SMOOTHING * (min(took_s, OUTLIER * kind.took_s) - kind.took_s)
        self._kinds[cost.kind] = kind

    def note_overdue(self) -> None:
        """Learn that a step did not end in time."""
        self._num_overdue = min(self._num_overdue + 1, MAX_DOUBLINGS)

    def patience_s(self, cost: StepCost) -> float:
        """Return how long a step may take, from when the plane could begin with it."""
        estimate_s = self._estimate_s(cost)
        fresh_s = FRESH_PATIENCE_S + FRESH_PATIENCE_PER_TOKEN_S * cost.num_tokens
        is_fresh = estimate_s is None or self._num_seen < NUM_FRESH_STEPS
        least_s = fresh_s if is_fresh else LEAST_PATIENCE_S
        return max(least_s, GENEROSITY * (estimate_s or 0.0)) * 2.0**self._num_overdue

    def _estimate_s(self, cost: StepCost) -> float | None:
        """Return the least bound that any kind of step gives; None if all are much smaller."""
        bounds = [
            kind.took_s * stretch
            for kind in self._kinds.values()
            if (stretch := kind.stretch(cost)) <= MAX_STRETCH
        ]
        return min(bounds, default=None)
