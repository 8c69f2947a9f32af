"""The KV block pool of the CPU engine: the bytes behind the ids the control plane hands out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from compute_plane.memory.block_digest import block_digest
from compute_plane.memory.huge_pages import UInt8Array, huge_page_array
from kernels.cpu.kv_layout import KvLayout, PoolLayout

if TYPE_CHECKING:
    from compute_plane.model.spec import ModelSpec

PURPOSE: Final = "the KV pool"
HOST_PURPOSE: Final = "the host pool of swapped KV blocks"


def pool_layout(spec: ModelSpec, dtype: str, block_size: int, first_layer: int = 0) -> PoolLayout:
    """Return the layout of a pool for a model's layers from `first_layer` on.

    A part for each kind of heads, with the layers that have keys and values of their own, in their
    order. Raises ConfigError, naming the field, for what cannot be laid out.
    """
    layers = spec.layers_with_keys(first_layer)
    parts = [
        KvLayout(
            dtype,
            sum(spec.heads_of(layer) == heads for layer in layers),
            heads.num_kv_heads,
            block_size,
            heads.head_dim,
            None if spec.latents is None else spec.value_dim,
        )
        for heads in spec.kinds_of_heads
    ]
    return PoolLayout(tuple(parts))


class KvPool:
    """Keys and values of all sequences, in blocks, in the layout of `kernels.cpu.kv_layout`.

    `data`: uint8 [N, block_bytes]; a block is contiguous over all layers, so a copy or a swap of a
    block is one copy. The memory is reserved at once but comes from the operating system zeroed and
    lazily: a block never written costs nothing (but where pages are huge, a touched block brings
    its neighbours on the page with it). Only the executor's thread may write.

    `num_host_blocks`: of the pool that blocks are swapped to. On a CPU both lie in one memory;
    the host pool is kept apart all the same, as it is beside a device.
    """

    def __init__(self, layout: PoolLayout, num_blocks: int, num_host_blocks: int = 0) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        memory = huge_page_array(num_blocks * layout.block_bytes, purpose=PURPOSE)
        self.data: UInt8Array = memory.reshape(num_blocks, layout.block_bytes)
        host = huge_page_array(num_host_blocks * layout.block_bytes, purpose=HOST_PURPOSE)
        self.host: UInt8Array = host.reshape(num_host_blocks, layout.block_bytes)

    @property
    def address(self) -> int:
        """Address of block 0."""
        return self.data.ctypes.data

    @property
    def num_tokens(self) -> int:
        """Tokens that all blocks hold."""
        return self.num_blocks * self.block_size

    @property
    def block_size(self) -> int:
        """Tokens of a block, B."""
        return self.layout.block_size

    @property
    def num_bytes(self) -> int:
        """Bytes reserved for the pool."""
        return int(self.data.nbytes)

    def digest(self, block: int) -> int:
        """Return 64 bits of BLAKE2b of a block's bytes."""
        return block_digest(self.data[block])

    def copy_block(self, source: int, destination: int) -> None:
        """Make block `destination` a copy of block `source`, all layers."""
        self.data[destination] = self.data[source]

    def swap_out(self, source: int, destination: int) -> None:
        """Make block `destination` of the host pool a copy of block `source`."""
        self.host[destination] = self.data[source]

    def swap_in(self, source: int, destination: int) -> None:
        """Make block `destination` a copy of block `source` of the host pool."""
        self.data[destination] = self.host[source]
