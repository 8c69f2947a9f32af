"""Samples of all kinds from one batch of logits: each must be the very token of the specification.

A case has all four launches, whichever of them it is drawn for. Rows with equal logits, so that ids
decide; with one or two tokens that can be drawn at all; with infinities and NaN; near-uniform and
peaked; samples that share a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from bench.gpu.case import Array, Case, Expected, Launch, poison
from kernels.cuda.row_splits import SplitVariant, num_splits, num_strips
from kernels.cuda.sampling import SamplingVariant
from kernels.cuda.weight_search import ROW_BINS
from kernels.reference.sampling import Choice, choose, inverse

# temperature, top-p, top-k, min-p of the samples, in turn.
SETTINGS = (
    (0.0, 1.0, 0, 0.0),
    (1.0, 1.0, 0, 0.0),
    (0.7, 0.9, 0, 0.0),
    (1.0, 1.0, 5, 0.0),
    (1.3, 0.8, 40, 0.0),
    (1.0, 1.0, 0, 0.05),
    (0.9, 0.95, 20, 0.02),
    (2.0, 0.01, 0, 0.0),
    (1e-310, 1.0, 0, 0.0),
    (5.0, 1.0, 1, 1.0),
    (1.0, 0.5, 10**9, 0.0),
    (3.0, 0.999, 7, 0.0),
    (4.0, 0.999, 0, 0.5),
)


NUM_ROWS = 8
EVERYTHING = tuple((setting, row) for setting in range(len(SETTINGS)) for row in range(NUM_ROWS))


def draw_cases(variant: SamplingVariant, seed: int) -> list[Case]:
    """Return every setting on every row, and some on rows of a large vocabulary in many splits."""
    return [
        *_small_cases(variant, seed),
        draw_case(variant, 50_000, EVERYTHING[seed % 3 :: 3], seed=seed),
    ]


def draw_cases_of_a_launch(variant: SplitVariant, seed: int) -> list[Case]:
    """Return cases of one of the launches before the last."""
    return _small_cases(SamplingVariant(variant.threads), seed)


def _small_cases(variant: SamplingVariant, seed: int) -> list[Case]:
    return [
        draw_case(variant, vocab, EVERYTHING, rounds=rounds, seed=seed)
        for vocab, rounds in ((45, 1), (384, 1), (5_000, 3))
    ]


def draw_case(
    variant: SamplingVariant,
    vocab: int,
    pairs: Sequence[tuple[int, int]],
    *,
    rounds: int = 1,
    seed: int = 0,
) -> Case:
    """Return samples of (setting, row) pairs; the last one alone, in other splits, is the part.

    `rounds`: strips of a warp.
    """
    rng = np.random.default_rng(seed)
    rows = _draw_logits(rng, vocab)
    samples = []
    for setting, row in pairs:
        temperature, top_p, top_k, min_p = SETTINGS[setting]
        seed_of_sample, sample_index = int(rng.integers(2**64, dtype=np.uint64)), rng.integers(4)
        position = int(rng.integers(2**33))
        choice = Choice(
            temperature, top_p, seed_of_sample, int(sample_index), position, top_k, min_p
        )
        samples.append((row, choice))
    whole = _make_case(variant, rows, samples, rounds)

    def last_sample(outputs: Mapping[str, Array]) -> dict[str, Array]:
        return {name: outputs[name][-1:] for name in whole.expected}

    part = _make_case(variant, rows, samples[-1:], rounds + 1)
    return dataclasses.replace(whole, part=(part, last_sample))


def _draw_logits(rng: np.random.Generator, vocab: int) -> Array:
    rows = rng.standard_normal((NUM_ROWS, vocab)) * np.array([1, 6, 1, 1, 1, 0.01, 1, 30])[:, None]
    rows[2] = np.round(rows[2])  # many equals
    rows[3] = -0.0
    rows[3, ::3] = 0.0  # all are equal
    rows[4, vocab // 2] = np.nan
    rows[5, -1] = np.inf
    rows[6] = -200.0
    rows[6, [min(1, vocab - 1), vocab - 1]] = 5.0  # only two can be drawn
    logits: Array = rows.astype(np.float32)
    return logits


def _make_case(
    variant: SamplingVariant, rows: Array, samples: list[tuple[int, Choice]], rounds: int
) -> Case:
    vocab = rows.shape[1]
    stride = vocab + 3
    logits = np.full((len(rows), stride), np.nan, np.float32)
    logits[:, :vocab] = rows
    chosen = [choose(rows[row], choice) for row, choice in samples]
    choices = [choice for _, choice in samples]
    inverses = [inverse(c.temperature) if c.temperature else 0.0 for c in choices]
    shape = (len(samples),)
    share = rounds * variant.threads // 32
    splits = num_splits(vocab, share)
    scratch = {
        "keys": poison("int64", (*shape, splits)),
        "strip_sums": poison("int64", (*shape, num_strips(vocab))),
        "bins": poison("int64", (*shape, ROW_BINS)),
        "listed": poison("int64", (*shape, vocab)),
    }
    rows_of = ("logits", "logits_rows")
    how = ("inverse_temperatures", "top_ks", "top_ps", "min_ps")
    drawn = ("seeds", "sample_indexes", "positions")
    grid = variant.largest.split_grid(len(samples), splits)
    sizes = (stride, vocab, share)
    return Case(
        f"{variant.name}_v{vocab}_r{rounds}",
        {
            "tokens": poison("int32", shape),
            "is_finite": poison("int32", shape),
            **scratch,
            "logits": logits,
            "logits_rows": np.array([row for row, _ in samples], np.int32),
            "inverse_temperatures": np.array(inverses, np.float64),
            "top_ks": np.array([c.top_k for c in choices], np.int32),
            "top_ps": np.array([c.top_p for c in choices], np.float64),
            "min_ps": np.array([c.min_p for c in choices], np.float64),
            "seeds": np.array([c.seed for c in choices], np.uint64).view(np.int64),
            "sample_indexes": np.array([c.sample_index for c in choices], np.int32),
            "positions": np.array([c.position for c in choices], np.int64),
        },
        (
            Launch(variant.largest, grid, ("keys", "bins", *rows_of, *sizes, ROW_BINS)),
            Launch(variant.weights, grid, ("strip_sums", "bins", "keys", *rows_of, *how, *sizes)),
            Launch(
                variant.shortlist,
                grid,
                ("strip_sums", "listed", "bins", "keys", *rows_of, *how, *sizes),
            ),
            Launch(
                variant,
                variant.grid(len(samples)),
                (
                    "tokens", "is_finite", "keys", "strip_sums", "bins", "listed", *rows_of, *how,
                    *drawn, stride, vocab, splits,
                ),
            ),
        ),
        {
            "tokens": Expected("int32", np.array([token or 0 for token in chosen]), 0.0),
            "is_finite": Expected("int32", np.array([t is not None for t in chosen]), 0.0),
        },
        scratch=tuple(scratch),
    )  # fmt: skip
