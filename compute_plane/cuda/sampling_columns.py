"""What a step wants of its logits, as columns for the device, in groups that fit the logits.

The *wants* of a step are its samples, in order, then every target of the prompt log-probabilities.
Wants are dealt to groups of logits rows (`compute_plane.executor.logits_groups`); in a group come
plain samples, then samples whose logits are adjusted first, then prompt targets. Columns and
results lie in this order; `sample_order` and `prompt_order` lead back:

    group 0   │ plain samples │ adjusted samples │    samples   │ group 0 │ group 1 │ …
              │ prompt targets │                      prompts   │ group 0 │ group 1 │ …

Array letters: K samples, P prompt targets, A adjusted samples, O logits rows of all groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from compute_plane.cuda.masks import mask_columns
from compute_plane.cuda.operands import MAX_LOGPROBS, DrawNeeds
from compute_plane.executor.interface import (
    ExecutionBatch,
    Int32Array,
    LogitBias,
    Penalties,
    SamplingRow,
)
from compute_plane.executor.logits_groups import group_logits
from kernels.reference.sampling import inverse
from planes.errors import ValidationError

if TYPE_CHECKING:
    from compute_plane.executor.step import SamplingKey

Array = npt.NDArray[Any]
Int64Array = npt.NDArray[np.int64]

LOGITS_ROWS: Final = 256
"""Rows of logits that exist at once; with a vocabulary of 128 000 they take 125 MiB."""
NO_HISTORY: Final = np.zeros(0, dtype=np.int32)
NO_PENALTIES: Final = Penalties(1.0, 0.0, 0.0, NO_HISTORY, 0)
NO_LOGPROBS: Final = -1
DRAW_TYPES: Final = {
    "inverse_temperatures": np.float64,
    "top_ks": np.int32,
    "top_ps": np.float64,
    "min_ps": np.float64,
    "seeds": np.int64,
    "sample_indexes": np.int32,
}
"""Columns that say how samples are drawn, but for their positions."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One group: its shares of the columns.

    `out_tokens`: of the column of tokens whose logits these are. `samples`: of the samples, the
    first `num_plain` of them plain; `adjusted`: of the columns of adjustments. `prompts`: of the
    prompt targets. `plain_needs`, `adjusted_needs`: of those samples. `masks`: of the columns of
    masks, where adjusted samples have any.
    """

    out_tokens: slice
    samples: slice
    num_plain: int
    adjusted: slice
    prompts: slice
    has_logprobs: bool
    plain_needs: DrawNeeds
    adjusted_needs: DrawNeeds
    masks: slice


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """Everything that a step wants of its logits.

    `columns`: name → array. `sample_order` [K], `prompt_order` [P]: which sample, and which target
    of all rows' targets, stands at each place. `adjusted_order` [A]: which sample each adjustment
    belongs to.
    """

    groups: tuple[GroupPlan, ...]
    columns: dict[str, Array]
    sample_order: Int64Array
    prompt_order: Int64Array
    adjusted_order: Int64Array


def plan_sampling(batch: ExecutionBatch, wanted: Int64Array, vocab_size: int) -> SamplingPlan:
    """Return the columns of a step's wants.

    `wanted`: for each want the token of the step, as the device numbers them, behind which logits
    are wanted. Raises ValidationError for what would become a bad address.
    """
    num_samples = len(batch.sampling)
    check_tokens(batch.sampling, vocab_size)
    counts = _prompt_counts(batch)
    is_adjusted = np.array(
        [not row._replace(num_logprobs=None).is_plain for row in batch.sampling],
        dtype=np.bool_,
    )
    asks = np.array([row.num_logprobs is not None for row in batch.sampling], dtype=np.bool_)
    groups: list[GroupPlan] = []
    out_tokens: list[Int64Array] = []
    samples: list[Int64Array] = []
    prompts: list[Int64Array] = []
    mask_places: list[int] = []
    logits_rows = np.zeros(len(wanted), dtype=np.int32)
    num_out = num_adjusted = sample_end = prompt_end = 0
    for found in group_logits(wanted, LOGITS_ROWS, LOGITS_ROWS):
        tokens, members, rows = found.out_tokens, found.wanted, found.rows
        logits_rows[members] = rows
        of_samples = members[members < num_samples]
        of_samples = of_samples[np.argsort(is_adjusted[of_samples], kind="stable")]
        of_prompts = members[members >= num_samples]
        here = int(np.count_nonzero(is_adjusted[of_samples]))
        num_plain = len(of_samples) - here
        masked = [
            place
            for place, k in enumerate(of_samples[num_plain:].tolist())
            if batch.sampling[k].allowed_tokens is not None
        ]
        mask_places += masked
        groups.append(
            GroupPlan(
                out_tokens=slice(num_out, num_out + len(tokens)),
                samples=slice(sample_end, sample_end + len(of_samples)),
                num_plain=num_plain,
                adjusted=slice(num_adjusted, num_adjusted + here),
                prompts=slice(prompt_end, prompt_end + len(of_prompts)),
                has_logprobs=bool(asks[of_samples].any()),
                plain_needs=needs_of([batch.sampling[k] for k in of_samples[:num_plain]]),
                adjusted_needs=needs_of([batch.sampling[k] for k in of_samples[num_plain:]]),
                masks=slice(len(mask_places) - len(masked), len(mask_places)),
            )
        )
        out_tokens.append(tokens)
        samples.append(of_samples)
        prompts.append(of_prompts)
        num_out += len(tokens)
        num_adjusted += here
        sample_end += len(of_samples)
        prompt_end += len(of_prompts)
    sample_order, prompt_order = _joined(samples), _joined(prompts) - num_samples
    ordered = [batch.sampling[k] for k in sample_order.tolist()]
    adjusted_order = sample_order[is_adjusted[sample_order]]
    columns = {
        "out_tokens": _joined(out_tokens),
        **_draw_columns(ordered, logits_rows[sample_order]),
        "prompt_rows": logits_rows[prompt_order + num_samples],
    }
    if len(prompt_order):
        targets = np.concatenate(batch.prompt_logprob_targets)
        columns["prompt_targets"] = targets[prompt_order].astype(np.int32)
        columns["prompt_counts"] = counts[prompt_order]
    if num_adjusted:
        adjusted = [batch.sampling[k] for k in adjusted_order.tolist()]
        columns |= _adjust_columns(adjusted, logits_rows[adjusted_order])
        columns |= mask_columns(adjusted, mask_places, vocab_size)
        # Adjusted logits are rows of an array of their own, in each group from 0 on.
        for group in groups:
            places = slice(group.samples.start + group.num_plain, group.samples.stop)
            columns["draw_rows"][places] = np.arange(places.stop - places.start)
    return SamplingPlan(tuple(groups), columns, sample_order, prompt_order, adjusted_order)


def needs_of(rows: Sequence[SamplingRow | SamplingKey]) -> DrawNeeds:
    """Return what samples need."""
    drawn = [row for row in rows if row.temperature]
    return DrawNeeds(bool(drawn), any(row.top_k or row.top_p < 1.0 for row in drawn))


def check_tokens(sampling: Sequence[SamplingRow], vocab_size: int) -> None:
    """Raise ValidationError for biases, histories and counts that kernels must not see."""
    for row in sampling:
        if row.is_plain:
            continue
        check_ways((row,), vocab_size)
        if row.penalties is not None:
            check_history(row.penalties.history, vocab_size)


def check_ways(ways: Iterable[SamplingRow | SamplingKey], vocab_size: int) -> None:
    """Raise ValidationError for biases and counts, as above."""
    for way in ways:
        if way.logit_bias is not None:
            _check_ids("sampling.logit_bias.token_ids", way.logit_bias.token_ids, vocab_size)
        if way.num_logprobs is not None:
            _check_count("sampling.num_logprobs", way.num_logprobs)


def check_history(tokens: Int32Array, vocab_size: int) -> None:
    """Raise ValidationError for a history, as above."""
    _check_ids("sampling.penalties.history", tokens, vocab_size)


def _check_ids(field: str, tokens: Int32Array, vocab_size: int) -> None:
    if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise ValidationError(f"must be in 0 to {vocab_size - 1}", field=field)


def _check_count(field: str, count: int) -> None:
    if not 0 <= count <= MAX_LOGPROBS:
        raise ValidationError(f"must be in 0 to {MAX_LOGPROBS}, got {count}", field=field)


def _prompt_counts(batch: ExecutionBatch) -> Int32Array:
    """Return the most likely tokens wanted beside each prompt target, int32 [P]."""
    lengths = [len(targets) for targets in batch.prompt_logprob_targets]
    counts = batch.prompt_num_logprobs or [0] * len(lengths)
    for count in counts:
        _check_count("prompt_num_logprobs", count)
    return np.repeat(np.asarray(counts, dtype=np.int32), lengths)


def _joined(parts: list[Int64Array]) -> Int64Array:
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


def _draw_columns(rows: list[SamplingRow], logits_rows: Array) -> dict[str, Array]:
    """Return the columns of `SamplingColumns`, and whose log-probabilities are wanted."""
    columns = {name: np.empty(len(rows), dtype=dtype) for name, dtype in DRAW_TYPES.items()}
    fill_draws(columns, rows)
    return {
        **columns,
        "draw_rows": logits_rows.astype(np.int32),
        "sample_positions": np.array([row.position for row in rows], dtype=np.int64),
        "sample_rows": logits_rows.astype(np.int32),
        "sample_counts": np.array(counts_of(rows), dtype=np.int32),
    }


def fill_draws(columns: Mapping[str, Array], ways: Sequence[SamplingRow | SamplingKey]) -> None:
    """Fill in, at the first places of the columns `DRAW_TYPES`, how samples are drawn."""
    every = slice(len(ways))
    temperatures = [way.temperature for way in ways]
    inverses = {one: inverse(one) if one else 0.0 for one in set(temperatures)}  # mostly a few
    columns["inverse_temperatures"][every] = [inverses[one] for one in temperatures]
    columns["top_ks"][every] = [way.top_k for way in ways]
    columns["top_ps"][every] = [way.top_p for way in ways]
    columns["min_ps"][every] = [way.min_p for way in ways]
    columns["sample_indexes"][every] = [way.sample_index for way in ways]
    columns["seeds"][every] = np.array([way.seed for way in ways], np.uint64).view(np.int64)


def counts_of(ways: Sequence[SamplingRow | SamplingKey]) -> list[int]:
    """Return how many most likely tokens samples ask for; NO_LOGPROBS: no log-probability."""
    return [NO_LOGPROBS if way.num_logprobs is None else way.num_logprobs for way in ways]


def bias_columns(biases: Sequence[LogitBias | None]) -> dict[str, Array]:
    """Return the biases of samples one behind the other, and where each one's begin, [A + 1]."""
    given = [bias for bias in biases if bias is not None]
    lengths = [0 if bias is None else len(bias.token_ids) for bias in biases]
    tokens = [bias.token_ids for bias in given]
    return {
        "bias_starts": np.cumsum([0, *lengths]).astype(np.int32),
        "bias_tokens": np.concatenate([NO_HISTORY, *tokens]).astype(np.int32),
        "bias_values": np.concatenate(
            [np.zeros(0, np.float32), *[bias.values for bias in given]]
        ).astype(np.float32),
    }


def _adjust_columns(rows: list[SamplingRow], logits_rows: Array) -> dict[str, Array]:
    """Return the columns of `AdjustColumns`; at least one row."""
    penalties = [row.penalties or NO_PENALTIES for row in rows]
    lengths = np.array([len(p.history) for p in penalties], dtype=np.int32)
    return {
        "adjust_rows": logits_rows.astype(np.int32),
        **bias_columns([row.logit_bias for row in rows]),
        "repetition_penalties": np.array([p.repetition for p in penalties], dtype=np.float32),
        "presence_penalties": np.array([p.presence for p in penalties], dtype=np.float32),
        "frequency_penalties": np.array([p.frequency for p in penalties], dtype=np.float32),
        "history_starts": (np.cumsum(lengths) - lengths).astype(np.int64),
        "history_lengths": lengths,
        "num_prompts": np.array([p.num_prompt for p in penalties], dtype=np.int32),
        "history": np.concatenate([p.history for p in penalties]).astype(np.int32),
    }
