"""The embedding of a prompt, as the steps that compute the prompt bring it."""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field
from typing import Final

from control_plane.core.generation_params import GenerationParams
from planes.errors import SchedulerError

EMBEDDINGS: Final = "embeddings"
"""The feature of planes that give hidden states, and what schedulers keep to, beside parameters,
that end requests with their prompts."""

NOTHING_GENERATED: Final = GenerationParams(max_tokens=0, temperature=0.0, seed=0)
"""The parameters of a request that ends with its prompt."""


class Pooling(enum.Enum):
    """What the embedding of a text is made of: hidden states behind the final norm."""

    LAST = "last"
    """Those of its last token."""
    MEAN = "mean"
    """The mean of those of all its tokens."""


AUTO: Final = "auto"
POOLINGS: Final = (AUTO, *(pooling.value for pooling in Pooling))
"""What an operator may say of a model."""


@dataclass(slots=True)
class Embedding:
    """The hidden states that a request asks for, float64, as far as they are known.

    `values`: those of the last token, or the sum of those of the first `num_tokens` tokens of the
    prompt, which are computed; [hidden size], empty before any is.
    """

    pooling: Pooling
    values: array[float] = field(default_factory=lambda: array("d"))
    num_tokens: int = 0

    @property
    def is_sum(self) -> bool:
        """Whether rows are to give the sum over their tokens."""
        return self.pooling is Pooling.MEAN

    def take(self, first: int, num_tokens: int, values: array[float]) -> None:
        """Take what a row of the tokens from `first` on has given.

        A prompt that is computed anew begins anew. Raises SchedulerError for a gap in a sum.
        """
        if not self.is_sum or first == 0:
            self.values = values
        elif first == self.num_tokens:
            # Sums of rounded numbers are exact: the same however the prompt was cut.
            self.values = array("d", map(float.__add__, self.values, values))
        else:
            raise SchedulerError(
                f"the sum of a prompt's hidden states has {self.num_tokens} tokens, the next row "
                f"begins with token {first}"
            )
        self.num_tokens = first + num_tokens

    @property
    def pooled(self) -> array[float]:
        """The embedding, once all tokens are computed: not normalised."""
        if not self.is_sum:
            return self.values
        return array("d", [value / self.num_tokens for value in self.values])
