"""Ranges of sampling parameters. Kernels trust them: a token id of a bias becomes an address."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from compute_plane.errors import InvalidBatch
from compute_plane.executor.interface import BoolArray, Int32Array, LogitBias
from compute_plane.executor.step import SamplingKey

MAX_LOGPROBS: Final = 20
"""Most likely tokens listed beside a token."""
MAX_LOGIT_BIASES: Final = 1024
MAX_PENALTY: Final = 2.0
"""Of presence and frequency, to both sides."""


def check_sampling(field: str, key: SamplingKey, vocab_size: int) -> None:
    """Raise InvalidBatch for the first parameter out of range."""
    if not (math.isfinite(key.temperature) and key.temperature >= 0):
        raise _refusal(field, "temperature", "finite and at least 0", key.temperature)
    if not 0 < key.top_p <= 1:
        raise _refusal(field, "top_p", "greater than 0 and at most 1", key.top_p)
    if not 0 <= key.min_p <= 1:
        raise _refusal(field, "min_p", "in 0 to 1", key.min_p)
    repetition = key.repetition_penalty
    if not (math.isfinite(repetition) and repetition > 0):
        raise _refusal(field, "repetition_penalty", "finite and greater than 0", repetition)
    for name, penalty in (
        ("presence_penalty", key.presence_penalty),
        ("frequency_penalty", key.frequency_penalty),
    ):
        if not -MAX_PENALTY <= penalty <= MAX_PENALTY:
            raise _refusal(field, name, f"in {-MAX_PENALTY} to {MAX_PENALTY}", penalty)
    if key.num_logprobs is not None:
        check_num_logprobs(f"{field}.num_logprobs", key.num_logprobs)
    if key.logit_bias is not None:
        _check_logit_bias(f"{field}.logit_bias", key.logit_bias, vocab_size)


def check_num_logprobs(field: str, num_logprobs: int) -> None:
    """Raise InvalidBatch if too many likely tokens are asked for."""
    if num_logprobs > MAX_LOGPROBS:
        raise InvalidBatch(
            f"{field} must be at most {MAX_LOGPROBS}, got {num_logprobs}", field=field
        )


def _refusal(field: str, name: str, rule: str, value: float) -> InvalidBatch:
    return InvalidBatch(f"{field}.{name} must be {rule}, got {value}", field=f"{field}.{name}")


def _check_logit_bias(field: str, bias: LogitBias, vocab_size: int) -> None:
    token_ids = bias.token_ids
    if token_ids.size > MAX_LOGIT_BIASES:
        raise InvalidBatch(
            f"{field} must have at most {MAX_LOGIT_BIASES} entries, got {token_ids.size}",
            field=field,
        )
    unsigned = token_ids.view(np.uint32)  # as on the wire; below 0 here if 2^31 or more there
    for name, wrong, rule, values in (
        ("token_id", unsigned >= vocab_size, f"below {vocab_size}", unsigned),
        ("token_id", _is_repeated(token_ids), "given once", unsigned),
        ("bias", ~np.isfinite(bias.values), "finite", bias.values),
    ):
        if wrong.any():
            index = int(wrong.argmax())
            where = f"{field}[{index}].{name}"
            raise InvalidBatch(f"{where} must be {rule}, got {values[index]}", field=where)


def _is_repeated(values: Int32Array) -> BoolArray:
    """Return which values stand further in front already."""
    _, firsts = np.unique(values, return_index=True)
    repeated = np.ones(values.size, dtype=np.bool_)
    repeated[firsts] = False
    return repeated
