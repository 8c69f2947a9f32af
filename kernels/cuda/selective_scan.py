"""Tokens through the memory of Mamba-2's heads, one after the other.

    memory   = α · memory + b ⊗ Δ · x          of each head, [N, P]
    y        = memoryᵀ c + D · x

That is the gated delta rule of a head whose key is b, query c and value x, without what it recalls
(`delta_rule`), and b and c are those of all heads of a group, which are neighbours. So a block of
threads takes a row and 32 columns of a head, 16 where that is no multiple (heads of 80), which stay
in registers from the row's first token to its last (`delta_rule_columns`), and what tokens are made
of (`mamba2_inputs`) is copied to shared memory some tokens ahead (`delta_rule_stages`):

    stage 0    copy 0 │ tokens 0 … 7   │ copy 2         │ tokens 16 … 23      W  wait_for_copies
    stage 1           │ copy 1         │ tokens 8 … 15  │ copy 3              B  syncthreads
                      W B              W B              W B

32 columns are two warps, or four with more than 128 rows (16 one, or two), and a row that is alone
has two blocks for each head of 64, which is what a device has multiprocessors for. The price is
that each of them copies b and c: 1 KB a token, an eighth of its instructions. y is float32, for
`gated_row_norm`, which needs a token's heads together.

The products are fused as in `delta_rule_columns`; D · x comes last. A token's bits depend on the
tokens before it alone: neither on company nor on how a sequence is cut into rows. Where states lie:
`recurrent_states`; specification: `kernels.reference.mamba2`.

How to launch a layer, between the product that gives `projections` and the one of `out`:

    mamba2_inputs     at variant.grid(T, H, P, G·N)
    selective_scan    at variant.grid(R, H, G), R with the rows that have no tokens
    gated_row_norm    at variant.grid(T, G)

The state is asked for before the launch ahead has ended: it is most of what a decoding token reads.

What limits it, by argument and count, not measured: a decoding token reads and writes 4 · N · P
bytes of each head, together 4 MB of a layer with 64 of 128 × 64, 0.9 µs of an H200's memory, in 128
blocks. In a longer row a token is some 300 instructions of a warp, 192 of them the arithmetic (16
columns of 128 rows) and 30 the copies, and what is not hidden of a sum over lanes, 100 cycles: of a
row that is alone no scheduler has two warps. 64 heads are 256 of them.

Rows are independent: the longest should be the first, so that they do not begin in the last wave.

The ladder:
  v1  this.
  v2  two tokens at a time: sums over lanes of one are under way while the other is computed.
  v3  long rows in chunks, by tensor cores: what all others do, at the price of bits that depend on
      where chunks begin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from numba import cuda, float32, int32, int64, uint32

from kernels.cuda.delta_rule_columns import VECTOR, make_memory_columns, warp_columns
from kernels.cuda.delta_rule_stages import make_start_copies, token_floats
from kernels.cuda.head_lanes import make_load_run
from kernels.cuda.instructions.addresses import multiply_add_wide
from kernels.cuda.instructions.async_copies import wait_for_copies
from kernels.cuda.instructions.early_launch import fetch_ahead, let_next_begin, wait_for_previous
from kernels.cuda.instructions.exact_float32 import multiply_add
from kernels.cuda.lanes import lane_and_warp
from kernels.cuda.recurrent_states import HEAD_SIZE_STEP, MAX_HEAD_SIZE, find_row
from kernels.cuda.variant import Expectation, Pointer, Scalar, require_multiple

READ_EARLY: Final = (3, 4)
"""Of the arguments: skips, rows; the former are weights."""
FLOAT_BYTES: Final = 4
COLUMNS: Final = (32, 16)
"""Of a head that a block has: the first that divide it."""
STAGES: Final = 2
STAGE_TOKENS: Final = 8
"""With N of 256 two stages are 35 KB."""


@dataclass(frozen=True, slots=True)
class SelectiveScanVariant:
    """The compile-time parameters: `head_dim` P, and `state_size` N of b and c.

    Multiples of 16 and 32, up to 256. Raises UnsupportedVariantError.
    """

    head_dim: int
    state_size: int

    def __post_init__(self) -> None:
        require_multiple("head_dim", COLUMNS[-1], self.head_dim, MAX_HEAD_SIZE)
        require_multiple("state_size", HEAD_SIZE_STEP, self.state_size, MAX_HEAD_SIZE)

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        return f"selective_scan_p{self.head_dim}_n{self.state_size}"

    @property
    def key_size(self) -> int:
        """Elements of b, as `delta_rule_stages` calls it."""
        return self.state_size

    @property
    def value_size(self) -> int:
        """Elements of a head's x, likewise."""
        return self.head_dim

    @property
    def columns(self) -> int:
        """Columns of a head that a block has."""
        return next(columns for columns in COLUMNS if self.head_dim % columns == 0)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * (self.columns // warp_columns(self.state_size))

    @property
    def stage_tokens(self) -> int:
        """Tokens that are copied together."""
        return STAGE_TOKENS

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        states = ("int32*", "float32*", "int64", "int64")
        return ("float32*", "float32*", "float32*", "float32*", *states, "int32")

    @property
    def expectation(self) -> Expectation:
        """A lane has 64 numbers of the memory; eight warps or more are on a multiprocessor."""
        instructions = ("LDG.128", "STG.128", "LDGSTS.128", "LDS.128", "FFMA", "SHFL", "BAR")
        return Expectation(128, instructions, begins_early=True, reads_early=READ_EARLY)

    def grid(self, num_rows: int, num_heads: int, num_groups: int = 1) -> tuple[int, int, int]:
        """Return the launch grid; `num_rows`: with those that have no tokens."""
        parts = self.head_dim // self.columns
        return (num_heads // num_groups * parts, num_rows, num_groups)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        return make_selective_scan(self)


def variants(*, every: bool) -> list[SelectiveScanVariant]:
    """Return a spread of the variants, or those of the models known to us and some others."""
    if every:
        shapes = (
            (64, 128), (80, 128), (32, 32), (96, 160), (128, 64), (256, 96), (64, 256), (256, 256),
            (128, 256), (16, 192),
        )  # fmt: skip
        return [SelectiveScanVariant(*shape) for shape in shapes]
    return [
        SelectiveScanVariant(64, 128),
        SelectiveScanVariant(80, 128),
        SelectiveScanVariant(96, 160),
        SelectiveScanVariant(64, 256),
    ]


def make_selective_scan(variant: SelectiveScanVariant) -> Callable[..., None]:
    """Return the kernel with its compile-time parameters bound."""
    head_dim, state_size, stage_tokens = variant.head_dim, variant.state_size, variant.stage_tokens
    columns = variant.columns
    parts, warps = head_dim // columns, variant.threads // 32
    floats = token_floats(state_size, columns)
    step_at = floats - VECTOR  # of Δ and α among a token's
    stage_floats = stage_tokens * floats
    staged_floats = STAGES * stage_floats
    memory_floats = state_size * head_dim
    fetched_floats = memory_floats // (parts * warps)
    fetched_bytes = FLOAT_BYTES * fetched_floats
    own = make_memory_columns(state_size, recalls=False)
    own_columns, lane_rows = warp_columns(state_size), own.lane_rows
    load, store, clear, apply = own.load, own.store, own.clear, own.apply
    column_of, is_writer = own.column_of, own.is_writer
    load_pair = make_load_run("float32", 2)
    start_copies = make_start_copies(variant)

    def selective_scan(
        out: Pointer,
        convolved: Pointer,
        step_sizes: Pointer,
        skips: Pointer,
        rows: Pointer,
        states: Pointer,
        state_stride: Scalar,
        memory_start: Scalar,
        num_heads: Scalar,
    ) -> None:
        """Take row blockIdx.y through some columns of a head of group blockIdx.z.

        `out`: float32 [T, H·P]. `convolved`, `step_sizes`: as `mamba2_inputs` leaves them. `skips`:
        [H], D. `memory_start`: where the layer's memory begins in a state, behind its inputs.
        The others: as in `recurrent_states`.
        """
        let_next_begin()
        lane, warp = lane_and_warp()
        group, num_groups = int32(cuda.blockIdx.z), int32(cuda.gridDim.z)
        head, part = int32(cuda.blockIdx.x // parts), int32(cuda.blockIdx.x % parts)
        head += int32(group * (cuda.gridDim.x // parts))
        first, count, state, is_new = find_row(rows, int64(cuda.blockIdx.y))
        of_head = int64(state) * state_stride + memory_start + int64(head) * memory_floats
        if count > 0 and not is_new and lane == 0:
            share = int32((part * warps + warp) * fetched_floats)
            fetch_ahead(states, of_head + share, uint32(fetched_bytes))
        skip = skips[head]
        wait_for_previous()
        if count <= 0:
            return

        staged = cuda.shared.array(staged_floats, float32, alignment=16)
        memory = cuda.local.array((lane_rows, VECTOR), float32)
        steps = cuda.local.array((1, 2), float32)
        start_copies(
            staged, int32(0), convolved, step_sizes, first, count, num_groups, num_heads, group,
            head, part,
        )  # fmt: skip
        first_column = of_head + int32(part * columns + own_columns * warp)
        if is_new:
            clear(memory)
        else:
            load(memory, states, first_column, head_dim, lane)

        column = int32(own_columns * warp + column_of(lane))
        token, left, stage = int32(first), int32(count), int32(0)
        while left > 0:
            wait_for_copies()
            cuda.syncthreads()
            if left > stage_tokens:
                start_copies(
                    staged, int32(stage_floats - stage), convolved, step_sizes,
                    int32(token + stage_tokens), int32(left - stage_tokens), num_groups, num_heads,
                    group, head, part,
                )  # fmt: skip
            here = min(left, int32(stage_tokens))
            which = int32(0)
            while which < here:
                at = int32(stage + which * floats)
                load_pair(steps, 0, staged, at + step_at)
                values_at = int32(at + 2 * state_size)
                value_at = int32(values_at + own_columns * warp)
                found = apply(memory, staged, at, value_at, steps[0, 0], steps[0, 1], lane)
                if is_writer(lane):
                    place = int64(head) * head_dim + int32(part * columns + column)
                    row_size = int32(num_heads * head_dim)
                    target = multiply_add_wide(int32(token + which), row_size, place)
                    out[target] = multiply_add(skip, staged[values_at + column], found)
                which += int32(1)
            if left <= stage_tokens:
                store(states, first_column, head_dim, memory, lane)
            token += int32(stage_tokens)
            left -= int32(stage_tokens)
            stage = int32(stage_floats - stage)

    return selective_scan
