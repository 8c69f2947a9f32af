"""Which tokens of a piece have adapters, as `kernels.cpu.adapter_operands.AdapterRun`."""

from __future__ import annotations

from typing import Final

import numpy as np

from compute_plane.executor.adapter_runs import runs_of
from compute_plane.executor.interface import Int32Array
from kernels.cpu.adapter_operands import RUN_TOKENS, RUN_WORDS

NO_RUNS: Final[Int32Array] = np.zeros((0, RUN_WORDS), dtype=np.int32)
NO_RUNS.flags.writeable = False


def adapter_runs(adapters: Int32Array) -> Int32Array:
    """Return the runs of tokens with one adapter, of at most `RUN_TOKENS`, int32 [I, RUN_WORDS].

    `adapters`: [T], that of each token of a piece, as in `ExecutionBatch.adapters`.
    """
    runs = [
        (run.adapter, first, min(RUN_TOKENS, run.end - first))
        for run in runs_of(adapters)
        for first in range(run.first, run.end, RUN_TOKENS)
    ]
    return np.array(runs, dtype=np.int32) if runs else NO_RUNS
