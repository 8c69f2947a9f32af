"""Which tokens of a piece have adapters, as runs.

adapters of tokens   │ 0 0 0 │ 2 2 2 2 2 │ 1 │ 0 │        0: none
runs                          (1, 3, 5)  (0, 8, 1)        adapter from 0 on, first token, count
"""

from __future__ import annotations

from typing import Final

import numpy as np

from compute_plane.executor.interface import Int32Array
from kernels.cpu.adapter_operands import RUN_TOKENS, RUN_WORDS

NO_RUNS: Final = np.zeros((0, RUN_WORDS), dtype=np.int32)


def adapter_runs(adapters: Int32Array) -> Int32Array:
    """Return the runs of tokens with one adapter, of at most `RUN_TOKENS`, int32 [I, RUN_WORDS].

    `adapters`: [T], that of each token of a piece, as in `ExecutionBatch.adapters`.
    """
    if not adapters.any():
        return NO_RUNS
    firsts = np.flatnonzero(np.diff(adapters, prepend=-1))
    ends = np.append(firsts[1:], len(adapters))
    runs = [
        (adapters[first] - 1, start, min(RUN_TOKENS, end - start))
        for first, end in zip(firsts.tolist(), ends.tolist(), strict=True)
        if adapters[first]
        for start in range(first, end, RUN_TOKENS)
    ]
    return np.array(runs, dtype=np.int32)
