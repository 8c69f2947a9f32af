"""What decode and prefill attention are written for, and the compile-time parameters of both."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from numba import float32

from kernels.cuda.errors import UnsupportedVariantError
from kernels.cuda.quantized_kv import POOL_DTYPES, pool_pointer, pool_suffix, require_pool_dtype
from kernels.cuda.variant import STORAGE_TYPES, require_between, require_one_of

DTYPES = tuple(STORAGE_TYPES)
# Query heads per kv head, at most, by head size: at 256 the sums of 16 find no room in registers.
# Heads of 512 have kernels of their own (attention_wide).
MOST_GROUPS = {64: 16, 96: 16, 128: 16, 256: 8}
HEAD_SIZES = tuple(MOST_GROUPS)
BLOCK_SIZES = (16, 32)

LOG2_E = math.log2(math.e)
SINK_UNIT = float32(LOG2_E)  # peaks are powers of two, sinks of e

# Of the models that have sinks.
HEAD_SIZES_WITH_SINKS = (64,)
# Of those that have caps, and their neighbours; others are to be had, too.
HEAD_SIZES_WITH_CAPS, GROUPS_WITH_CAPS = (128, 256), (1, 2, 4)

# In 16 bits a peak follows the largest score only once that is ahead by this: then weights are at
# most 2⁸ above what they would be with the true peak, which a float16 holds.
SLACK = float32(8)

# scale_log2e, query_stride, table_width, block_stride, key_offset, value_offset, window: the
# softmax's scale · log2(e), so that powers of two do; where things lie, counted in elements; how
# many tokens are seen.
PLACES = ("float32", *5 * ("int64",), "int32")
NO_WINDOW = 0  # what kernels without windows are given for one
NO_CAP = 0.0  # and those without a cap


def require_supported(dtype: str, head_size: int, group: int) -> None:
    """Raise UnsupportedVariantError for what attention is not written for."""
    require_one_of("dtype", DTYPES, dtype)
    require_one_of("head_size", HEAD_SIZES, head_size)
    require_between("group", 1, MOST_GROUPS[head_size], group)


@dataclass(frozen=True, slots=True)
class AttentionVariant:
    """The compile-time parameters of an attention kernel; each operation has a class of its own.

    `dtype` of query and out, and of the pool unless `kv_dtype` is given: "int8" or "float8", with
    16-bit floats only. `head_size` D; `group` query heads per kv head; `block_size` B. Raises
    UnsupportedVariantError for what the kernels are not written for.

    `has_window`: a token sees the last `window` tokens up to itself, and what lies before is not
    read; `window`, an argument of the launch, is at least 1. Other kernels do not look at it.
    `has_sinks`: each query head has a score in `sinks`, float32 [H], that no token has: it takes
    part in the softmax and gives nothing. It is added at the very end, so that nothing else
    changes. Other kernels do not look at it.
    `has_cap`: c · tanh(score / c) stands for a scaled score (`attention_caps`); `cap`, an argument
    of the launch, is c · log2(e), above zero. Other kernels do not look at it. Not beside sinks.

    Every tensor begins at a multiple of 16 bytes, and so does every row of `query`. The pool may be
    as large as a device's memory, and so may `query` and `out`; S · table_width and the elements of
    a block stay below 2³¹.
    """

    OPERATION: ClassVar[str]  # how names of machine code begin

    dtype: str
    head_size: int
    group: int
    block_size: int
    kv_dtype: str | None = None
    has_window: bool = False
    has_sinks: bool = False
    has_cap: bool = False

    def __post_init__(self) -> None:
        require_supported(self.dtype, self.head_size, self.group)
        require_one_of("block_size", BLOCK_SIZES, self.block_size)
        require_pool_dtype(self.dtype, self.kv_dtype)
        if self.has_sinks:
            require_one_of("head_size", HEAD_SIZES_WITH_SINKS, self.head_size)
            if self.has_cap:
                raise UnsupportedVariantError("has_cap", "False beside sinks", self.has_cap)

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        shape = f"d{self.head_size}_g{self.group}_b{self.block_size}"
        own = {"_window": self.has_window, "_sinks": self.has_sinks, "_cap": self.has_cap}
        shape += pool_suffix(self.kv_dtype) + "".join(name for name, has in own.items() if has)
        return f"{self.OPERATION}_{self.dtype}_{shape}"

    @property
    def is_float32(self) -> bool:
        """Whether it runs on ordinary cores."""
        return self.dtype == "float32"

    @property
    def tensors(self) -> tuple[str, ...]:
        """Types of the pointers that every attention kernel's parameters begin with.

        out, query, pool, block_tables, seq_lens.
        """
        element = STORAGE_TYPES[self.dtype] + "*"
        return (element, element, pool_pointer(self.dtype, self.kv_dtype), "int32*", "int32*")

    @property
    def places(self) -> tuple[str, ...]:
        """Types of the parameters that all end with; of no sinks, `out` again is handed over."""
        sinks = "float32*" if self.has_sinks else STORAGE_TYPES[self.dtype] + "*"
        return (*PLACES, sinks, "float32")


def every_group() -> list[tuple[int, int]]:
    """Return all head sizes with all groups that they are written for."""
    return [(size, group) for size, most in MOST_GROUPS.items() for group in range(1, most + 1)]


Shape: TypeAlias = tuple[str, int, int, int, str | None, bool, bool, bool]


def every_shape() -> list[Shape]:
    """Return the parameters of every variant, in the order of the fields; with caps, of some."""
    return [
        (dtype, head_size, group, block_size, kv_dtype, has_window, has_sinks, False)
        for has_sinks in (False, True)
        for has_window in (False, True)
        for dtype, kv_dtype in POOL_DTYPES
        for head_size, group in every_group()
        if not has_sinks or head_size in HEAD_SIZES_WITH_SINKS
        for block_size in BLOCK_SIZES
    ] + [
        (dtype, head_size, group, block_size, kv_dtype, has_window, False, True)
        for has_window in (False, True)
        for dtype, kv_dtype in POOL_DTYPES
        for head_size in HEAD_SIZES_WITH_CAPS
        for group in GROUPS_WITH_CAPS
        for block_size in BLOCK_SIZES
    ]
