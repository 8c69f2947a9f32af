"""Calls of `gated_convolution` on NumPy arrays.

As a program, `python -m tests.kernels.cpu.convolution_driver SET`, it prints the digest of what a
drawn layer gives on an instruction set.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.kernels.cpu.delta_net_driver import BEHIND, Float32Array, Row


@dataclass
class Convolution:
    """Weights that were drawn, and states, the first of two layers', full of NaN."""

    channels: int
    kernel_size: int
    num_states: int = 1
    weights: Float32Array = field(init=False)
    states: Float32Array = field(init=False)

    def __post_init__(self) -> None:
        random = np.random.default_rng([self.channels, self.kernel_size])
        shape = self.channels, self.kernel_size
        self.weights = random.normal(0, 0.6, shape).astype(np.float32)
        size = self.num_states * 2 * (self.kernel_size - 1) * self.channels
        memory = np.full(size + (64 + BEHIND) // 4, np.nan, np.float32)
        self._memory = memory[-memory.ctypes.data % 64 // 4 :]
        self.states = self._memory[:size].reshape(self.num_states, 2, -1, self.channels)

    def drawn(self, num_tokens: int, seed: int = 0) -> Float32Array:
        """Return rows of tokens."""
        random = np.random.default_rng([seed, num_tokens])
        return random.standard_normal((num_tokens, 3 * self.channels), np.float32)

    def state(self, number: int) -> Float32Array:
        """Return the first layer's part of a state, [K − 1, C]."""
        return self.states[number, 0]

    def draw_state(self, number: int) -> None:
        """Put a state into memory."""
        random = np.random.default_rng(number)
        self.state(number)[:] = random.standard_normal(self.state(number).shape, np.float32)

    def run(
        self,
        rows: Float32Array,
        pieces: Sequence[Row],
        chunks: Iterable[int] | None = None,
        first_token: int = 0,
    ) -> Float32Array:
        """Return what tokens give, pieces one behind the other from `first_token` on."""
        from kernels.cpu.catalogue import gated_convolution
        from kernels.cpu.operation import HEADER_WORDS, RECORD_WORDS, StepWord
        from kernels.cpu.state_operands import GatedConvolution, StateRow
        from tests.kernels.cpu.operation_calls import run

        out = np.full((len(rows), self.channels), np.nan, np.float32)
        by_place = np.ascontiguousarray(self.weights.T)
        record, header = np.zeros(RECORD_WORDS, np.int64), np.zeros(HEADER_WORDS, np.int64)
        record[GatedConvolution.ROWS] = rows.ctypes.data
        record[GatedConvolution.ROWS_STRIDE] = rows.shape[1]
        record[GatedConvolution.OUT] = out.ctypes.data
        record[GatedConvolution.WEIGHTS] = by_place.ctypes.data
        record[GatedConvolution.CHANNELS] = self.channels
        record[GatedConvolution.KERNEL_SIZE] = self.kernel_size
        record[GatedConvolution.STATES] = self.states.ctypes.data
        record[GatedConvolution.STATE_BYTES] = self.states[0].nbytes
        words, token = np.zeros((len(pieces), len(StateRow)), np.int32), first_token
        for piece, row in zip(words, pieces, strict=True):
            piece[:] = token, row.num_tokens, row.state, row.is_new
            token += row.num_tokens
        header[StepWord.STATE_ROWS] = words.ctypes.data
        header[StepWord.NUM_STATE_ROWS] = len(pieces)
        run(gated_convolution, record, header, range(3) if chunks is None else chunks)
        assert np.isnan(self._memory[self.states.size :]).all()
        return out


def digest() -> str:
    """Return a digest of what a layer gives, and of the states."""
    found = hashlib.sha256()
    layer = Convolution(288, 4, 2)
    layer.draw_state(1)
    out = layer.run(layer.drawn(40), [Row(37, 0, is_new=True), Row(1, 1), Row(2, 1)])
    found.update(out.tobytes())
    found.update(layer.states.tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    from tests.amx import sets

    sets.use(sys.argv[1])
    sys.stdout.write(f"{digest()}\n")
