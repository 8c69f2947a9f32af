"""Where the states of layers that have some lie, and which rows of a step go on from which.

States are one array of float32, `state_stride` elements from one to the next; in each, a layer's
part begins at `layer_start`, the same in all of them:

    state s   │ layer 0 │ layer 1 │ …
    a layer   │ inputs [K − 1, C]        │ memory [Hv, Dk, Dv]            │
                the last rows that went    of each value head, the
                into the convolution,      columns neighbours; of
                the oldest first           Mamba-2 [H, N, P]; of
                                           convolutions none

Array letters: T tokens of a step, R rows; K the width of the convolution, C its channels, a
multiple of 32. Of Gated DeltaNet Hk, Hv key and value heads of Dk and Dv elements, both multiples
of 32; C = 2·Hk·Dk + Hv·Dv, the channels of q, then k, then v. Of Mamba-2 H heads of P elements, b
and c of N, likewise; C = H·P + 2·N, of x, then b, then c. So every part begins at a multiple of 128
bytes, if the array does.

A row's tokens are neighbours in a step, in their order. `rows` int32 [R, 4] has of each row its
first token, how many there are, its state, and 1 if it is new: then it begins with an empty state,
and what lies there is not read. A row without tokens is none (the rows of a graph that a step does
not need): nothing of it is read or written, and what a token has that is in no row stays what it
was. `token_rows` int32 [T] has the row of each token; one of a row without tokens will do for those
of no row. So a decode graph's are 0, 1, 2, … for good, and the other numbers of rows that it does
not need are zeros.

No two rows with tokens have the same state. Neither array is written by a kernel: both are read
before a launch waits for the one ahead (`instructions.early_launch`).

States are copied whole, by the driver, a copy for each pair: copies come one after the other, and
one may read what the one before has written. No kernel copies any.
"""

from __future__ import annotations

from typing import Final

from numba import cuda, float32, int32

from kernels.cuda.head_lanes import make_load_run
from kernels.cuda.instructions.conversions import FULL_WARP
from kernels.cuda.instructions.elements import LOAD_FLOATS, STORE_FLOATS
from kernels.cuda.variant import (
    DeviceFunction,
    Pointer,
    Scalar,
    Scalars,
    require_between,
    require_multiple,
)

ROW_NUMBERS: Final = 4
MAX_HEAD_SIZE: Final = 256
HEAD_SIZE_STEP: Final = 32
WIDTHS: Final = (2, 8)
"""The least and the largest."""
VECTOR: Final = 4
"""Channels that a thread keeps together."""


def require_head_sizes(key_size: int, value_size: int, width: int) -> None:
    """Raise UnsupportedVariantError for what no kernel of these layers is written for."""
    require_multiple("key_size", HEAD_SIZE_STEP, key_size, MAX_HEAD_SIZE)
    require_multiple("value_size", HEAD_SIZE_STEP, value_size, MAX_HEAD_SIZE)
    require_between("width", *WIDTHS, width)


def num_channels(num_key_heads: int, num_value_heads: int, key_size: int, value_size: int) -> int:
    """Return C."""
    return 2 * num_key_heads * key_size + num_value_heads * value_size


def layer_floats(
    num_key_heads: int, num_value_heads: int, key_size: int, value_size: int, width: int
) -> int:
    """Return the elements of a layer's part of a state, a multiple of 32."""
    channels = num_channels(num_key_heads, num_value_heads, key_size, value_size)
    return (width - 1) * channels + num_value_heads * key_size * value_size


@cuda.jit(device=True, inline="always")
def find_row(rows: Pointer, row: Scalar) -> Scalars:
    """Return a row's first token, its number of tokens, its state, and whether it is new.

    From lane 0 to all: so the compiler knows that a warp does not part over them.
    """
    at = ROW_NUMBERS * row
    first = cuda.shfl_sync(FULL_WARP, rows[at], 0)
    count = cuda.shfl_sync(FULL_WARP, rows[at + 1], 0)
    state = cuda.shfl_sync(FULL_WARP, rows[at + 2], 0)
    is_new = cuda.shfl_sync(FULL_WARP, rows[at + 3], 0) != 0
    return first, count, state, is_new


def make_keep_inputs(dtype: str, width: int) -> DeviceFunction:
    """Return keep_inputs, for all threads of a row's blocks."""
    before = width - 1
    load_inputs = make_load_run(dtype, VECTOR)
    load_floats, store_floats = LOAD_FLOATS["float32"], STORE_FLOATS["float32"]

    @cuda.jit(device=True, inline="always")
    def keep_inputs(
        states: Pointer,
        inputs: Scalar,
        channels: Scalar,
        projections: Pointer,
        first: Scalar,
        stride: Scalar,
        count: Scalar,
        is_new: Scalar,
        thread: Scalar,
        num_threads: Scalar,
    ) -> None:
        """Write the last K − 1 inputs of a row to its state, from `inputs` on.

        A thread reads all of some channels before it writes them: those that stay move up.
        """
        channel = int32(VECTOR * thread)
        while channel < channels:
            kept = cuda.local.array((before, VECTOR), float32)
            for i in range(before):
                source = count - before + i  # in the row
                if source >= 0:
                    load_inputs(kept, i, projections, first + source * stride + channel)
                elif is_new:
                    for n in range(VECTOR):
                        kept[i, n] = float32(0)
                else:
                    load_floats(kept, i, states, inputs + (source + before) * channels + channel)
            for i in range(before):
                store_floats(states, inputs + i * channels + channel, kept, i)
            channel += int32(VECTOR * num_threads)

    return keep_inputs
