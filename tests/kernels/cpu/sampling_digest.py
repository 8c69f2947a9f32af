"""Prints a digest of what the sampling operation answers to fixed questions, on one set."""

from __future__ import annotations

import hashlib
import sys

import numpy as np

from compute_plane.config import ComputePlaneConfig
from compute_plane.cpu.kernel_cache import prepare_kernel_cache
from kernels.cpu.instruction_set import select_instruction_set
from kernels.reference.sampling import Choice


def digest() -> str:
    """Run on the set that this process compiles for."""
    from sampling_driver import Asked, adjustments, run

    random = np.random.default_rng(3)
    logits = (random.standard_normal((4, 5000)) * 3).astype(np.float32)
    logits[3] = np.round(logits[3])
    asked = []
    for i in range(120):
        adjust = adjustments(
            {i: 5.0} if i % 3 == 0 else {},
            random.integers(0, 5000, 50) if i % 2 else (),
            20 if i % 2 else 0,
            repetition_penalty=1.3,
            frequency_penalty=0.1 * (i % 5),
        )
        choice = Choice(
            [0.0, 0.7, 1.0, 1.9][i % 4], [1.0, 0.9, 0.3][i % 3], i, i % 2, i * 7,
            top_k=[0, 50, 900][i // 3 % 3], min_p=[0.0, 0.01][i // 9 % 2],
            adjustments=adjust,
        )  # fmt: skip
        asked.append(Asked(choice, i // 4 % 4, num_logprobs=i % 12 - 1))
    return hashlib.sha256(repr(run(logits, asked)).encode()).hexdigest()


if __name__ == "__main__":
    select_instruction_set(sys.argv[1])  # before anything is compiled
    prepare_kernel_cache(ComputePlaneConfig().kernel_cache_root)
    sys.stdout.write(digest())
