"""The KV pool on the device, the pool of swapped blocks in host memory, and copies between blocks.

Both are [blocks, L, 2, G, B, D], L being the layers with keys and values of their own: a block is
contiguous over all of them, so that a swap is one copy. Of latents, which are keys and values at
once, they are [blocks, L, 1, 1, B, R + P] (`kernels.reference.latent_attention`). Where layers have
heads of several kinds, a block has a part for each kind, one behind the other:

    block    │ layers of kind 0 [L, 2, G, B, D] │ layers of kind 1 [L', 2, G', B, D'] │

In eight bits, int8 or float8, they are [blocks, L, 2, G, B · (D + 4)]: the bytes of the B · D
numbers of a head and, behind them, a float32 scale for each token (`kernels.cuda.quantized_kv`);
the pool's dtype says what the bytes are numbers of.

Copies of a step run in order. Those within the device's pool go in *waves*, as many at once as do
not touch what another one writes:

    copies   1→5  2→6  5→7  8→2          waves   │ 1→5  2→6 │ 5→7  8→2 │
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from compute_plane.cuda.state_pool import StatePool
from compute_plane.cuda.weights import DTYPES
from compute_plane.executor.interface import BlockCopy, CopyKind
from compute_plane.memory.block_digest import block_digest
from kernels.cuda.quantized_kv import pool_shape

if TYPE_CHECKING:
    from compute_plane.cuda.drivers import Driver
    from compute_plane.cuda.operations import DeviceOperations
    from compute_plane.model.heads import Heads
    from compute_plane.model.spec import ModelSpec

Array = npt.NDArray[Any]

EIGHT_BITS: Final = {torch.int8: "int8", torch.float8_e4m3fn: "float8"}
"""Dtypes of pools with scales, and what the kernels call them."""
MOST_IN_EIGHT_BITS: Final = 256
"""Elements of a head, of pools with scales: what larger heads are attended by reads 16 bits."""
KV_DTYPES: Final = {**DTYPES, **{name: dtype for dtype, name in EIGHT_BITS.items()}}
"""What `--kv-cache-dtype` may name, and the dtype of such a pool."""


@dataclass(frozen=True, slots=True)
class Wave:
    """Copies `first` to `end` of the step's pairs, all of one kind, in no order."""

    kind: CopyKind
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """The copies of a step: `pairs` int32 [P, 2] of source and destination, and their waves."""

    pairs: Array
    waves: tuple[Wave, ...]


class BlockPools:
    """The blocks of one device.

    `device`: [N, …], a block as drawn above; of several parts [N, elements]. `parts`: of it, those
    of each kind of heads, [N, L, 2, G, B, D], in the order of `ModelSpec.kinds_of_heads`. `host`:
    [blocks, …] as `device`, in memory that the device copies from and to by itself. `states`: those
    of sequences, beside their blocks; None: the model has none.
    """

    def __init__(
        self,
        spec: ModelSpec,
        driver: Driver,
        *,
        dtype: torch.dtype,
        block_size: int,
        num_blocks: int,
        num_host_blocks: int = 0,
        num_states: int = 0,
    ) -> None:
        self._driver = driver
        self.block_size = block_size
        """Tokens of a block, B."""
        shapes = part_shapes(spec, dtype, block_size)
        sizes = [math.prod(shape) for shape in shapes]
        shape = shapes[0] if len(shapes) == 1 else (sum(sizes),)
        self.block_bytes = block_bytes(spec, dtype, block_size)
        # Zeroed, which on a CPU costs memory only once it is touched.
        with driver.computing():
            device = torch.zeros(
                num_blocks * self.block_bytes, dtype=torch.uint8, device=driver.device
            )
        self.device: Tensor = device.view(dtype).view(num_blocks, *shape)
        parts = self.device.view(num_blocks, sum(sizes)).split(sizes, dim=1)
        self.parts: tuple[Tensor, ...] = tuple(
            part.view(num_blocks, *of_kind) for part, of_kind in zip(parts, shapes, strict=True)
        )
        host = driver.host_buffer(num_host_blocks * self.block_bytes)
        self.host: Tensor = host.view(dtype).view(num_host_blocks, *shape)
        self.states = StatePool(spec, driver, num_states) if num_states else None

    @property
    def num_blocks(self) -> int:
        """Blocks of the device's pool, N."""
        return len(self.device)

    @property
    def num_states(self) -> int:
        """States beside them."""
        return 0 if self.states is None else self.states.num_states

    @property
    def num_bytes(self) -> int:
        """Bytes of the device's pool."""
        return self.num_blocks * self.block_bytes

    def run(self, plan: CopyPlan, pairs: Tensor, operations: DeviceOperations) -> None:
        """Queue the copies of a step; `pairs`: the plan's on the device."""
        if not self.block_bytes:  # of no layer: the first ones of a model may all have states
            return
        for wave in plan.waves:
            if wave.kind is CopyKind.WITHIN:
                operations.copy_blocks(self.device, self.device, pairs[wave.first : wave.end])
                continue
            swaps_out = wave.kind is CopyKind.SWAP_OUT
            target, source = (self.host, self.device) if swaps_out else (self.device, self.host)
            for source_block, target_block in plan.pairs[wave.first : wave.end].tolist():
                self._driver.copy(target[target_block], source[source_block])

    def digest(self, block: int) -> int:
        """Return 64 bits of BLAKE2b of a block's bytes, when all that is queued is done."""
        self._driver.synchronize()
        content: Array = self.device[block].reshape(-1).view(torch.uint8).cpu().numpy()
        return block_digest(content)


def part_shapes(
    spec: ModelSpec, dtype: torch.dtype, block_size: int
) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a block's parts in a pool of this dtype, by kind of heads."""
    layers, num_rows = spec.layers_with_keys(), 2 if spec.latents is None else 1

    def of(heads: Heads) -> tuple[int, ...]:
        num_layers = sum(spec.heads_of(layer) == heads for layer in layers)
        leading = (num_layers, num_rows, heads.num_kv_heads)
        if dtype in EIGHT_BITS:
            return pool_shape(leading, heads.head_dim, block_size)
        return (*leading, block_size, heads.head_dim)

    return tuple(map(of, spec.kinds_of_heads))


def layer_bytes(
    spec: ModelSpec, dtype: torch.dtype, block_size: int, num_blocks: int
) -> dict[Heads, int]:
    """Return the bytes of so many blocks that a layer with keys and values has, by its heads."""
    shapes = part_shapes(spec, dtype, block_size)
    sizes = (num_blocks * int(dtype.itemsize) * math.prod(of_layer) for _, *of_layer in shapes)
    return dict(zip(spec.kinds_of_heads, sizes, strict=True))


def block_bytes(spec: ModelSpec, dtype: torch.dtype, block_size: int) -> int:
    """Return the bytes of one block, scales included."""
    return int(dtype.itemsize) * sum(map(math.prod, part_shapes(spec, dtype, block_size)))


def plan_copies(copies: Sequence[BlockCopy]) -> CopyPlan:
    """Return the waves of some copies: consecutive ones of a kind that do not meet."""
    waves: list[Wave] = []
    read: set[int] = set()
    written: set[int] = set()
    first = 0
    for index, copy in enumerate(copies):
        meets = (
            copy.source in written or copy.destination in written or copy.destination in read
        ) and copy.kind is CopyKind.WITHIN
        if index > first and (meets or copy.kind is not copies[first].kind):
            waves.append(Wave(copies[first].kind, first, index))
            first = index
            read, written = set(), set()
        read.add(copy.source)
        written.add(copy.destination)
    if copies:
        waves.append(Wave(copies[first].kind, first, len(copies)))
    pairs = np.array([(copy.source, copy.destination) for copy in copies], dtype=np.int32)
    return CopyPlan(pairs.reshape(-1, 2), tuple(waves))
