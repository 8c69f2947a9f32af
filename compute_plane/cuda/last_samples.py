"""Tokens that the step before samples, put among the inputs of a step on the device.

Where a batch names a sample instead of a token (`ExecutionBatch.input_sources`), the host has never
seen it: the token is copied from the results of the step launched before, behind it on the same
stream, into the inputs that have just arrived.

    results n     tokens      │ 17 │ 4 │ 9 │
                                │        └───────────┐
    inputs n+1    token_ids   │ 17 │ 23 │ 8 │ … │ 9 │     23, 8: known
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from planes.errors import ValidationError

if TYPE_CHECKING:
    from torch import Tensor

    from compute_plane.cuda.batch_layout import BatchLayout
    from compute_plane.cuda.drivers import Driver
    from compute_plane.cuda.sampling_columns import SamplingPlan
    from compute_plane.executor.interface import ExecutionBatch

Array = npt.NDArray[Any]

TOKEN_BYTES: Final = 4


class LastSamples:
    """The samples of the step launched last, where they are on the device.

    They stay there until those of the next step are kept.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._tokens: Tensor | None = None
        self._places: Array = np.zeros(0, dtype=np.int64)  # of sample k among the tokens
        self._is_in_order = True  # place k is that of sample k

    @property
    def num_samples(self) -> int:
        """Samples of the step launched last."""
        return len(self._places)

    @property
    def is_in_order(self) -> bool:
        """Whether they lie there in the order of the batch."""
        return self._is_in_order

    def places(self, samples: Array) -> Array:
        """Return where samples are among the tokens."""
        places: Array = self._places[samples]
        return places

    def columns(
        self, batch: ExecutionBatch, layout: BatchLayout, plan: SamplingPlan
    ) -> dict[str, Array]:
        """Return which tokens of a batch, and of its histories, are which of the samples.

        Int64 all: `awaited_tokens` of the step, as the device numbers them, and `awaited_samples`
        beside; `awaited_histories`, places in the histories, and `history_samples` beside. None of
        them where all tokens are known. Raises ValidationError.
        """
        sources = batch.input_sources
        if sources is None:
            return {}
        num_tokens = len(layout.tokens.token_ids)
        if sources.shape != (num_tokens,):
            raise ValidationError(
                f"needs {num_tokens} entries, got shape {sources.shape}", field="input_sources"
            )
        if sources.min() < -1 or sources.max() >= len(self._places):
            raise ValidationError(
                f"the step before has {len(self._places)} samples, got {sources.min()} to "
                f"{sources.max()}",
                field="input_sources",
            )
        awaited = np.flatnonzero(sources >= 0)
        columns: dict[str, Array] = {
            "awaited_tokens": layout.places(awaited),
            "awaited_samples": self._places[sources[awaited]],
        }
        if len(plan.adjusted_order):
            # A history ends with the last token of its row.
            last = layout.tokens.row_ends[batch.sampled_rows[plan.adjusted_order]] - 1
            lengths = plan.columns["history_lengths"]
            is_awaited = (sources[last] >= 0) & (lengths > 0)
            ends = plan.columns["history_starts"] + lengths
            columns["awaited_histories"] = ends[is_awaited] - 1
            columns["history_samples"] = self._places[sources[last[is_awaited]]]
        return columns

    def fill_in(self, inputs: dict[str, Tensor]) -> None:
        """Queue the copies of a step whose columns are on the device."""
        if "awaited_tokens" in inputs:
            self.put(inputs["token_ids"], inputs["awaited_tokens"], inputs["awaited_samples"])
        if "awaited_histories" in inputs:
            self.put(inputs["history"], inputs["awaited_histories"], inputs["history_samples"])

    def keep(self, tokens: Tensor, plan: SamplingPlan) -> None:
        """Take the samples of a step that was queued: `tokens` [K], in the plan's order."""
        self._tokens = tokens
        self._places = np.empty(len(plan.sample_order), dtype=np.int64)
        self._places[plan.sample_order] = np.arange(len(plan.sample_order))

        self._is_in_order = False

    def keep_in_order(self, tokens: Tensor) -> None:
        """Take the samples of a step that was queued, in the order of the batch."""
        self._tokens = tokens
        if not self._is_in_order or len(self._places) != len(tokens):
            self._places = np.arange(len(tokens))
        self._is_in_order = True

    def put_first(self, driver: Driver, target: Tensor, count: int) -> None:
        """Queue the copy of the first samples to the first places of `target`.

        A row without finite logits has "sampled" token 0 (`DeviceOperations.sample`).
        """
        if self._tokens is not None:
            driver.copy_part(target, 0, self._tokens, 0, TOKEN_BYTES * count)

    def put(self, target: Tensor, places: Tensor, samples: Tensor) -> None:
        """Queue the copy of some samples to some places of `target`."""
        if self._tokens is None or not len(places):
            return
        tokens = self._tokens.index_select(0, samples)
        # What a row without finite logits "sampled" means nothing, and must not become an address.
        target.index_copy_(0, places, tokens.clamp_(0, self._vocab_size - 1))
