"""What attention over latents is written for, and the compile-time parameters of both kinds.

All H heads of a token read the same rows: `attention_shared_layout` says how they become blocks of
threads, and how sums lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from kernels.cuda.attention_shared_layout import SharedTileVariant
from kernels.cuda.attention_variant import BLOCK_SIZES
from kernels.cuda.variant import STORAGE_TYPES, require_between, require_one_of

RANKS: Final = (256, 512)
"""Elements of a latent."""
TURNING: Final = (32, 64)
"""Elements of a row that are rotated."""
MAX_HEADS: Final = 128
PLACES: Final = ("float32", *4 * ("int64",))
"""What parameters end with: scale_log2e, query_stride, table_width, block_stride, layer_offset."""


@dataclass(frozen=True, slots=True)
class LatentAttentionVariant(SharedTileVariant):
    """The compile-time parameters of a kernel; decode and prompts have a class each.

    `dtype` of queries, out and the pool. `num_heads` H; `rank` R; `turning` P; `block_size` B.
    Raises UnsupportedVariantError for what the kernels are not written for.

    Every tensor begins at a multiple of 16 bytes; in float32 every row of queries does, in 16 bits
    at one of 4. The pool may be as large as a device's memory, and so may queries and out;
    S · table_width and the elements of a block stay below 2³¹.
    """

    OPERATION: ClassVar[str]  # how names of machine code begin
    HAS_KV_HEADS: ClassVar[bool] = False

    dtype: str
    num_heads: int
    rank: int
    turning: int
    block_size: int

    def __post_init__(self) -> None:
        require_one_of("dtype", STORAGE_TYPES, self.dtype)
        require_between("num_heads", 1, MAX_HEADS, self.num_heads)
        require_one_of("rank", RANKS, self.rank)
        require_one_of("turning", TURNING, self.turning)
        require_one_of("block_size", BLOCK_SIZES, self.block_size)

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        shape = f"h{self.num_heads}_r{self.rank}_p{self.turning}_b{self.block_size}"
        return f"{self.OPERATION}_{self.dtype}_{shape}"

    @property
    def tensors(self) -> tuple[str, ...]:
        """Types of the pointers that parameters begin with.

        out, queries, pool, block_tables, seq_lens.
        """
        element = STORAGE_TYPES[self.dtype] + "*"
        return (element, element, element, "int32*", "int32*")

    @property
    def heads(self) -> int:
        """All of them."""
        return self.num_heads

    @property
    def row_elements(self) -> int:
        """Elements of a token in the pool, and of a query head."""
        return self.rank + self.turning

    @property
    def sum_elements(self) -> int:
        """Elements of a row that are summed."""
        return self.rank

    @property
    def units(self) -> int:
        """Of a tile of tokens."""
        return self.parts
