"""Calls of `mamba2_inputs` and `mamba2_scan` on NumPy arrays, and the same from the reference.

As a program, `python -m tests.kernels.cpu.mamba2_driver SET`, it prints the digest of what a drawn
layer gives on an instruction set.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kernels.reference import mamba2 as reference
from tests.kernels.cpu.delta_net_driver import BEHIND, Float32Array, Row

EPSILON = 1e-5


@dataclass(frozen=True)
class Shape:
    num_heads: int
    head_dim: int
    state_size: int
    kernel_size: int
    num_groups: int = 1

    @property
    def inner(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.num_groups * self.state_size

    @property
    def floats(self) -> int:
        return (self.kernel_size - 1) * self.channels + self.inner * self.state_size


@dataclass
class Layer:
    """Weights that were drawn, and states, the first of two layers', full of NaN."""

    shape: Shape
    num_states: int = 1
    weights: reference.Mamba2Weights = field(init=False)
    states: Float32Array = field(init=False)

    def __post_init__(self) -> None:
        shape = self.shape
        random = np.random.default_rng([shape.num_heads, shape.head_dim, shape.state_size])
        heads, channels = shape.num_heads, shape.channels
        self.weights = reference.Mamba2Weights(
            convolution=random.normal(0, 0.6, (channels, shape.kernel_size)).astype("f4"),
            bias=random.normal(0, 0.3, channels).astype("f4"),
            rates=-random.uniform(0.01, 8, heads).astype("f4"),
            time_bias=random.normal(-2, 1, heads).astype("f4"),
            skips=random.normal(0, 1, heads).astype("f4"),
            norm=random.uniform(0.5, 1.5, shape.inner).astype("f4"),
            eps=EPSILON,
            num_groups=shape.num_groups,
        )
        size = self.num_states * 2 * shape.floats
        memory = np.full(size + (64 + BEHIND) // 4, np.nan, np.float32)
        self._memory = memory[-memory.ctypes.data % 64 // 4 :]
        self.states = self._memory[:size].reshape(self.num_states, 2, -1)

    def drawn(self, num_tokens: int, seed: int = 0) -> tuple[Float32Array, Float32Array]:
        """Return rows and steps of tokens."""
        random, shape = np.random.default_rng([seed, num_tokens]), self.shape
        rows = random.standard_normal((num_tokens, shape.channels + shape.inner), np.float32)
        return rows, 2 * random.standard_normal((num_tokens, shape.num_heads), np.float32)

    def draw_state(self, state: int) -> None:
        """Put a state into memory."""
        random = np.random.default_rng(state)
        own = self.states[state, 0]
        own[:] = random.standard_normal(own.shape, np.float32)

    def reference_state(self, state: int) -> reference.Mamba2State:
        """Return a copy of a state, as the reference has it."""
        shape, own = self.shape, self.states[state, 0]
        kept = (shape.kernel_size - 1) * shape.channels
        heads, size = shape.num_heads, shape.state_size
        memory = own[kept:].reshape(heads, -1)
        last = shape.head_dim % 32
        whole = memory[:, : (shape.head_dim - last) * size].reshape(heads, -1, size, 32)
        columns = [
            whole.swapaxes(1, 2).reshape(heads, size, -1),
            memory[:, (shape.head_dim - last) * size :].reshape(heads, size, last),
        ]
        inputs = own[:kept].reshape(-1, shape.channels)
        return reference.Mamba2State(inputs.copy(), np.concatenate(columns, axis=2))

    def run(
        self,
        rows: Float32Array,
        steps: Float32Array,
        pieces: Sequence[Row],
        chunks: Iterable[int] | None = None,
        first_token: int = 0,
    ) -> Float32Array:
        """Return what tokens give before the norm; `rows` are changed."""
        from kernels.cpu.catalogue import mamba2_inputs, mamba2_scan
        from kernels.cpu.mamba2_sizes import SCRATCH_BYTES
        from kernels.cpu.operation import HEADER_WORDS, RECORD_WORDS, StepWord
        from kernels.cpu.state_operands import Mamba2, StateRow
        from tests.kernels.cpu.operation_calls import run

        shape, weights = self.shape, self.weights
        out = np.full((len(rows), shape.inner), np.nan, np.float32)
        scratch = np.full(SCRATCH_BYTES + 64 + BEHIND, 0xFF, np.uint8)
        scratch = scratch[-scratch.ctypes.data % 64 :][: SCRATCH_BYTES + BEHIND]
        by_place = np.ascontiguousarray(weights.convolution.T)
        record, header = np.zeros(RECORD_WORDS, np.int64), np.zeros(HEADER_WORDS, np.int64)
        for name, array in (
            ("ROWS", rows), ("STEPS", steps), ("OUT", out), ("CONVOLUTION", by_place),
            ("BIAS", weights.bias), ("RATES", weights.rates), ("TIME_BIAS", weights.time_bias),
            ("SKIPS", weights.skips), ("STATES", self.states),
        ):  # fmt: skip
            assert array.flags.c_contiguous
            record[Mamba2[name]] = array.ctypes.data
        record[Mamba2.ROWS_STRIDE] = rows.shape[1]
        record[Mamba2.NUM_HEADS : Mamba2.KERNEL_SIZE + 1] = (
            shape.num_heads, shape.head_dim, shape.state_size, shape.kernel_size,
        )  # fmt: skip
        record[Mamba2.NUM_GROUPS] = shape.num_groups
        record[Mamba2.STATE_BYTES] = self.states[0].nbytes
        words, token = np.zeros((len(pieces), len(StateRow)), np.int32), first_token
        for piece, row in zip(words, pieces, strict=True):
            piece[:] = token, row.num_tokens, row.state, row.is_new
            token += row.num_tokens
        header[StepWord.STATE_ROWS] = words.ctypes.data
        header[StepWord.NUM_STATE_ROWS] = len(pieces)
        header[StepWord.SCRATCH] = scratch.ctypes.data
        header[StepWord.SCRATCH_BYTES] = SCRATCH_BYTES
        chunks = list(range(len(pieces) * shape.num_heads) if chunks is None else chunks)
        run(mamba2_inputs, record, header, chunks)
        run(mamba2_scan, record, header, chunks)
        assert (scratch[SCRATCH_BYTES:] == 0xFF).all()
        assert np.isnan(self._memory[self.states.size :]).all()
        return out

    def normed(self, gated: Float32Array) -> Float32Array:
        """Return what the norm behind makes of what tokens give."""
        groups = gated.reshape(len(gated), self.shape.num_groups, -1)
        squares = np.mean(groups * groups, axis=-1, keepdims=True)
        normed = (groups / np.sqrt(squares + EPSILON)).reshape(gated.shape)
        return np.asarray(normed * self.weights.norm, np.float32)


def digest() -> str:
    """Return a digest of what a layer gives, and of the states."""
    found = hashlib.sha256()
    layer = Layer(Shape(4, 80, 96, 4, num_groups=2), 2)
    rows, steps = layer.drawn(40)
    steps[3:6] *= 20
    layer.draw_state(1)
    out = layer.run(rows, steps, [Row(37, 0, is_new=True), Row(1, 1), Row(2, 1)])
    found.update(out.tobytes())
    found.update(layer.states.tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    from tests.amx import sets

    sets.use(sys.argv[1])
    sys.stdout.write(f"{digest()}\n")
