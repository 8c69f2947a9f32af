"""How often guesses of a draft model turn out right, by how likely they were to it.

A model that is sure of a token is right more often, how much more differs from pair to pair of
models, and greedy texts keep tokens that sampled ones do not. So what became of earlier guesses is
counted; until there are some, a token is taken to be right as often as it is likely.
"""

from __future__ import annotations

from typing import Final

import numpy as np

NUM_CLASSES: Final = 10
"""Of likelihood, equally wide."""
PRIOR: Final = 8.0
"""So many guesses of a class, right as often as they are likely, are counted before the first."""
REFUSALS: Final = 64.0
"""Guesses of a class that are not made after which two thirds of what was counted is forgotten."""
MEMORY: Final = 256.0
"""Guesses of a class after which the earlier ones count half: texts change."""


class DraftOdds:
    """Counts guesses; of greedy texts and of sampled ones apart."""

    def __init__(self) -> None:
        likely = (np.arange(NUM_CLASSES) + 0.5) / NUM_CLASSES
        self._prior_right = np.stack([likely, likely]) * PRIOR
        self._num_made = np.full((2, NUM_CLASSES), PRIOR)
        self._num_right = self._prior_right.copy()

    def of(self, likelihood: float, *, is_greedy: bool) -> float:
        """Return the chance that a guess is right, all before it being right."""
        place = int(is_greedy), _class_of(likelihood)
        return float(self._num_right[place] / self._num_made[place])

    def note(self, likelihood: float, *, is_greedy: bool, is_right: bool) -> None:
        """Count what became of a guess behind such as were right."""
        place = int(is_greedy), _class_of(likelihood)
        self._num_made[place] += 1.0
        self._num_right[place] += float(is_right)
        if self._num_made[place] >= MEMORY:
            self._num_made[place] /= 2.0
            self._num_right[place] /= 2.0

    def forget_some(self, likelihood: float, *, is_greedy: bool) -> None:
        """Forget a little of what became of such guesses, as one was not made.

        A class of which none is made has nothing counted: it would never be tried again.
        """
        place = int(is_greedy), _class_of(likelihood)
        self._num_made[place] += (PRIOR - self._num_made[place]) / REFUSALS
        self._num_right[place] += (self._prior_right[place] - self._num_right[place]) / REFUSALS


def _class_of(likelihood: float) -> int:
    return min(int(likelihood * NUM_CLASSES), NUM_CLASSES - 1)
