"""Calls of `delta_net` on NumPy arrays, and the same from the reference.

As a program, `python -m tests.kernels.cpu.delta_net_driver SET`, it prints the digest of what drawn
layers give on an instruction set.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kernels.reference import delta_net as reference

Float32Array = npt.NDArray[np.float32]
EPSILON = 1e-6
BEHIND = 4096
"""Bytes behind scratch memory and states that nothing may write."""


@dataclass(frozen=True)
class Shape:
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int

    @property
    def channels(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.inner

    @property
    def inner(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        return (
            self.num_key_heads, self.num_value_heads, self.key_dim, self.value_dim,
            self.kernel_size,
        )  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A row of a step: how many tokens, and its state."""

    num_tokens: int
    state: int
    is_new: bool = False


@dataclass
class Layer:
    """Weights that were drawn, and states, the first of two layers', full of NaN."""

    shape: Shape
    num_states: int = 1
    are_tiled: bool = False
    weights: reference.DeltaNetWeights = field(init=False)
    states: npt.NDArray[np.uint8] = field(init=False)

    def __post_init__(self) -> None:
        from kernels.cpu.delta_net_sizes import layer_state_bytes

        shape, random = self.shape, np.random.default_rng(self.shape.sizes)
        value_heads = shape.num_value_heads
        self.weights = reference.DeltaNetWeights(
            convolution=random.normal(0, 0.6, (shape.channels, shape.kernel_size)).astype("f4"),
            rates=-random.uniform(0.01, 8, value_heads).astype("f4"),
            time_bias=random.normal(-2, 1, value_heads).astype("f4"),
            norm=random.uniform(0.5, 1.5, shape.value_dim).astype("f4"),
            eps=EPSILON,
            num_key_heads=shape.num_key_heads,
            are_tiled=self.are_tiled,
        )
        self.state_bytes = 2 * layer_state_bytes(*shape.sizes)
        size = self.num_states * self.state_bytes
        memory = np.full(size + 64 + BEHIND, 0xFF, np.uint8)
        self.states = memory[-memory.ctypes.data % 64 :][: size + BEHIND]

    def drawn(self, num_tokens: int, seed: int = 0) -> tuple[Float32Array, Float32Array]:
        """Return rows and gates of tokens."""
        random, shape = np.random.default_rng([seed, num_tokens]), self.shape
        rows = random.standard_normal((num_tokens, shape.channels + shape.inner), np.float32)
        gates = 2 * random.standard_normal((num_tokens, 2 * shape.num_value_heads), np.float32)
        return rows, gates

    def draw_state(self, state: int, seed: int = 0) -> None:
        """Put a state into memory."""
        random = np.random.default_rng([seed, state])
        inputs, memory = self.parts(state)
        inputs[...] = random.standard_normal(inputs.shape, np.float32)
        memory[...] = random.standard_normal(memory.shape, np.float32)

    def parts(self, state: int) -> tuple[Float32Array, Float32Array]:
        """Return views of the first layer's part: [K − 1, C] and [Hv, Dv / 32, Dk, 32]."""
        shape = self.shape
        whole = self.states[state * self.state_bytes :][: self.state_bytes // 2].view(np.float32)
        kept = (shape.kernel_size - 1) * shape.channels
        blocks = (shape.num_value_heads, shape.value_dim // 32, shape.key_dim, 32)
        return whole[:kept].reshape(-1, shape.channels), whole[kept:].reshape(blocks)

    def reference_state(self, state: int) -> reference.DeltaNetState:
        """Return a copy of a state, as the reference has it."""
        inputs, memory = self.parts(state)
        columns = memory.transpose(0, 2, 1, 3).reshape(
            self.shape.num_value_heads, self.shape.key_dim, self.shape.value_dim
        )
        return reference.DeltaNetState(inputs.copy(), columns.copy())

    def run(
        self,
        rows: Float32Array,
        gates: Float32Array,
        pieces: Sequence[Row],
        chunks: Iterable[int] | None = None,
        first_token: int = 0,
    ) -> Float32Array:
        """Return what tokens give, pieces one behind the other from `first_token` on."""
        from kernels.cpu.catalogue import delta_net
        from kernels.cpu.delta_net_sizes import delta_net_scratch_bytes
        from kernels.cpu.operation import HEADER_WORDS, RECORD_WORDS, StepWord
        from kernels.cpu.state_operands import DeltaNet, StateRow
        from tests.kernels.cpu.operation_calls import run

        shape, weights = self.shape, self.weights
        out = np.full((len(rows), shape.inner), np.nan, np.float32)
        size = delta_net_scratch_bytes(*shape.sizes)
        scratch = np.full(size + 64 + BEHIND, 0xFF, np.uint8)
        scratch = scratch[-scratch.ctypes.data % 64 :][: size + BEHIND]
        by_place = np.ascontiguousarray(weights.convolution.T)
        record, header = np.zeros(RECORD_WORDS, np.int64), np.zeros(HEADER_WORDS, np.int64)
        for name, array in (
            ("ROWS", rows), ("GATES", gates), ("OUT", out), ("CONVOLUTION", by_place),
            ("RATES", weights.rates), ("TIME_BIAS", weights.time_bias), ("NORM", weights.norm),
            ("STATES", self.states),
        ):  # fmt: skip
            assert array.flags.c_contiguous
            record[DeltaNet[name]] = array.ctypes.data
        record[DeltaNet.ROWS_STRIDE] = rows.shape[1]
        record[DeltaNet.EPSILON] = np.float32(weights.eps).view(np.uint32)
        record[DeltaNet.NUM_KEY_HEADS : DeltaNet.KERNEL_SIZE + 1] = shape.sizes
        record[DeltaNet.STATE_BYTES] = self.state_bytes
        record[DeltaNet.ARE_TILED] = weights.are_tiled
        words, token = np.zeros((len(pieces), len(StateRow)), np.int32), first_token
        for piece, row in zip(words, pieces, strict=True):
            piece[:] = token, row.num_tokens, row.state, row.is_new
            token += row.num_tokens
        header[StepWord.STATE_ROWS] = words.ctypes.data
        header[StepWord.NUM_STATE_ROWS] = len(pieces)
        header[StepWord.SCRATCH], header[StepWord.SCRATCH_BYTES] = scratch.ctypes.data, size
        if chunks is None:
            chunks = range(len(pieces) * shape.num_key_heads)
        run(delta_net, record, header, chunks)
        assert (scratch[size:] == 0xFF).all()
        assert (self.states[-BEHIND:] == 0xFF).all()
        return out


def gate(attended: Float32Array, gates: Float32Array, chunks: Iterable[int] = (0,)) -> None:
    """Multiply rows by the sigmoids of the first columns of as many rows, or less, of gates."""
    from kernels.cpu.catalogue import gate_attended
    from kernels.cpu.operands import AttentionGate
    from kernels.cpu.operation import RECORD_WORDS
    from tests.kernels.cpu.operation_calls import run, step_header

    record = np.zeros(RECORD_WORDS, np.int64)
    record[AttentionGate.OUT] = attended.ctypes.data
    record[AttentionGate.N] = attended.shape[1]
    record[AttentionGate.GATES] = gates.ctypes.data
    record[AttentionGate.GATES_STRIDE] = gates.shape[1]
    run(gate_attended, record, step_header(len(gates))[0], chunks)


def digest() -> str:
    """Return a digest of what layers and gates give, and of the states."""
    found = hashlib.sha256()
    for shape in (Shape(1, 2, 32, 64, 4), Shape(2, 2, 64, 32, 2)):
        layer = Layer(shape, 2)
        rows, gates = layer.drawn(40)
        gates[3:6] *= 20
        layer.draw_state(1)
        out = layer.run(rows, gates, [Row(37, 0, is_new=True), Row(1, 1), Row(2, 1)])
        found.update(out.tobytes())
        found.update(layer.states.tobytes())
        gate(out, rows)
        found.update(out.tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    from tests.amx import sets

    sets.use(sys.argv[1])
    sys.stdout.write(f"{digest()}\n")
