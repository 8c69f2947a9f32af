"""Runs of neighbouring tokens with one adapter.

adapters of tokens   │ 0 0 0 │ 2 2 2 2 2 │ 1 │ 0 │        0: none
runs                          (1, 3, 8)  (0, 8, 9)        adapter from 0 on, first token, end
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from compute_plane.executor.interface import Int32Array


class AdapterRun(NamedTuple):
    """Tokens of one adapter, one behind the other. `adapter`: from 0 on; `end`: behind the last."""

    adapter: int
    first: int
    end: int


AdapterRuns = tuple[AdapterRun, ...]


def runs_of(adapters: Int32Array) -> AdapterRuns:
    """Return the runs of tokens with one adapter.

    `adapters`: [T], that of each token, as in `ExecutionBatch.adapters`.
    """
    if not adapters.any():
        return ()
    firsts = np.flatnonzero(np.diff(adapters, prepend=-1))
    ends = np.append(firsts[1:], len(adapters))
    return tuple(
        AdapterRun(int(adapters[first]) - 1, first, end)
        for first, end in zip(firsts.tolist(), ends.tolist(), strict=True)
        if adapters[first]
    )
