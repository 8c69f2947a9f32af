"""Paged decode attention: one query token a sequence against its keys and values in the block pool.

    out[s, h] = Σ_t softmax_t(scale · query[s, h] · K[t]) · V[t],   t = 0 … seq_lens[s] - 1

Token t of row s lies in block `block_tables[s, t // B]` at slot t % B. The pool is
[N blocks, L layers, K|V, G kv heads, B slots, D]; a kernel sees one layer of it through three
numbers, all counted in elements:

    block b of the pool
    ├─ layer 0 ── K ─┬─ kv head 0 ─┬─ slot 0    D elements
    │                │             └─ slot B-1  D elements
    │                └─ kv head 1 ─ …
    │             V ─ …
    └─ layer l ── K                               key_offset   = 2·l · G·B·D
                  V                               value_offset = (2·l + 1) · G·B·D
    block b + 1                                   block_stride = 2·L · G·B·D

Who does what. The grid is (S rows, G kv heads): one block of threads owns one kv head of one row
and the `group` = H / G query heads that read it (grouped-query attention, Ainslie et al. 2023). A
warp keeps the queries and sums of its heads in registers; there is room for four heads, so a
larger group is dealt out to `parts` warps, which read the same rows at about the same time, so
that the caches can serve all but the first. Beside that, `splits` warps share the row's KV blocks:
split i takes the blocks i, i + splits, …, with a softmax of its own, and the splits merge at the
end. A group of 8, as 2 parts × 4 splits:

                KV block   0    1    2    3    4    5   …
    heads 0 … 3   warp     0    2    4    6    0    2
    heads 4 … 7   warp     1    3    5    7    1    3

In a warp, lane i owns the dimensions i, i + 32, … of queries, keys, values and sums, so the row of
a token is one coalesced read:

    lane            0    1    2  …  31 │  0    1  …  31 │ …
    dimension       0    1    2  …  31 │ 32   33  …  63 │ … D-1

Softmax is online (Milakov and Gimelshein 2018): with `peak` the largest score so far, `mass` is
Σ 2^(score - peak) and `total` Σ 2^(score - peak)·V; when the peak rises both are scaled down, and
two such triples merge the same way (Dao et al. 2022, FlashAttention). Everything is accumulated in
float32, in an order fixed by the row alone: a row's bits do not depend on its neighbours.

Slots past a row's end may hold anything, NaN included: reads past the end are turned back to the
last valid token and their weight is zero.

The ladder:
  v1  this. Scalar loads, four tokens in flight per warp, five shuffles a score, no split of a row
      over several blocks of threads. Compiled and simulated; `make gpu` measures it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from numba import cuda, float32, int64

from kernels.cuda.errors import UnsupportedVariantError
from kernels.cuda.instructions.conversions import CONVERSIONS, FULL_WARP, exp2
from kernels.cuda.variant import STORAGE_TYPES, Expectation, Pointer, Scalar

DTYPES = tuple(STORAGE_TYPES)
HEAD_SIZES = (64, 96, 128)
BLOCK_SIZES = (16, 32)
MAX_GROUP = 16

HEADS_PER_WARP = 4  # at D 128, 16 registers each for the queries and sums of a lane
TOKENS_AT_ONCE = 4  # divides every block size

LOG2_E = math.log2(math.e)
MINUS_INFINITY = float32(-math.inf)


@dataclass(frozen=True, slots=True)
class DecodeVariant:
    """The compile-time parameters of one decode attention kernel.

    `dtype` of query, pool and out alike; `head_size` D; `group` query heads per kv head;
    `block_size` B. Raises UnsupportedVariantError for what the kernel is not written for.
    """

    dtype: str
    head_size: int
    group: int
    block_size: int

    def __post_init__(self) -> None:
        for field, allowed in (
            ("dtype", DTYPES),
            ("head_size", HEAD_SIZES),
            ("block_size", BLOCK_SIZES),
        ):
            if getattr(self, field) not in allowed:
                choices = ", ".join(map(str, allowed))
                raise UnsupportedVariantError(field, f"one of {choices}", getattr(self, field))
        if not 1 <= self.group <= MAX_GROUP:
            raise UnsupportedVariantError("group", f"between 1 and {MAX_GROUP}", self.group)

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        return f"attention_decode_{self.dtype}_d{self.head_size}_g{self.group}_b{self.block_size}"

    @property
    def parts(self) -> int:
        """Warps that the group's heads are dealt out to."""
        return -(-self.group // HEADS_PER_WARP)

    @property
    def splits(self) -> int:
        """Warps that share the row's blocks; fewer beside many parts, to have registers for all."""
        return 4 if self.parts <= 2 else 2

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.parts * self.splits

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        element = STORAGE_TYPES[self.dtype] + "*"
        pointers = (element, element, element, "int32*", "int32*")
        return (*pointers, "float32", "int64", "int64", "int64", "int64", "int64")

    @property
    def expectation(self) -> Expectation:
        """128 registers keep 16 warps on a multiprocessor."""
        return Expectation(128, ("LDG", "FFMA", "SHFL"))

    def grid(self, num_rows: int, num_kv_heads: int) -> tuple[int, int, int]:
        """Return the launch grid for `num_rows` sequences."""
        return (num_rows, num_kv_heads, 1)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        return make_attention_decode(self)


def variants(*, every: bool) -> list[DecodeVariant]:
    """Return a spread of the variants, or every one there is."""
    if every:
        return [
            DecodeVariant(dtype, head_size, group, block_size)
            for dtype in DTYPES
            for head_size in HEAD_SIZES
            for group in range(1, MAX_GROUP + 1)
            for block_size in BLOCK_SIZES
        ]
    return [
        DecodeVariant("bfloat16", 64, 3, 16),
        DecodeVariant("bfloat16", 128, 4, 16),
        DecodeVariant("bfloat16", 128, 16, 32),
        DecodeVariant("float16", 96, 1, 32),
        DecodeVariant("float16", 128, 7, 16),
        DecodeVariant("float32", 64, 12, 16),
        DecodeVariant("float32", 128, 8, 32),
    ]


def make_attention_decode(variant: DecodeVariant) -> Callable[..., None]:
    """Return the kernel with its compile-time parameters bound.

    Loops over them unroll, and the small local arrays become registers, because every index into
    them is then known to the compiler.
    """
    head_size, group, block_size = variant.head_size, variant.group, variant.block_size
    parts, splits, threads = variant.parts, variant.splits, variant.threads
    heads = -(-group // parts)  # query heads of a warp
    dims = head_size // 32  # dimensions of a lane
    to_float32, from_float32 = CONVERSIONS[variant.dtype]

    def attention_decode(
        out: Pointer,
        query: Pointer,
        pool: Pointer,
        block_tables: Pointer,
        seq_lens: Pointer,
        scale_log2e: Scalar,
        query_stride: Scalar,
        table_width: Scalar,
        block_stride: Scalar,
        key_offset: Scalar,
        value_offset: Scalar,
    ) -> None:
        """Attend with the query heads of kv head blockIdx.y of row blockIdx.x.

        `out`: [S, H, D]. `query`: [S, H, D], rows `query_stride` elements apart. `block_tables`:
        [S, table_width]. `seq_lens`: [S]; a row of length 0 (padding of a graph) gives zeros.
        `scale_log2e`: softmax scale · log2(e), so that powers of two do.
        """
        row = int64(cuda.blockIdx.x)
        kv_head = int64(cuda.blockIdx.y)
        num_kv_heads = int64(cuda.gridDim.y)
        lane = cuda.threadIdx.x % 32
        # From lane 0 to all: so the compiler knows that a warp does not part over it.
        warp = cuda.shfl_sync(FULL_WARP, cuda.threadIdx.x // 32, 0)
        part = warp % parts
        split = warp // parts
        seq_len = seq_lens[row]

        # The warp's queries and an empty softmax for each. `peak` and `mass` are the same in all
        # lanes. Where the group does not divide evenly the last part repeats the last head.
        queries = cuda.local.array((heads, dims), float32)
        total = cuda.local.array((heads, dims), float32)
        peak = cuda.local.array(heads, float32)
        mass = cuda.local.array(heads, float32)
        for h in range(heads):
            peak[h] = MINUS_INFINITY
            mass[h] = float32(0)
            head = kv_head * group + min(part * heads + h, group - 1)
            first = row * query_stride + head * head_size + lane
            for i in range(dims):
                queries[h, i] = to_float32(query[first + 32 * i]) * scale_log2e
                total[h, i] = float32(0)

        # The warp's share of the row's blocks.
        keys = cuda.local.array((TOKENS_AT_ONCE, dims), float32)
        values = cuda.local.array((TOKENS_AT_ONCE, dims), float32)
        scores = cuda.local.array(TOKENS_AT_ONCE, float32)
        num_blocks = (seq_len + block_size - 1) // block_size
        for block_index in range(split, num_blocks, splits):
            block = int64(block_tables[row * table_width + block_index])
            base = block * block_stride + kv_head * (block_size * head_size) + lane
            num_tokens = min(block_size, seq_len - block_index * block_size)
            for first_token in range(0, num_tokens, TOKENS_AT_ONCE):
                # All reads first, so that they are in flight together.
                for t in range(TOKENS_AT_ONCE):
                    token = min(first_token + t, num_tokens - 1)
                    for i in range(dims):
                        element = base + token * head_size + 32 * i
                        keys[t, i] = to_float32(pool[key_offset + element])
                        values[t, i] = to_float32(pool[value_offset + element])

                for h in range(heads):
                    # scores[t] = query · key: each lane its dimensions, then the sum over the warp
                    # by a butterfly, which leaves the same bits in every lane.
                    new_peak = peak[h]
                    for t in range(TOKENS_AT_ONCE):
                        dot = float32(0)
                        for i in range(dims):
                            dot += queries[h, i] * keys[t, i]
                        for step in range(5):
                            dot += cuda.shfl_xor_sync(FULL_WARP, dot, 16 >> step)
                        is_valid = first_token + t < num_tokens
                        scores[t] = dot if is_valid else MINUS_INFINITY
                        new_peak = max(new_peak, scores[t])

                    # Online softmax. The first token is always valid, so the new peak is finite.
                    shrink = exp2(peak[h] - new_peak)
                    peak[h] = new_peak
                    mass[h] *= shrink
                    for i in range(dims):
                        total[h, i] *= shrink
                    for t in range(TOKENS_AT_ONCE):
                        weight = exp2(scores[t] - new_peak)
                        mass[h] += weight
                        for i in range(dims):
                            total[h, i] += weight * values[t, i]

        # Merge the splits: every warp lays its triples down in shared memory, then the threads
        # finish the group · D outputs together.
        split_peak = cuda.shared.array((splits, group), float32)
        split_mass = cuda.shared.array((splits, group), float32)
        split_total = cuda.shared.array((splits, group, head_size), float32)
        for h in range(heads):
            head = min(part * heads + h, group - 1)
            if lane == 0:
                split_peak[split, head] = peak[h]
                split_mass[split, head] = mass[h]
            for i in range(dims):
                split_total[split, head, lane + 32 * i] = total[h, i]
        cuda.syncthreads()

        first_output = (row * num_kv_heads + kv_head) * (group * head_size)
        for output in range(cuda.threadIdx.x, group * head_size, threads):
            head = output // head_size
            dim = output % head_size
            top = split_peak[0, head]  # split 0 has block 0: finite, if the row has any token
            for s in range(1, splits):
                top = max(top, split_peak[s, head])
            numerator = float32(0)
            denominator = float32(0)
            if seq_len > 0:
                for s in range(splits):
                    share = exp2(split_peak[s, head] - top)  # 0 for a split without a block
                    numerator += share * split_total[s, head, dim]
                    denominator += share * split_mass[s, head]
                numerator /= denominator
            out[first_output + output] = from_float32(numerator)

    return attention_decode
