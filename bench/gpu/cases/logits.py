"""Log-probabilities, and bias and penalties: the very bits of the specification. And caps."""

from __future__ import annotations

import numpy as np

from bench.gpu.case import Array, Case, Expected, Launch, poison
from kernels.cuda.adjust_logits import AdjustLogitsVariant
from kernels.cuda.cap_logits import LENGTH, CapLogitsVariant
from kernels.cuda.logprob_sums import TOTALS, LogprobSumsVariant
from kernels.cuda.logprobs import MAX_LOGPROBS, LogprobsVariant
from kernels.cuda.row_splits import num_splits
from kernels.reference.capped_logits import cap_logits
from kernels.reference.logit_adjustments import Adjustments, adjusted_logits
from kernels.reference.logprobs import log_softmax, most_likely

CAP, NEAREST = 30.0, 2e-6
"""Of logits; and the largest relative error of what is capped."""


def draw_cap_logits(variant: CapLogitsVariant, seed: int) -> list[Case]:
    """Blocks of threads and a bit, of all vectors' remainders; and a row shorter than a vector."""
    whole = LENGTH * variant.threads
    sizes = ((3, whole - 5), (2, whole // 2), (1, 3), (2, LENGTH + 1), (1, whole + 1))
    return [draw_cap_case(variant, *size, seed) for size in sizes]


def draw_cap_case(variant: CapLogitsVariant, num_rows: int, vocab: int, seed: int) -> Case:
    """Draw logits of all magnitudes, judged by their relative error.

    The first are zeros, what is not finite, the largest and smallest numbers, and those around
    where the kernel goes another way; the very last is not finite either.
    """
    rng = np.random.default_rng(seed)
    rows = 10.0 ** rng.uniform(-9, 3, (num_rows, vocab)) * rng.choice([-1, 1], (num_rows, vocab))
    special = [np.nan, 0.0, -0.0, np.inf, -np.inf, 3e38, -3e38, 1e-40, -1e-40]
    near = CAP * np.array([1.0, 1 - 1e-7, 1 + 1e-7, -1.0, 0.5, 5.0, 9.0, 20.0, 44.0, 50.0])
    first = np.concatenate([special, near])[: rows.size - 1]
    rows.flat[: len(first)] = first
    logits = rows.astype(np.float32)
    logits[-1, -1] = np.inf
    exact = logits.astype(np.float64)
    cap_logits(exact, CAP)
    units = np.where(np.isfinite(exact) & (exact != 0), np.abs(exact), 1.0)
    grid = variant.grid(logits.size)
    return Case(
        f"{variant.name} of {num_rows} · {vocab}",
        {"logits": logits},
        (Launch(variant, grid, ("logits", logits.size, CAP)),),
        {
            "logits": Expected(
                "float32", exact / units, NEAREST, lambda stored: stored.astype(np.float64) / units
            )
        },
    )


def draw_logprobs(variant: LogprobsVariant, seed: int) -> list[Case]:
    """Return a tiny vocabulary, where more are asked for than there are, and a large one."""
    return [
        draw_logprobs_case(variant, vocab, rounds=rounds, seed=seed)
        for vocab, rounds in ((7, 1), (5_000, 3), (50_000, 1))
    ]


def draw_logprob_sums(variant: LogprobSumsVariant, seed: int) -> list[Case]:
    """Return the same, which are of all launches together."""
    return draw_logprobs(LogprobsVariant(variant.threads), seed)


def draw_logprobs_case(
    variant: LogprobsVariant, vocab: int, *, rounds: int = 1, seed: int = 0
) -> Case:
    """Return rows with equals, a peak, NaN; of tokens likely and not; 0, 20 and no most likely.

    `rounds`: strips of a warp.
    """
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((4, vocab)).astype(np.float32) * 3
    rows[1] = np.round(rows[1])
    rows[2, vocab // 2] = 400.0
    rows[3, 0] = np.nan
    stride = vocab + 1
    logits = np.full((len(rows), stride), np.nan, np.float32)
    logits[:, :vocab] = rows
    asked = [(0, 0, 5), (1, vocab - 1, 20), (2, 3, 3), (3, 1, 2), (1, 2, -1), (0, vocab // 2, 0)]
    shape, top_shape = (len(asked),), (len(asked), MAX_LOGPROBS)
    of_tokens = poison("float32", shape)
    tokens, values = poison("int32", top_shape), poison("float32", top_shape)
    for k, (row, token, count) in enumerate(asked):
        if count >= 0:
            of_row = log_softmax(rows[row])
            of_tokens[k] = of_row[token]
            is_good = not np.isnan(of_row).any()
            best = most_likely(rows[row], count) if is_good else np.zeros(count, np.int64)
            tokens[k, : len(best)] = best
            values[k, : len(best)] = of_row[best]
    share = rounds * variant.threads // 32
    splits = num_splits(vocab, share)
    scratch = {
        "keys": poison("int64", (*shape, splits)),
        "totals": poison("int64", (*shape, TOTALS)),
        "listed": poison("int64", (*shape, vocab)),
    }
    rows_of = ("logits", "logits_rows")
    grid = variant.largest.split_grid(len(asked), splits)
    sizes = (stride, vocab, share)
    return Case(
        f"{variant.name}_v{vocab}_r{rounds}",
        {
            "token_logprobs": poison("float32", shape),
            "top_tokens": poison("int32", top_shape),
            "top_logprobs": poison("float32", top_shape),
            **scratch,
            "logits": logits,
            "logits_rows": np.array([row for row, _, _ in asked], np.int32),
            "tokens": np.array([token for _, token, _ in asked], np.int32),
            "num_logprobs": np.array([count for _, _, count in asked], np.int32),
        },
        (
            Launch(variant.largest, grid, ("keys", "totals", *rows_of, *sizes, TOTALS)),
            Launch(
                variant.sums,
                grid,
                ("totals", "listed", "keys", *rows_of, "num_logprobs", *sizes),
            ),
            Launch(
                variant,
                variant.grid(len(asked)),
                (
                    "token_logprobs", "top_tokens", "top_logprobs", "keys", "totals",
                    "listed", *rows_of, "tokens", "num_logprobs", stride, vocab, splits,
                ),
            ),
        ),
        {
            "token_logprobs": Expected("float32", of_tokens, 0.0),
            "top_tokens": Expected("int32", tokens, 0.0),
            "top_logprobs": Expected("float32", values, 0.0),
        },
        scratch=tuple(scratch),
    )  # fmt: skip


def draw_adjust_logits(variant: AdjustLogitsVariant, seed: int) -> list[Case]:
    """Return one case of a vocabulary larger than a block of threads."""
    return [draw_adjust_case(variant, 3 * variant.threads + 5, seed=seed)]


def draw_adjust_case(variant: AdjustLogitsVariant, vocab: int, *, seed: int = 0) -> Case:
    """Return samples with biases (the largest too), penalties, both, neither, and a bad row."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((3, vocab)).astype(np.float32) * 10
    rows[2, 4] = np.inf
    largest = float(np.finfo(np.float32).max)
    history = rng.integers(0, vocab, 90).astype(np.int32)
    history[20:60:3] = history[20]  # counted often
    history[0] = 4  # the one that is not finite
    settings = [
        (0, Adjustments()),
        (0, _biased([3, 0, vocab - 1], [largest, -largest, 2.5])),
        (1, Adjustments(repetition_penalty=1.3, history=history, num_prompt=30)),
        (1, Adjustments(
            np.array([int(history[20])], np.int32), np.array([7.25], np.float32),
            0.7, -1.5, 0.3, history[10:70], 5,
        )),
        (0, Adjustments(frequency_penalty=2.0, presence_penalty=0.1, history=history)),
        (2, Adjustments(repetition_penalty=2.0, history=history, num_prompt=90)),
    ]  # fmt: skip
    expected = np.stack([_adjusted(rows[row], adjustments) for row, adjustments in settings])
    all_adjustments = [adjustments for _, adjustments in settings]
    bias_counts = [len(a.bias_tokens) for a in all_adjustments]
    lengths = np.array([len(a.history) for a in all_adjustments], np.int32)
    gap = 3  # between the histories, which lie in slots of their own
    starts = np.concatenate([[0], np.cumsum(lengths + gap)[:-1]]).astype(np.int64)
    flat = np.full(int((lengths + gap).sum()), 2**30, np.int32)
    for start, adjustments in zip(starts, all_adjustments, strict=True):
        flat[start : start + len(adjustments.history)] = adjustments.history
    arrays: dict[str, Array] = {
        "adjusted": rows[[row for row, _ in settings]],
        "counts": np.zeros(expected.shape, np.int64),
        "bias_starts": np.concatenate([[0], np.cumsum(bias_counts)]).astype(np.int32),
        "bias_tokens": np.concatenate([a.bias_tokens for a in all_adjustments]),
        "bias_values": np.concatenate([a.bias_values for a in all_adjustments]),
        "repetition_penalties": _column([a.repetition_penalty for a in all_adjustments]),
        "presence_penalties": _column([a.presence_penalty for a in all_adjustments]),
        "frequency_penalties": _column([a.frequency_penalty for a in all_adjustments]),
        "history_starts": starts,
        "history_lengths": lengths,
        "num_prompts": np.array([a.num_prompt for a in all_adjustments], np.int32),
        "history": flat,
    }
    return Case(
        variant.name,
        arrays,
        (Launch(variant, variant.grid(len(settings)), (*arrays, vocab)),),
        {"adjusted": Expected("float32", expected, 0.0)},
        scratch=("counts",),
    )


def _biased(tokens: list[int], values: list[float]) -> Adjustments:
    return Adjustments(np.array(tokens, np.int32), np.array(values, np.float32))


def _column(values: list[float]) -> Array:
    return np.array(values, np.float32)


def _adjusted(row: Array, adjustments: Adjustments) -> Array:
    """Return the specification's logits; what is not finite stays, for the sampler to report."""
    logits: Array = adjusted_logits(row, adjustments)
    return np.where(np.isfinite(row), logits, row)
