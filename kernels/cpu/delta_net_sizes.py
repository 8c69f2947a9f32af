"""Sizes of Gated DeltaNet's states and of the scratch memory it needs; without the compiler.

Letters: Hk, Hv key and value heads of Dk and Dv elements, both multiples of 32; C channels of q, k
and v; K the convolution's kernel size, 2 to 8.

A layer's part of a state, at an address that is a multiple of 64:

    float32 [K − 1, C]               the last rows that went into the convolution, the oldest first
    float32 [Hv, Dv / 32, Dk, 32]    of each value head its memory, in blocks of 32 columns

A worker's scratch memory, of a key head and its G = Hv / Hk value heads, W = 2·Dk + G·Dv wide:

    float32 [K − 1 + SUB_BLOCK, W]   the window: channels before the convolution, q, k, v behind it
    float32 [SUB_BLOCK, Dv]          what comes out of a value head
    float32 [NUM_FACTORS, SUB_BLOCK]
"""

from __future__ import annotations

from typing import Final

SUB_BLOCK: Final = 32
"""Tokens that go through a block of columns before the next block's turn."""
COLUMNS: Final = 32
"""Columns of a head's memory that lie together."""
NUM_FACTORS: Final = 3
"""Numbers of a token and a value head: β, α, and the product of its key and its query."""


def num_channels(num_key_heads: int, num_value_heads: int, key_dim: int, value_dim: int) -> int:
    """Return C."""
    return 2 * num_key_heads * key_dim + num_value_heads * value_dim


def memory_offset(channels: int, kernel_size: int) -> int:
    """Return where the heads' memory begins in a layer's part of a state, in bytes."""
    return 4 * (kernel_size - 1) * channels


def layer_state_bytes(
    num_key_heads: int, num_value_heads: int, key_dim: int, value_dim: int, kernel_size: int
) -> int:
    """Return the bytes of a layer's part of a state, a multiple of 64."""
    channels = num_channels(num_key_heads, num_value_heads, key_dim, value_dim)
    memory = 4 * num_value_heads * key_dim * value_dim
    return memory_offset(channels, kernel_size) + memory


def delta_net_scratch_bytes(
    num_key_heads: int, num_value_heads: int, key_dim: int, value_dim: int, kernel_size: int
) -> int:
    """Return the bytes of scratch memory a worker needs."""
    width = 2 * key_dim + num_value_heads // num_key_heads * value_dim
    window = (kernel_size - 1 + SUB_BLOCK) * width
    return 4 * (window + SUB_BLOCK * value_dim + NUM_FACTORS * SUB_BLOCK)
