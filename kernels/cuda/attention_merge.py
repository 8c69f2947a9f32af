"""The merge after split decode attention: a row's chunks, in order, into its output.

    peak, mass, sum  ←  nothing
    for each chunk c of the row:
        top   = max(peak, peak_c)
        mass  = mass · 2^(peak - top) + mass_c · 2^(peak_c - top)
        sum   = sum  · 2^(peak - top) + sum_c  · 2^(peak_c - top)
    out = sum / mass

This is the merge by log-sum-exp (the weight of a chunk is its share of Σ 2^score), kept as peak and
mass apart, and the very instructions by which the unsplit kernel merges as it goes, in the same
order: the bits agree (`attention_chunks`).

Who does what. The grid is (S rows, U units, entries): a block of threads has the shape of a decode
block, and each thread merges entry blockIdx.z of what that thread of the decode blocks left in the
partials (drawn in `attention_partials`), so all reads of a warp are 128 bytes. A row has 64 chunks
at the most; the reads of 16 are under way at a time, then the sums are a chain of one fused step a
chunk. A row of length 0 gives zeros.

What limits it: latency. The partials are a few percent of the keys and values they came from and
still in the second cache; four rounds of reads and the launch are all there is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from numba import cuda, float32, int32, int64

from kernels.cuda.attention_chunks import (
    MAX_CHUNKS,
    NO_PEAK,
    cut_row,
)
from kernels.cuda.attention_decode_float32 import float32_layout
from kernels.cuda.attention_decode_layout import tensor_layout
from kernels.cuda.attention_partials import (
    THREADS,
    PartialLayout,
    make_partial_functions,
    quotient,
    scaled_sum,
    shares,
)
from kernels.cuda.attention_variant import DTYPES, HEAD_SIZES, MAX_GROUP, require_supported
from kernels.cuda.instructions.conversions import CONVERSIONS
from kernels.cuda.variant import STORAGE_TYPES, Expectation, Pointer

CHUNKS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class MergeVariant:
    """The compile-time parameters of the merge after a `DecodeVariant`, which makes it.

    Raises UnsupportedVariantError.
    """

    dtype: str
    head_size: int
    group: int

    def __post_init__(self) -> None:
        require_supported(self.dtype, self.head_size, self.group)

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        return f"attention_merge_{self.dtype}_d{self.head_size}_g{self.group}"

    @property
    def layout(self) -> PartialLayout:
        """How the decode kernel's results lie in its threads."""
        if self.dtype == "float32":
            return float32_layout(self.group)
        return tensor_layout(self.head_size, self.group)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return THREADS

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        return (STORAGE_TYPES[self.dtype] + "*", "float32*", "int32*")

    @property
    def expectation(self) -> Expectation:
        """The results of 16 chunks at a time, and the few numbers they are merged into."""
        return Expectation(128, ("LDG", "FFMA", "MUFU"))

    def grid(self, num_rows: int, num_kv_heads: int) -> tuple[int, int, int]:
        """Return the launch grid."""
        return (num_rows, num_kv_heads * self.layout.parts, self.layout.entries)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        return make_attention_merge(self)


def variants(*, every: bool) -> list[MergeVariant]:
    """Return a spread of the variants, or every one there is."""
    if every:
        return [
            MergeVariant(dtype, head_size, group)
            for dtype in DTYPES
            for head_size in HEAD_SIZES
            for group in range(1, MAX_GROUP + 1)
        ]
    return [
        MergeVariant("bfloat16", 128, 4),
    ]


def make_attention_merge(variant: MergeVariant) -> Callable[..., None]:
    """Return the kernel with its compile-time parameters bound."""
    layout = variant.layout
    entries, slots, record = layout.entries, layout.slots, layout.record
    entries_of_slot = entries // slots
    functions = make_partial_functions(layout, variant.dtype, variant.head_size, variant.group)
    find_output = functions.find_output
    from_float32 = CONVERSIONS[variant.dtype][1]

    def attention_merge(out: Pointer, partials: Pointer, seq_lens: Pointer) -> None:
        """Merge entry blockIdx.z of unit blockIdx.y of row blockIdx.x.

        `out`: [S, H, D]. `partials`: as the decode kernel left it. `seq_lens`: [S].
        """
        row, unit = int64(cuda.blockIdx.x), int64(cuda.blockIdx.y)
        entry = int32(cuda.blockIdx.z)
        thread = int32(cuda.threadIdx.x)
        num_tiles, chunk_tiles = cut_row(seq_lens[row])
        num_chunks = int32((num_tiles + chunk_tiles - 1) // chunk_tiles)

        peak = NO_PEAK
        mass = float32(0)
        total = float32(0)
        sums = cuda.local.array(CHUNKS_AT_ONCE, float32)
        peaks = cuda.local.array(CHUNKS_AT_ONCE, float32)
        masses = cuda.local.array(CHUNKS_AT_ONCE, float32)
        stride = int64(cuda.gridDim.y) * (record * THREADS)  # from a chunk to the next
        first = row * MAX_CHUNKS * stride + unit * (record * THREADS) + thread
        slot = entry // entries_of_slot
        for first_chunk in range(0, num_chunks, CHUNKS_AT_ONCE):
            # All reads first, so that they are under way together; past the end the last again.
            for k in range(CHUNKS_AT_ONCE):
                place_of_chunk = first + min(first_chunk + k, num_chunks - 1) * stride
                sums[k] = partials[place_of_chunk + entry * THREADS]
                peaks[k] = partials[place_of_chunk + (entries + slot) * THREADS]
                masses[k] = partials[place_of_chunk + (entries + slots + slot) * THREADS]
            for k in range(CHUNKS_AT_ONCE):
                if first_chunk + k < num_chunks:
                    top, shrink, share = shares(peak, peaks[k])
                    mass = scaled_sum(mass, shrink, masses[k], share)
                    total = scaled_sum(total, shrink, sums[k], share)
                    peak = top

        is_output, output = find_output(row, unit, entry, thread // 32, thread % 32)
        if is_output:
            out[output] = from_float32(quotient(total, mass))

    return attention_merge
