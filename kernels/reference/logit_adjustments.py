"""What is done to a sample's logits before a token is chosen: logit bias, penalties, mask.

In this order, all in float32, every operation rounded by itself (b, ρ, α, φ are float32):

1. Logit bias: l ← l + b for the tokens that have one, kept within range.
2. Repetition penalty ρ, for every token that occurs in the prompt or the output, once, however
   often: l ← l · ρ if l < 0, else l / ρ (Keskar et al. 2019, "CTRL"; as in `transformers`).
3. Then, for every token that occurs c > 0 times in the *output*: l ← l − φ · c (frequency), then
   l ← l − α (presence); as in OpenAI's interface and vLLM.
4. Kept within range again.
5. Mask: the logit of a token that is not allowed becomes the smallest finite number, that of one
   that is allowed at least the number after it. So no token that is not allowed is ever chosen:
   greedily it is not the largest, and drawn its weight is 0, at any temperature below 10^29.

Kept within range: what has left the range of float32 becomes its largest or smallest finite number,
so the largest bias that can be written forces a token, and the smallest forbids it while there is
another one. The output is what follows the first `num_prompt` tokens of the history.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kernels.interface import Float32Array, Int32Array, UInt8Array

LARGEST: Final = np.finfo(np.float32).max
LEAST_ALLOWED: Final = np.nextafter(-LARGEST, np.float32(0))
"""The number after the smallest one."""


def _no_tokens() -> Int32Array:
    return np.zeros(0, dtype=np.int32)


def _every_token() -> UInt8Array:
    return np.zeros(0, dtype=np.uint8)


def _no_values() -> Float32Array:
    return np.zeros(0, dtype=np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Adjustments:
    """The parameters of the steps above; the defaults change nothing.

    `bias_tokens`, `bias_values`: [n], no token twice. `history`: all tokens of the sequence so far,
    `num_prompt` of the prompt first. Read only where a penalty is on. `allowed_tokens`: bit i of
    byte i / 8, the lowest first, says whether token i may be chosen, [ceil(V / 8)], at least one
    bit of the V set; empty: every token may be.
    """

    bias_tokens: Int32Array = field(default_factory=_no_tokens)
    bias_values: Float32Array = field(default_factory=_no_values)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    history: Int32Array = field(default_factory=_no_tokens)
    num_prompt: int = 0
    allowed_tokens: UInt8Array = field(default_factory=_every_token)


def adjusted_logits(row: Float32Array, adjustments: Adjustments) -> Float32Array:
    """Return the logits [V] that a token is chosen by."""
    logits = row.copy()
    with np.errstate(over="ignore"):
        logits[adjustments.bias_tokens] += adjustments.bias_values
        logits = np.clip(logits, -LARGEST, LARGEST)
        seen = np.unique(adjustments.history)
        values = logits[seen]
        rho = np.float32(adjustments.repetition_penalty)
        logits[seen] = np.where(values < 0, values * rho, values / rho)
        tokens, counts = np.unique(
            adjustments.history[adjustments.num_prompt :], return_counts=True
        )
        phi, alpha = (
            np.float32(adjustments.frequency_penalty),
            np.float32(adjustments.presence_penalty),
        )
        logits[tokens] -= phi * counts.astype(np.float32)
        logits[tokens] -= alpha
    logits = np.clip(logits, -LARGEST, LARGEST)
    if adjustments.allowed_tokens.size:
        bits = np.unpackbits(adjustments.allowed_tokens, count=len(logits), bitorder="little")
        logits = np.where(bits, np.maximum(logits, LEAST_ALLOWED), -LARGEST)
    return logits
