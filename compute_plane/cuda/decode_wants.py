"""What decode steps want of their logits, and what of it stays from step to step.

How the samples of a step are drawn is their slots' and stays as long as the same rows decode, and
so does the *plan* made of it: which samples are plain, which are adjusted first, who asks for
log-probabilities. Biases stay as well. A history grows by one token a step, which is the token that
the row computes, so it is on the device already. So a run of steps sends its *ragged* columns once,
with some room behind each history:

    history   │ sequence 0 … │ room │ sequence 3 … │ room │      then, in every step of the run,
                              ▲                     ▲             the row's token is put here

A run is known by its array of sampled rows, which its steps share and nobody can write
(`compute_plane.executor.decode_run`): each of its rows is then one token further, on the same slot.

Array letters: K samples, A of them adjusted, R rows of the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from compute_plane.cuda.block_pools import plan_copies
from compute_plane.cuda.operands import DrawNeeds
from compute_plane.cuda.sampling_columns import (
    NO_HISTORY,
    GroupPlan,
    SamplingPlan,
    bias_columns,
    check_history,
    check_ways,
    counts_of,
    fill_draws,
    needs_of,
)
from compute_plane.executor.sampling_rows import SamplingRows
from compute_plane.executor.step import SamplingKey

if TYPE_CHECKING:
    from compute_plane.cuda.block_pools import CopyPlan
    from compute_plane.executor.interface import ExecutionBatch, Penalties, SamplingRow

Array = npt.NDArray[Any]

ROOM: Final = 64
"""Tokens that a history may grow by until it is sent again."""
NOTHING: Final = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class DecodeWants:
    """What K samples want, by their keys, in the order of the plan.

    `group`: the only one of the plan. `is_in_order`: that is the order of the batch.
    `have_penalties`: which of the A adjusted have. `shape`: what tensors depend on, beside the
    graph.
    """

    keys: Sequence[SamplingKey]
    plan: SamplingPlan
    group: GroupPlan
    is_in_order: bool
    have_penalties: Array
    shape: tuple[int, int, DrawNeeds, DrawNeeds, bool]

    @classmethod
    def of(cls, keys: Sequence[SamplingKey], vocab_size: int) -> DecodeWants:
        """Plan samples with these keys. Raises ValidationError for a bad address."""
        check_ways(keys, vocab_size)
        is_adjusted = [key.logit_bias is not None or key.has_penalties for key in keys]
        num_plain = is_adjusted.count(False)
        order, ordered = np.arange(len(keys)), keys
        if num_plain < len(keys):
            order = np.argsort(np.array(is_adjusted), kind="stable")
            ordered = [keys[k] for k in order.tolist()]
        plain, adjusted = ordered[:num_plain], ordered[num_plain:]
        group = GroupPlan(
            out_tokens=slice(0, 0),
            samples=slice(0, len(keys)),
            num_plain=num_plain,
            adjusted=slice(0, len(adjusted)),
            prompts=slice(0, 0),
            has_logprobs=any(key.num_logprobs is not None for key in keys),
            masks=slice(0, 0),
            plain_needs=needs_of(plain),
            adjusted_needs=needs_of(adjusted),
        )
        return cls(
            ordered,
            SamplingPlan((group,), {}, order, NOTHING, order[num_plain:]),
            group,
            bool((order[1:] > order[:-1]).all()),
            np.array([key.has_penalties for key in adjusted], dtype=np.bool_),
            (len(keys), num_plain, group.plain_needs, group.adjusted_needs, group.has_logprobs),
        )

    @property
    def adjusted(self) -> Sequence[SamplingKey]:
        """The keys of the adjusted samples."""
        return self.keys[self.group.num_plain :]

    def fill(self, columns: Mapping[str, Array], sampled_rows: Array, ragged: Ragged) -> None:
        """Fill in the columns that stay, [R] each."""
        rows = sampled_rows[self.plan.sample_order]
        num_samples, num_plain = len(rows), self.group.num_plain
        columns["draw_rows"][:num_plain] = rows[:num_plain]
        columns["sample_rows"][:num_samples] = rows
        fill_draws(columns, self.keys)
        if self.group.has_logprobs:
            columns["sample_counts"][:num_samples] = counts_of(self.keys)
        num_adjusted = num_samples - num_plain
        if num_adjusted:
            ways, of = self.adjusted, slice(num_adjusted)
            columns["draw_rows"][num_plain:num_samples] = np.arange(num_adjusted)
            columns["adjust_rows"][of] = rows[num_plain:]
            columns["repetition_penalties"][of] = [way.repetition_penalty for way in ways]
            columns["presence_penalties"][of] = [way.presence_penalty for way in ways]
            columns["frequency_penalties"][of] = [way.frequency_penalty for way in ways]
            columns["history_starts"][of] = ragged.starts
            columns["num_prompts"][of] = ragged.num_prompts
            columns["bias_starts"][: num_adjusted + 1] = ragged.bias_starts


@dataclass(slots=True, eq=False)
class Ragged:
    """What is sent beside the columns: arrays of no fixed length, and how the step copies blocks.

    `wants`: of whom. `arrays`: none once they were sent. `starts`, `lengths`, `num_prompts` [A]: of
    the histories; `bias_starts` [A + 1]. `num_left`: steps of the run that find room behind the
    histories. `rows`: the array of sampled rows by which the run is known. `upload`: the upload
    that has brought it, by number.
    """

    wants: DecodeWants | None
    arrays: Mapping[str, Array]
    copies: CopyPlan
    starts: Array
    lengths: Array
    num_prompts: Array
    bias_starts: Array
    num_left: int
    rows: Array
    upload: int = -1

    @classmethod
    def of(cls, wants: DecodeWants, batch: ExecutionBatch, vocab_size: int) -> Ragged:
        """Gather what a step sends. Raises ValidationError for a bad address."""
        copies = plan_copies(batch.copies)
        biases = bias_columns([key.logit_bias for key in wants.adjusted])
        histories = list(_histories(wants, batch.sampling))
        lengths = np.array([len(tokens) for tokens, _ in histories], dtype=np.int64)
        ends = np.cumsum(lengths + ROOM * wants.have_penalties)
        starts = ends - lengths - ROOM * wants.have_penalties
        history = np.zeros(int(ends[-1]) if len(ends) else 0, dtype=np.int32)
        for first, (tokens, _) in zip(starts.tolist(), histories, strict=True):
            history[first : first + len(tokens)] = tokens
        check_history(history, vocab_size)
        return cls(
            wants,
            {
                "block_pairs": copies.pairs,
                "bias_tokens": biases["bias_tokens"],
                "bias_values": biases["bias_values"],
                "history": history,
            },
            copies,
            starts,
            lengths,
            np.array([num_prompt for _, num_prompt in histories], dtype=np.int32),
            biases["bias_starts"],
            ROOM,
            batch.sampled_rows,
        )

    def is_continued_by(self, wants: DecodeWants, batch: ExecutionBatch) -> bool:
        """Whether a step finds everything there, once `grow` was called.

        Biases stay for other rows too; histories for the next step of the run only.
        """
        if self.wants is not wants or batch.copies:
            return False
        return not wants.have_penalties.any() or (
            self.num_left > 0 and self.rows is batch.sampled_rows and not self.rows.flags.writeable
        )

    def grow(self) -> None:
        """Take in the token that each row of the run computes now."""
        if self.wants is not None:
            self.lengths += self.wants.have_penalties
        self.num_left -= 1


NOT_RAGGED: Final = Ragged(
    None, {}, plan_copies([]), NOTHING, NOTHING, NOTHING, NOTHING, 0, NOTHING
)


def keys_of(sampling: Sequence[SamplingRow]) -> Sequence[SamplingKey]:
    """Return the keys of samples: as slots have them, or made from rows."""
    if isinstance(sampling, SamplingRows):
        return sampling.keys.keys
    return tuple([_key(row) for row in sampling])


def _key(row: SamplingRow) -> SamplingKey:
    repetition, presence, frequency = row.penalties[:3] if row.penalties else (1.0, 0.0, 0.0)
    return SamplingKey(
        row.temperature,
        row.top_p,
        row.seed,
        row.sample_index,
        row.top_k,
        row.min_p,
        repetition,
        presence,
        frequency,
        row.logit_bias,
        row.num_logprobs,
    )


def _histories(wants: DecodeWants, sampling: Sequence[SamplingRow]) -> Iterator[tuple[Array, int]]:
    """Yield the history of each adjusted sample, and how many tokens of it are prompt."""
    for key, sample in zip(wants.adjusted, wants.plan.adjusted_order.tolist(), strict=True):
        penalties: Penalties | None = None
        if key.has_penalties:
            rows = sampling if isinstance(sampling, SamplingRows) else None
            penalties = rows.penalties(sample) if rows else sampling[sample].penalties
        yield (penalties.history, penalties.num_prompt) if penalties else (NO_HISTORY, 0)
