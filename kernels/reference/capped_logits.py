"""Logits that stay below a cap (Gemma 2 and 4; Bello et al. 2016, tanh over logits)."""

from __future__ import annotations

import numpy as np

from kernels.interface import Float32Array


def cap_logits(logits: Float32Array, cap: float) -> None:
    """Replace each number x by cap · tanh(x / cap); what is not finite by NaN. `logits`: [O, V]."""
    capped = cap * np.tanh(logits.astype(np.float64) / cap)
    logits[:] = np.where(np.isfinite(logits), capped, np.nan)
