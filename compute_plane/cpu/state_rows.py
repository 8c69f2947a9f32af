"""Which rows of a piece go on from which states (`kernels.cpu.state_operands.StateRow`)."""

from __future__ import annotations

from typing import Final

import numpy as np

from compute_plane.executor.interface import Int32Array
from kernels.cpu.state_operands import StateRow

NO_ROWS: Final[Int32Array] = np.zeros((0, len(StateRow)), dtype=np.int32)
NO_ROWS.flags.writeable = False


def state_rows(token_rows: Int32Array, positions: Int32Array, states: Int32Array) -> Int32Array:
    """Return the state rows of a piece, int32 [R, 4].

    `token_rows`, `positions`: [T] of the piece, a row's tokens one after the other. `states`: of
    all rows of the step.
    """
    if not len(token_rows):
        return NO_ROWS
    begins = np.flatnonzero(np.diff(token_rows, prepend=-1))
    rows = np.zeros((len(begins), len(StateRow)), dtype=np.int32)
    rows[:, StateRow.TOKEN] = begins
    rows[:, StateRow.NUM_TOKENS] = np.diff(begins, append=len(token_rows))
    rows[:, StateRow.STATE] = states[token_rows[begins]]
    rows[:, StateRow.IS_NEW] = positions[begins] == 0
    return rows
