"""The operand words of operations whose rows go on from states, and the words of such a row.

Words as in `kernels.cpu.operands`.
"""

from __future__ import annotations

from enum import IntEnum

from kernels.cpu.operation import FIRST_OPERAND


class DeltaNet(IntEnum):
    """Operands of `delta_net`, sizes as in `kernels.cpu.delta_net_sizes`; all rows the piece's."""

    ROWS = FIRST_OPERAND
    """float32 [T, ROWS_STRIDE]: a token's q, k, v before the convolution, then z."""
    ROWS_STRIDE = 3
    GATES = 4
    """float32 [T, 2·Hv]: b, then a."""
    OUT = 5
    """float32 [T, Hv·Dv]."""
    CONVOLUTION = 6
    """float32 [K, C], the last row is of the token itself."""
    RATES = 7
    """float32 [Hv], −e^A; TIME_BIAS: [Hv]; NORM: [Dv]; EPSILON: the bits of a float32."""
    TIME_BIAS = 8
    NORM = 9
    EPSILON = 10
    NUM_KEY_HEADS = 11
    NUM_VALUE_HEADS = 12
    KEY_DIM = 13
    VALUE_DIM = 14
    KERNEL_SIZE = 15
    STATES = 16
    """Address of this layer's part of state 0, and the bytes from a state to the next."""
    STATE_BYTES = 17
    ARE_TILED = 18
    """1: value head j has key head j mod Hk; 0: j // (Hv / Hk)."""


class GatedConvolution(IntEnum):
    """Operands of `gated_convolution`; all rows the piece's."""

    ROWS = FIRST_OPERAND
    """float32 [T, ROWS_STRIDE]: a token's b, c, x."""
    ROWS_STRIDE = 3
    OUT = 4
    """float32 [T, C]."""
    WEIGHTS = 5
    """float32 [K, C], the last row is of the token itself."""
    CHANNELS = 6
    KERNEL_SIZE = 7
    STATES = 8
    """Address of this layer's part of state 0, float32 [K − 1, C], and the bytes from a state to
    the next."""
    STATE_BYTES = 9


class Mamba2(IntEnum):
    """Operands of `mamba2_inputs` and `mamba2_scan`; all rows the piece's."""

    ROWS = FIRST_OPERAND
    """float32 [T, ROWS_STRIDE]: a token's x, b, c before the convolution, then z."""
    ROWS_STRIDE = 3
    STEPS = 4
    """float32 [T, H]: d."""
    OUT = 5
    """float32 [T, H·P], not normalised."""
    CONVOLUTION = 6
    """float32 [K, C], the last row is of the token itself; BIAS: [C]."""
    BIAS = 7
    RATES = 8
    """float32 [H], −e^A; TIME_BIAS: [H]; SKIPS: [H]."""
    TIME_BIAS = 9
    SKIPS = 10
    NUM_HEADS = 11
    HEAD_DIM = 12
    STATE_SIZE = 13
    KERNEL_SIZE = 14
    STATES = 15
    """Address of this layer's part of state 0, and the bytes from a state to the next."""
    STATE_BYTES = 16
    NUM_GROUPS = 17
    """Of heads, which are neighbours and have b and c in common."""


class StateRow(IntEnum):
    """The int32 words of a row whose state goes on; IS_NEW 1: it begins empty, not as it lies."""

    TOKEN = 0
    NUM_TOKENS = 1
    STATE = 2
    IS_NEW = 3
