"""The gated delta rule: tokens go through the state of their row, one after the other.

    recalled    = α · memoryᵀ k
    memory      = α · memory + k ⊗ β · (v − recalled)          of each value head, [Dk, Dv]
    out         = memoryᵀ q

A block of threads takes a row and a value head, or some of its columns, which stay in registers
from the row's first token to its last (`delta_rule_columns`). What tokens are made of
(`short_convolution`) is copied to shared memory some tokens ahead (`delta_rule_stages`):

    stage 0    copy 0 │ tokens 0 … 7   │ copy 2         │ tokens 16 … 23      W  wait_for_copies
    stage 1           │ copy 1         │ tokens 8 … 15  │ copy 3              B  syncthreads
                      W B              W B              W B

A block that has a whole head normalises and gates what comes out behind each stage, a warp a token
(`gated_norm`): that needs no launch and no memory of its own. Where rows are few and long, blocks
have 64 or 32 columns: twice as many multiprocessors take part, and `gated_norm` follows
(`divides_heads`). The bits are the same, since columns do not know of each other; so a step may go
either way, whatever a sequence's steps before did.

The row's last K − 1 inputs are written to the state for the next step's convolution, by all of its
blocks together; the launch ahead has read what was there. States and rows are drawn in
`recurrent_states`; specification: `kernels.reference.delta_net`. A token's bits depend on the
tokens before it, dtype and sizes: neither on company nor on how a sequence is cut into rows.

How to launch a layer, between the product that gives `projections` and gates and the one of `out`:

    short_convolution    at variant.grid(T, Hk, Hv)
    delta_rule           at variant.grid(R, Hk, Hv), R with the rows that have no tokens
    gated_norm           at variant.grid(T, Hv), where `normalises` is false: `divides_heads` says
                         so, or not `takes_whole_heads`

The state is asked for before the launch ahead has ended: it is most of what a decoding token reads.

What limits it, by argument and count, not measured: a decoding token reads and writes 4 · Dk · Dv
bytes of each head, together 4 MB of a layer with 32 of 128 × 128, 0.9 µs of an H200's memory. In a
longer row a token is some 350 instructions of a warp, 256 of them the arithmetic (16 columns of 128
rows). With four warps on a multiprocessor one token follows the other after these and what is not
hidden of two sums over lanes; with eight, as whole heads have, after twice as many.

Rows are independent: the longest should be the first, so that they do not begin in the last wave.

The ladder:
  v1  this.
  v2  rows of one token: the convolution in the same launch. Inputs in K places of the state, of
      which a token overwrites the one that it does not read, so that no block waits for another.
  v3  eight columns a warp: less time between the tokens of a row that is alone, a quarter more
      instructions where there are many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numba
from numba import cuda, float32, int32, int64, uint32

from kernels.cuda.delta_rule_columns import VECTOR, make_memory_columns, warp_columns
from kernels.cuda.delta_rule_stages import (
    make_start_copies,
    make_start_gate_copies,
    token_floats,
)
from kernels.cuda.gated_norm import make_norm_head
from kernels.cuda.head_lanes import make_load_run
from kernels.cuda.instructions.addresses import multiply_add_wide
from kernels.cuda.instructions.async_copies import copy_async, wait_for_copies
from kernels.cuda.instructions.early_launch import fetch_ahead, let_next_begin, wait_for_previous
from kernels.cuda.lanes import lane_and_warp
from kernels.cuda.recurrent_states import find_row, make_keep_inputs, require_head_sizes
from kernels.cuda.variant import (
    STORAGE_TYPES,
    Expectation,
    Pointer,
    Scalar,
    require_one_of,
)

READ_EARLY: Final = (5,)
"""Of the arguments: rows."""
FLOAT_BYTES: Final = 4
MAX_WARPS: Final = 8
"""Of a block: what a thread has of the memory is a quarter of its registers on capability 8.0."""
DIVIDED_WARPS: Final = 4
"""Of a block that has some columns of a head."""
STAGES: Final = 2
STAGE_TOKENS: Final = 8
STAGE_FLOATS: Final = 4608
"""Of a stage at most: with two of them and what comes out, 48 KB are enough."""


def takes_whole_heads(key_size: int, value_size: int) -> bool:
    """Whether a block of threads has registers for a head's memory."""
    return value_size <= MAX_WARPS * warp_columns(key_size)


@dataclass(frozen=True, slots=True)
class DeltaRuleVariant:
    """The compile-time parameters: `dtype` of a step, elements of a head, the convolution's width.

    `key_size` Dk and `value_size` Dv: multiples of 32 up to 256. `width` K: 2 to 8. `normalises`:
    blocks have whole heads, and what is written is normalised, gated and in the step's dtype; not
    where `takes_whole_heads` says no. Raises UnsupportedVariantError.
    """

    dtype: str
    key_size: int
    value_size: int
    width: int
    normalises: bool

    def __post_init__(self) -> None:
        require_one_of("dtype", STORAGE_TYPES, self.dtype)
        require_head_sizes(self.key_size, self.value_size, self.width)
        if not takes_whole_heads(self.key_size, self.value_size):
            require_one_of("normalises", (False,), self.normalises)

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        sizes = f"k{self.key_size}_v{self.value_size}_w{self.width}"
        return f"delta_rule_{self.dtype}_{sizes}" + "_normed" * self.normalises

    @property
    def columns(self) -> int:
        """Columns of a head that a block has."""
        if self.normalises:
            return self.value_size
        columns = DIVIDED_WARPS * warp_columns(self.key_size)
        return columns // 2 if self.value_size % columns else columns

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * (self.columns // warp_columns(self.key_size))

    @property
    def token_floats(self) -> int:
        """Of a token in a stage."""
        return token_floats(self.key_size, self.columns)

    @property
    def stage_tokens(self) -> int:
        """Tokens that are copied together."""
        return min(STAGE_TOKENS, STAGE_FLOATS // self.token_floats)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        element = STORAGE_TYPES[self.dtype] + "*"
        tokens = (element if self.normalises else "float32*", "float32*", "float32*", element)
        states = ("int32*", "float32*", "int64", "int64")
        return (*tokens, "int64", *states, "int32", "int32", "int32", "float32*", "float32")

    @property
    def expectation(self) -> Expectation:
        """Two blocks of whole heads on a multiprocessor, four of others: one computes, one reads.

        Inputs that are kept stand beside a memory that is under way, and are many where K is large.
        Capability 8.0 takes twice as many registers, and has one block: there shuffles in a loop
        are calls where warps have parted, which they never have.
        """
        registers = 128 if self.width <= 4 else 160
        instructions = ("LDG.128", "STG.128", "LDGSTS.128", "LDS.128", "FFMA", "SHFL", "BAR")
        return Expectation(registers, instructions, begins_early=True, reads_early=READ_EARLY)

    def grid(self, num_rows: int, num_key_heads: int, num_value_heads: int) -> tuple[int, int, int]:
        """Return the launch grid; `num_rows`: with those that have no tokens."""
        group = num_value_heads // num_key_heads
        return (group * (self.value_size // self.columns), num_key_heads, num_rows)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        return make_delta_rule(self)


def divides_heads(num_long_rows: int, num_value_heads: int, num_multiprocessors: int) -> bool:
    """Whether to divide heads among blocks, and launch `gated_norm` behind them.

    It pays where there are rows of many tokens and their whole heads would leave half of the
    multiprocessors idle. It decides about time only.
    """
    return 0 < 2 * num_long_rows * num_value_heads <= num_multiprocessors


def variants(*, every: bool) -> list[DeltaRuleVariant]:
    """Return a spread of the variants, or those of the models known to us and some others."""
    if every:
        shapes = ((128, 128, 4), (64, 64, 4), (96, 160, 2), (192, 32, 8), (256, 256, 4))
        return [
            DeltaRuleVariant(dtype, *shape, normalises)
            for dtype in STORAGE_TYPES
            for shape in shapes
            for normalises in ((False, True) if takes_whole_heads(*shape[:2]) else (False,))
        ]
    return [
        DeltaRuleVariant("bfloat16", 128, 128, 4, True),
        DeltaRuleVariant("bfloat16", 128, 128, 4, False),
        DeltaRuleVariant("float32", 128, 128, 4, True),
        DeltaRuleVariant("float16", 96, 64, 3, True),
        DeltaRuleVariant("bfloat16", 256, 256, 4, False),
    ]


def make_delta_rule(variant: DeltaRuleVariant) -> Callable[..., None]:
    """Return the kernel with its compile-time parameters bound."""
    key_size, value_size, columns = variant.key_size, variant.value_size, variant.columns
    normalises, width, threads = variant.normalises, variant.width, variant.threads
    parts, warps = value_size // columns, threads // 32
    floats, stage_tokens = variant.token_floats, variant.stage_tokens
    step_at = floats - VECTOR  # of β and α among a token's
    stage_floats = stage_tokens * floats
    staged_floats = STAGES * stage_floats
    out_floats = stage_tokens * columns if normalises else 1
    norm_floats = value_size if normalises else 1
    gate_type = getattr(numba, STORAGE_TYPES[variant.dtype])
    stage_gates = stage_tokens * value_size
    staged_gates = STAGES * stage_gates if normalises else 1
    memory_floats = key_size * value_size
    fetched_floats = memory_floats // (parts * warps)
    fetched_bytes = FLOAT_BYTES * fetched_floats
    own = make_memory_columns(key_size)
    own_columns, lane_rows = warp_columns(key_size), own.lane_rows
    load, store, clear, apply = own.load, own.store, own.clear, own.apply
    column_of, is_writer = own.column_of, own.is_writer
    load_pair = make_load_run("float32", 2)
    keep_inputs = make_keep_inputs(variant.dtype, width)
    norm_head = make_norm_head(variant.dtype, value_size)
    start_copies = make_start_copies(variant)
    start_gate_copies = make_start_gate_copies(variant)

    def delta_rule(
        out: Pointer,
        convolved: Pointer,
        step_sizes: Pointer,
        projections: Pointer,
        stride: Scalar,
        rows: Pointer,
        states: Pointer,
        state_stride: Scalar,
        layer_start: Scalar,
        num_key_heads: Scalar,
        num_value_heads: Scalar,
        are_tiled: Scalar,
        norm: Pointer,
        eps: Scalar,
    ) -> None:
        """Take row blockIdx.z through some columns of a value head of key head blockIdx.y.

        `out`: [T, Hv·Dv]. `convolved`, `step_sizes`: as `short_convolution` leaves them.
        `projections`: what it was made of, tokens `stride` elements apart, a multiple of 16 bytes,
        z behind the channels. `are_tiled`: 1 where value head j has key head j mod Hk; else it has
        j // (Hv / Hk). `norm`: float32 [Dv], `eps`: not touched where nothing is normalised.
        The others: as in `recurrent_states`.
        """
        let_next_begin()
        lane, warp = lane_and_warp()
        group, part = int32(cuda.gridDim.x // parts), int32(cuda.blockIdx.x % parts)
        key_head = int32(cuda.blockIdx.y)
        member = int32(cuda.blockIdx.x // parts)
        head = int32(key_head * group + member)
        if are_tiled != 0:
            head = int32(member * num_key_heads + key_head)
        first, count, state, is_new = find_row(rows, int64(cuda.blockIdx.z))
        channels = int32(2 * num_key_heads * key_size + num_value_heads * value_size)
        inputs = int64(state) * state_stride + layer_start
        of_head = inputs + int64(width - 1) * channels + int64(head) * memory_floats
        if count > 0 and not is_new and lane == 0:
            share = int32((part * warps + warp) * fetched_floats)
            fetch_ahead(states, of_head + share, uint32(fetched_bytes))
        wait_for_previous()
        if count <= 0:
            return

        staged = cuda.shared.array(staged_floats, float32, alignment=16)
        heads_out = cuda.shared.array(out_floats, float32, alignment=16)
        weights = cuda.shared.array(norm_floats, float32, alignment=16)
        gates = cuda.shared.array(staged_gates, gate_type, alignment=16)
        memory = cuda.local.array((lane_rows, VECTOR), float32)
        steps = cuda.local.array((1, 2), float32)
        first_gate = int32(channels + head * value_size)
        if normalises:
            if VECTOR * cuda.threadIdx.x < value_size:
                weight = int32(VECTOR * cuda.threadIdx.x)
                copy_async(weights, weight, norm, weight, True)
            start_gate_copies(gates, int32(0), projections, stride, first_gate, first, count)
        start_copies(
            staged, int32(0), convolved, step_sizes, first, count, num_key_heads, num_value_heads,
            key_head, head, part,
        )  # fmt: skip
        first_column = of_head + int32(part * columns + own_columns * warp)
        if is_new:
            clear(memory)
        else:
            load(memory, states, first_column, value_size, lane)
        block = int32(cuda.blockIdx.y * cuda.gridDim.x + cuda.blockIdx.x)
        num_blocks = int32(cuda.gridDim.y * cuda.gridDim.x)
        keep_inputs(
            states, inputs, channels, projections, int64(first) * stride, stride, count, is_new,
            int32((warp * num_blocks + block) * 32 + lane), int32(num_blocks * threads),
        )  # fmt: skip

        column = int32(own_columns * warp + column_of(lane))
        token, left, stage, gate = int32(first), int32(count), int32(0), int32(0)
        while left > 0:
            wait_for_copies()
            cuda.syncthreads()
            if left > stage_tokens:
                if normalises:
                    start_gate_copies(
                        gates, int32(stage_gates - gate), projections, stride, first_gate,
                        int32(token + stage_tokens), int32(left - stage_tokens),
                    )  # fmt: skip
                start_copies(
                    staged, int32(stage_floats - stage), convolved, step_sizes,
                    int32(token + stage_tokens), int32(left - stage_tokens), num_key_heads,
                    num_value_heads, key_head, head, part,
                )  # fmt: skip
            here = min(left, int32(stage_tokens))
            which = int32(0)
            while which < here:
                at = int32(stage + which * floats)
                load_pair(steps, 0, staged, at + step_at)
                value_at = int32(at + 2 * key_size + own_columns * warp)
                found = apply(memory, staged, at, value_at, steps[0, 0], steps[0, 1], lane)
                if is_writer(lane):
                    if normalises:
                        heads_out[which * columns + column] = found
                    else:
                        place = int64(head) * value_size + int32(part * columns + column)
                        row_size = int32(num_value_heads * value_size)
                        out[multiply_add_wide(int32(token + which), row_size, place)] = found
                which += int32(1)
            if left <= stage_tokens:
                store(states, first_column, value_size, memory, lane)
            if normalises:
                cuda.syncthreads()
                which = int32(warp)
                while which < here:
                    this = int32(token + which)
                    row = multiply_add_wide(this, num_value_heads, int64(head))
                    norm_head(
                        out, row * value_size, heads_out, int32(which * columns), gates,
                        int32(gate + which * value_size), weights, eps, lane,
                    )  # fmt: skip
                    which += int32(warps)
            token += int32(stage_tokens)
            left -= int32(stage_tokens)
            stage, gate = int32(stage_floats - stage), int32(stage_gates - gate)

    return delta_rule
