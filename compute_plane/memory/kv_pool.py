"""The KV block pool: the bytes behind the block ids the control plane hands out."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]


class KvPool:
    """Keys and values of all sequences, in blocks of `block_size` tokens, float32.

    `data` has the shape [N, L, 2, G, B, D] (index 0 of the third axis is K, 1 is V):

        block 0                                             block 1 …
        ├ layer 0                          ├ layer 1 …
        │ ├ K                    ├ V       │
        │ │ head 0 [B, D] head 1 │ …       │

    so one block is contiguous over all layers, and a copy or a swap of a block is one copy. The
    memory is reserved at once but comes from the operating system zeroed and lazily: a block never
    written costs nothing. Only the executor's thread may write.
    """

    def __init__(
        self, *, num_blocks: int, num_layers: int, num_kv_heads: int, block_size: int, head_dim: int
    ) -> None:
        self.data: Float32Array = np.zeros(
            (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim), dtype=np.float32
        )

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, N."""
        return int(self.data.shape[0])

    @property
    def block_size(self) -> int:
        """Tokens of a block, B."""
        return int(self.data.shape[4])

    @property
    def num_bytes(self) -> int:
        """Bytes reserved for the pool."""
        return int(self.data.nbytes)

    def copy_block(self, source: int, destination: int) -> None:
        """Make block `destination` a copy of block `source`, all layers."""
        self.data[destination] = self.data[source]
