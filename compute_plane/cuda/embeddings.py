"""Hidden states that are wanted of a step: normalised and summed on the device.

In float32, whatever the model's dtype is, so that embeddings are rounded no more than once; sums in
float64, as `compute_plane.executor.embeddings` says.

Array letters: E embeddings, W tokens whose hidden states are wanted, H hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch

from compute_plane.executor.embeddings import GRAIN, EmbeddedTokens

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from compute_plane.cuda.batch_layout import BatchLayout
    from compute_plane.cuda.layer_products import Hidden
    from compute_plane.cuda.model import DecoderModel
    from compute_plane.executor.interface import ExecutionBatch

ROWS_AT_ONCE: Final = 256
"""Of hidden states in float32: what they take is less than the logits of as many rows."""
RESULT: Final = "embeddings"
TOKENS: Final = "embedded_tokens"
OWNERS: Final = "embedding_of_token"
GRAINS: Final = "embedding_grain"


def embedding_columns(batch: ExecutionBatch, layout: BatchLayout) -> dict[str, npt.NDArray[Any]]:
    """Return the columns of a step's embeddings; none if it has none.

    `embedded_tokens`: int64 [W], as the device numbers tokens; `embedding_of_token`: int64 [W];
    `embedding_grain`: float64 [W], to multiples of which a token's numbers are rounded, 0: to none.
    """
    if not batch.embeddings:
        return {}
    wanted = EmbeddedTokens.of(batch, layout.tokens)
    return {
        TOKENS: layout.places(wanted.tokens).astype(np.int64),
        OWNERS: wanted.embeddings.astype(np.int64),
        GRAINS: np.where(wanted.is_sum[wanted.embeddings], GRAIN, 0.0),
    }


def largest_embedding_columns(max_tokens: int) -> dict[str, npt.NDArray[Any]]:
    """Return the columns of as many hidden states as there are at once, all of one sum."""
    num_tokens = min(max_tokens, ROWS_AT_ONCE)
    return {
        TOKENS: np.arange(num_tokens),
        OWNERS: np.zeros(num_tokens, dtype=np.int64),
        GRAINS: np.full(num_tokens, GRAIN),
    }


def run_embeddings(
    model: DecoderModel, hidden: Hidden, inputs: Mapping[str, Tensor], results: Mapping[str, Tensor]
) -> None:
    """Queue the embeddings [E, H] of a step, if it has any. `hidden`: behind all layers."""
    if RESULT not in results:
        return
    out = results[RESULT]
    out.zero_()
    tokens, owners, grains = inputs[TOKENS], inputs[OWNERS], inputs[GRAINS]
    for first in range(0, len(tokens), ROWS_AT_ONCE):
        which = slice(first, first + ROWS_AT_ONCE)
        states = model.embedded(hidden.rows(tokens[which])).double()
        grain = grains[which, None]
        # Rounded numbers add up to the same sum in any order, so that it need not be said here.
        rounded = torch.where(grain > 0, torch.round(states / grain) * grain, states)
        out.index_add_(0, owners[which], rounded)
