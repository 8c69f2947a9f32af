"""Hidden states that leave the plane: which tokens' they are, how they are summed, what is wrong.

Executors give the hidden states of some tokens behind the final norm, or sums of them. A text may
be cut into rows in many ways and shall give the same sum: so before numbers are added they are
rounded to multiples of `GRAIN`, and float64 adds such without an error as long as the sum stays
below 2^25, in any order. A float32 of less than 1/16 loses bits by it, 2^-29 at most.

Array letters: E embeddings, T tokens, W tokens whose hidden states are wanted, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from compute_plane.executor.interface import (
    EmbeddingPart,
    ExecutionBatch,
    ExecutionOutput,
    Float32Array,
    Float64Array,
)
from compute_plane.executor.row_stage import LiveRows
from compute_plane.executor.step import RowEmbedding
from compute_plane.executor.token_layout import Int64Array, TokenLayout
from planes.errors import ExecutionError

GRAIN: Final = 2.0**-28
NOT_FINITE: Final = "the hidden states are not finite"


@dataclass(frozen=True, slots=True)
class EmbeddedTokens:
    """The tokens whose hidden states a step's embeddings are made of.

    `tokens` [W]: of the step, as sent, those of an embedding one after the other. `embeddings` [W]:
    which one each belongs to. `is_sum` [E]: whether its tokens are added up; the others have one.
    """

    tokens: Int64Array
    embeddings: Int64Array
    is_sum: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, batch: ExecutionBatch, layout: TokenLayout) -> EmbeddedTokens:
        """Return those of a batch."""
        is_sum = np.array(
            [want.part is EmbeddingPart.SUM for want in batch.embeddings], dtype=np.bool_
        )
        rows = np.array([want.row for want in batch.embeddings], dtype=np.int64)
        counts = np.where(is_sum, batch.query_lens[rows], 1).astype(np.int64)
        ends = layout.row_ends[rows]
        embeddings = np.repeat(np.arange(len(rows)), counts)
        offsets = np.arange(int(counts.sum())) - (np.cumsum(counts) - counts)[embeddings]
        return cls((ends - counts)[embeddings] + offsets, embeddings, is_sum)


class EmbeddingSums:
    """Collects the embeddings of one step, some tokens at a time."""

    def __init__(self, wanted: EmbeddedTokens, hidden_size: int) -> None:
        self._wanted = wanted
        self._grains: Float64Array = np.zeros((len(wanted.is_sum), hidden_size))
        self._lasts: Float64Array = np.zeros((len(wanted.is_sum), hidden_size))

    def add(self, first: int, hidden: Float32Array) -> None:
        """Take the hidden states of wanted tokens `first` and following, [n, H]."""
        of = self._wanted.embeddings[first : first + len(hidden)]
        is_sum = self._wanted.is_sum[of]
        self._lasts[of[~is_sum]] = hidden[~is_sum]
        grains = np.rint(hidden[is_sum].astype(np.float64) / GRAIN)
        of = of[is_sum]
        # Tokens of an embedding stand together: a sum for each run of them.
        starts = np.flatnonzero(np.diff(of, prepend=-1))
        if len(starts):
            self._grains[of[starts]] += np.add.reduceat(grains, starts, axis=0)

    def taken(self) -> Float64Array:
        """Return the embeddings [E, H]."""
        return np.where(self._wanted.is_sum[:, None], self._grains * GRAIN, self._lasts)


def check_embeddings(
    batch: ExecutionBatch, output: ExecutionOutput, embedding_size: int
) -> ExecutionOutput:
    """Return an executor's answer with the rows failed whose embeddings are no numbers.

    `embedding_size`: the model's H. Raises ExecutionError if the answer does not have the
    embeddings that the batch asks for.
    """
    if not batch.embeddings:
        return output
    shape = (len(batch.embeddings), embedding_size)
    values = output.embeddings
    if values is None or values.shape != shape:
        got = "none" if values is None else f"shape {values.shape}"
        raise ExecutionError(f"the executor must return embeddings of shape {shape}, got {got}")
    is_finite = np.isfinite(values).all(axis=1)
    if is_finite.all():
        return output
    failed = {
        batch.embeddings[index].row: NOT_FINITE for index in np.flatnonzero(~is_finite).tolist()
    }
    return replace(output, failed_rows={**failed, **output.failed_rows})


def row_embeddings(
    batch: ExecutionBatch, output: ExecutionOutput, rows: LiveRows
) -> list[RowEmbedding]:
    """Return the embeddings of rows that did not fail, under the numbers of the rows as sent."""
    if output.embeddings is None:
        return []
    return [
        RowEmbedding(int(rows.row_of[want.row]), np.asarray(values, dtype=np.float64))
        for want, values in zip(batch.embeddings, output.embeddings, strict=True)
        if want.row not in output.failed_rows
    ]
