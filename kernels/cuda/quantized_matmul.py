"""Rows times a quantised weight matrix that stays quantised: y[m, n] = Σ_k x[m, k] · W[n, k].

Made for decode: M from 1 to 64 rows of x, [M, K] in bfloat16 or float16, against W [N, K] in one of
the formats of `quantized_layout`, whose memory layout this kernel reads; y is [M, N] in x's type,
or in float32 for logits. Its rows may lie further apart than N, so that matrices of several formats
that read the same x write one y side by side. Reading W is the work. A weight of Q4_0 is 0.56
bytes, so a multiprocessor of an H200 is fed some 37 weights a cycle (4.8 TB/s, 132 of them,
1.75 GHz), and has to widen, multiply and sum them on the side.

Who does what. A block of threads is 8 warps. A warp owns one panel of 32 rows of W and a *strand*
of its k's, that is a run of its tiles; a panel is dealt out to 1, 2, 4 or 8 strands, and a block
has 8 / strands panels. With 4 strands of K / 32 = 14 tiles:

    tiles          0 … 3     4 … 7     8 … 11    12, 13
    panel 2·b      warp 0    warp 1    warp 2    warp 3
    panel 2·b + 1  warp 4    warp 5    warp 6    warp 7

In a warp, W is the A operand of the tensor cores and x the B operand: two tiles of 16 rows of W
against `columns` / 8 tiles of 8 rows of x, so that a widened weight serves all of them. A lane has,
of four rows i of W, eight neighbouring k's, and of a row of x the same eight, one vector:

    A, row tile t, step s   a0  row 2·t,     k's 4·s, 4·s + 1      a2  row 2·t,     k's 4·s + 2, + 3
                            a1  row 2·t + 1, k's 4·s, 4·s + 1      a3  row 2·t + 1, k's 4·s + 2, + 3
    B, step s               b0  word 2·s of the vector             b1  word 2·s + 1
    C                       c0, c1  y of row 2·t and two rows of x  c2, c3  y of row 2·t + 1

Scales. The products of a tile are summed with the bare integers, which bfloat16 and float16 hold
exactly; the sum of 32 k's is multiplied once by its d, in float32. Scaling the fragments instead
would round every weight to 16 bits (2⁻⁹ in bfloat16), and takes eight instructions on pairs for the
four on sums that replace them at 8 rows of x. With more rows the sums cost more, but never more
than two instructions beside one of the tensor cores, which takes longer than both. The minimum of
Q4_1 is multiplied with the sum of x's k's, which is the product with a tile of ones: two tensor
instructions more for both tiles of W, and no lane has to ask another for anything.

What is in flight. By Little's law 4.8 TB/s over some 0.8 µs are 30 KB a multiprocessor. A lane
keeps a *ring* of tiles on their way in registers: a tile is multiplied, then its registers are
filled with the one a round later. At 8 rows these are 8 vectors of weights, 37 KB for 8 warps, and
two blocks fit on a multiprocessor; beyond, one block, with what rings the registers allow. The
vectors of x, which come from the second cache, are asked for no earlier than four tiles ahead.

Order. A sum is made tile by tile within a strand, then over the strands, 0 first. How many strands
there are depends on N alone (`quantized_strands`), each product and sum of tiles is fused or not by
the source's word, and a tensor core's C depends on no other column. So an output's bits depend on
its row of x, on W and on the generation of tensor cores, and on nothing else: not on M, not on the
rows beside it, not on the variant that M asks for.

Limits. At 8 rows it is the memory, by design: a tile of Q4_0 is 576 bytes, which take 28 cycles to
arrive, time for 110 instructions; the loop has 73 (Q4_1: 89 of 123; Q8_0: 92 of 209). From some 32
rows on it is the tensor cores: 16 of their instructions a tile at two cycles or more each, 24 with
a minimum. 64 rows are two blocks side by side, the weights coming from the second cache for one of
them, and x burdens that cache: 4 KB a tile at 64 rows, shared by the panels of a block.

The ladder:
  v1  this. Registers only, no shared memory but for the sums at the end. Compiled and simulated;
      `make gpu` measures it.
Next rungs: weights marked to leave the caches first (they go by the ordinary read-only path); x in
shared memory for more panels, for M > 16; a last-block merge of strands, for small N and large K.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from numba import cuda, float32, int32, int64, uint32

from kernels.cuda.errors import UnsupportedVariantError
from kernels.cuda.instructions.conversions import CONVERSIONS, FULL_WARP, PAIR_CONVERSIONS
from kernels.cuda.instructions.exact_float32 import multiply_add
from kernels.cuda.instructions.small_integers import WIDEN_BYTES, WIDEN_NIBBLES
from kernels.cuda.instructions.tiles import MULTIPLY_TILES
from kernels.cuda.instructions.vectors import load_constant_pair, load_constant_vector
from kernels.cuda.quantized_layout import FORMATS, GROUP, PANEL_ROWS, VECTOR_BYTES
from kernels.cuda.quantized_strands import COLUMNS, WARPS, blocks_of
from kernels.cuda.variant import STORAGE_TYPES, Expectation, Pointer, Scalar

DTYPES = ("bfloat16", "float16")
Array: TypeAlias = Any  # a local array of the kernel

ONES = {"bfloat16": 0x3F803F80, "float16": 0x3C003C00}  # two ones in a word

# Floats from one row of x to the next in the shared sums of a warp: 4 more than the 32 rows of W,
# so that the lanes of a warp, which write rows 2·quad of x, hit different banks.
ROW_PITCH = PANEL_ROWS + 4


@dataclass(frozen=True, slots=True)
class QuantizedMatmulVariant:
    """The compile-time parameters of one product.

    `weights` names the format, `dtype` is that of x and y, `columns` how many rows of x a block
    takes; `writes_float32`: y is not rounded. Raises UnsupportedVariantError for what the kernel is
    not written for.
    """

    weights: str
    dtype: str
    columns: int
    writes_float32: bool = False

    def __post_init__(self) -> None:
        for field, allowed in (
            ("weights", tuple(FORMATS)),
            ("dtype", DTYPES),
            ("columns", COLUMNS),
        ):
            if getattr(self, field) not in allowed:
                choices = ", ".join(map(str, allowed))
                raise UnsupportedVariantError(field, f"one of {choices}", getattr(self, field))

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        output = "_to_float32" if self.writes_float32 else ""
        return f"quantized_matmul_{self.weights.lower()}_{self.dtype}_m{self.columns}{output}"

    @property
    def out_dtype(self) -> str:
        """The dtype of y."""
        return "float32" if self.writes_float32 else self.dtype

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * WARPS

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        out = STORAGE_TYPES[self.out_dtype] + "*"
        return (out, "uint16*", "uint8*", "int64", "int64", "int64", "int32", "int64")

    @property
    def rings(self) -> tuple[int, int]:
        """Tiles of W and tiles of x that are on their way to a lane; the second divides the first.

        As many as registers allow.
        """
        if self.columns == 32:
            return (2, 2)
        if self.weights == "Q8_0" or (self.weights, self.columns) == ("Q4_1", 16):
            return (4, 4)
        return (8, 4)

    @property
    def expectation(self) -> Expectation:
        """Up to 16 rows two blocks share a multiprocessor, beyond that one has it to itself."""
        resident_blocks = 2 if self.columns == 8 else 1
        instructions = ("HMMA", "LDG.128", "LOP3", "FFMA")
        registers = {8: 128, 16: 255, 32: 240}[self.columns]
        return Expectation(registers, instructions, resident_blocks=resident_blocks)

    def grid(
        self, num_rows: int, num_outputs: int, num_inputs: int, strand_bits: int
    ) -> tuple[int, int, int]:
        """Return the launch grid for x [M, K] and W [N, K]; `strand_bits` is `strand_bits_of` N.

        M may exceed `columns`: weights are then read once for every `columns` rows, by blocks side
        by side. Raises UnsupportedVariantError.
        """
        for field, value in (("num_rows", num_rows), ("num_outputs", num_outputs)):
            if value < 1:
                raise UnsupportedVariantError(field, "at least 1", value)
        if num_inputs < GROUP or num_inputs % GROUP:
            raise UnsupportedVariantError("num_inputs", f"a multiple of {GROUP}", num_inputs)
        return (-(-num_rows // self.columns), blocks_of(num_outputs, strand_bits), 1)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        return make_quantized_matmul(self)


def variants(*, every: bool) -> list[QuantizedMatmulVariant]:
    """Return a spread of the variants, or every one there is."""
    if every:
        return [
            QuantizedMatmulVariant(weights, dtype, columns, writes_float32)
            for weights in FORMATS
            for dtype in DTYPES
            for columns in COLUMNS
            for writes_float32 in (False, True)
        ]
    return [
        QuantizedMatmulVariant("Q8_0", "bfloat16", 8, writes_float32=True),
        QuantizedMatmulVariant("Q4_0", "bfloat16", 16),
        QuantizedMatmulVariant("Q4_1", "float16", 32),
    ]


def make_quantized_matmul(variant: QuantizedMatmulVariant) -> Callable[..., None]:
    """Return the kernel with its compile-time parameters bound."""
    fmt = FORMATS[variant.weights]
    num_vectors, tile_bytes, weight_bytes = fmt.num_vectors, fmt.tile_bytes, fmt.scales_at
    group_bytes, has_minimum, is_bytes = fmt.group_bytes, fmt.has_minimum, fmt.bits == 8
    columns, (ring, input_ring) = variant.columns, variant.rings
    column_tiles = columns // 8
    num_totals = 2 * column_tiles
    ring_vectors, ring_inputs = ring * num_vectors, input_ring * column_tiles
    warp_sums = columns * ROW_PITCH
    block_sums = WARPS * warp_sums
    ones = ONES[variant.dtype]
    multiply_tiles = MULTIPLY_TILES[variant.dtype]
    widen_nibbles = WIDEN_NIBBLES[variant.dtype, fmt.offset]
    widen_bytes = WIDEN_BYTES[variant.dtype]
    load_scales = load_constant_vector if has_minimum else load_constant_pair
    low, high = PAIR_CONVERSIONS["float16"].low, PAIR_CONVERSIONS["float16"].high
    from_float32 = CONVERSIONS[variant.out_dtype][1]

    @cuda.jit(device=True, inline="always")
    def ask_for_weights(
        weights: Array, scale_words: Array, slot: Scalar, packed: Pointer, at: Scalar, lane: Scalar
    ) -> None:
        """Start reading the tile at byte `at` into a slot of the ring."""
        for v in range(num_vectors):
            place = at + v * VECTOR_BYTES + lane * 16
            load_constant_vector(weights, slot * num_vectors + v, packed, place)
        place = at + weight_bytes + lane // 4 * group_bytes
        load_scales(scale_words, slot, packed, place)

    @cuda.jit(device=True, inline="always")
    def ask_for_inputs(
        inputs: Array, slot: Scalar, x: Pointer, at: Scalar, rows_at: Array, is_wanted: Scalar
    ) -> None:
        """Start reading x at element `at` of its rows into a slot; zeros if it is not wanted."""
        first = slot % input_ring * column_tiles
        if is_wanted:
            for c in range(column_tiles):
                load_constant_vector(inputs, first + c, x, at + rows_at[c])
        else:
            for i in range(first, first + column_tiles):
                for j in range(4):
                    inputs[i, j] = uint32(0)

    def quantized_matmul(
        out: Pointer,
        x: Pointer,
        packed: Pointer,
        num_rows: Scalar,
        num_outputs: Scalar,
        num_inputs: Scalar,
        strand_bits: Scalar,
        out_width: Scalar,
    ) -> None:
        """Multiply `columns` rows of x, from blockIdx.x, with the panels of blockIdx.y.

        `out`: [M, N], `out_width` elements from row to row. `x`: [M, K]. `packed`: W [N, K] as
        `quantized_layout` draws it. `num_rows` M, `num_outputs` N, `num_inputs` K, a multiple of
        32.
        """
        lane = cuda.threadIdx.x % 32
        group = lane // 4
        quad = lane % 4
        # From lane 0 to all: so the compiler knows that a warp does not part over it.
        warp = cuda.shfl_sync(FULL_WARP, cuda.threadIdx.x // 32, 0)
        strands = int32(1 << strand_bits)
        first_panel = int64(cuda.blockIdx.y) * (WARPS >> strand_bits)
        panel = first_panel + (warp >> strand_bits)
        first_row = int64(cuda.blockIdx.x) * columns

        # The warp's tiles. A warp behind the last panel has none.
        num_tiles = num_inputs // GROUP
        strand_tiles = (num_tiles + strands - 1) >> strand_bits
        first_tile = (warp & (strands - 1)) * strand_tiles
        tiles_left = int32(min(strand_tiles, num_tiles - first_tile))
        if panel * PANEL_ROWS >= num_outputs:
            tiles_left = int32(0)

        # total[t * column_tiles + c]: y of row tile t of W and row tile c of x, as a C fragment.
        total = cuda.local.array((num_totals, 4), float32)
        for i in range(num_totals):
            for j in range(4):
                total[i, j] = float32(0)

        # The rings: slot i has the i-th tile of a round. A slot behind the last tile keeps what it
        # had, which its zeros of x make harmless. Rows behind the last one of x repeat it: what
        # becomes of them is not written.
        weights = cuda.local.array((ring_vectors, 4), uint32)
        scale_words = cuda.local.array((ring, 4), uint32)
        inputs = cuda.local.array((ring_inputs, 4), uint32)
        rows_at = cuda.local.array(column_tiles, int32)
        for c in range(column_tiles):
            row = min(8 * c + group, num_rows - 1 - first_row)
            rows_at[c] = int32(row * num_inputs)
        inputs_at = first_row * num_inputs + first_tile * GROUP + 8 * quad
        tile_at = (panel * num_tiles + first_tile) * tile_bytes
        for slot in range(ring):
            for j in range(4):
                scale_words[slot, j] = uint32(0)
            if slot < tiles_left:
                at = tile_at + slot * tile_bytes
                ask_for_weights(weights, scale_words, slot, packed, at, lane)
        for slot in range(input_ring):
            at = inputs_at + slot * GROUP
            ask_for_inputs(inputs, slot, x, at, rows_at, slot < tiles_left)

        pairs = cuda.local.array((2, 4), uint32)
        sums = cuda.local.array((1, 4), float32)
        input_sums = cuda.local.array((column_tiles, 4), float32)
        scales = cuda.local.array(4, float32)
        minima = cuda.local.array(4, float32)
        while tiles_left > 0:
            for slot in range(ring):
                first_input = slot % input_ring * column_tiles
                for half in range(2):
                    word = scale_words[slot, half]
                    scales[2 * half], scales[2 * half + 1] = low(word), high(word)
                if has_minimum:
                    for half in range(2):
                        word = scale_words[slot, 2 + half]
                        minima[2 * half], minima[2 * half + 1] = low(word), high(word)
                    # Σ_k of the lane's two rows of x, once for each half of a C fragment.
                    one = uint32(ones)
                    for c in range(column_tiles):
                        for j in range(4):
                            input_sums[c, j] = float32(0)
                        for step in range(2):
                            i, j = first_input + c, 2 * step
                            b = (inputs[i, j], inputs[i, j + 1])
                            multiply_tiles(input_sums, c, (one, one, one, one), b)
                for t in range(2):
                    # pairs[h, j]: of the lane's row 2·t + h, the k's 2·j and 2·j + 1.
                    for h in range(2):
                        if is_bytes:
                            v = slot * num_vectors + t
                            widen_bytes(pairs, h, weights[v, 2 * h], weights[v, 2 * h + 1])
                        else:
                            widen_nibbles(pairs, h, weights[slot, 2 * t + h])
                    for c in range(column_tiles):
                        for j in range(4):
                            sums[0, j] = float32(0)
                        for step in range(2):
                            i, j = first_input + c, 2 * step
                            a = (pairs[0, j], pairs[1, j], pairs[0, j + 1], pairs[1, j + 1])
                            multiply_tiles(sums, 0, a, (inputs[i, j], inputs[i, j + 1]))
                        i = t * column_tiles + c
                        for j in range(4):
                            row = 2 * t + j // 2
                            total[i, j] = multiply_add(scales[row], sums[0, j], total[i, j])
                            if has_minimum:
                                total[i, j] = multiply_add(
                                    minima[row], input_sums[c, j], total[i, j]
                                )

                # The slots are free: ask for what they get next.
                if slot + ring < tiles_left:
                    at = tile_at + (slot + ring) * tile_bytes
                    ask_for_weights(weights, scale_words, slot, packed, at, lane)
                is_wanted = slot + input_ring < tiles_left
                at = inputs_at + (slot + input_ring) * GROUP
                ask_for_inputs(inputs, slot, x, at, rows_at, is_wanted)
            tiles_left = int32(tiles_left - ring)
            tile_at += ring * tile_bytes
            inputs_at += ring * GROUP

        # The strands' sums: laid down [warp, row of x, row of W], then added in the order of the
        # strands by threads that are neighbours in y.
        strand_sums = cuda.shared.array(block_sums, float32)
        warp = cuda.threadIdx.x // 32  # anew, so that no register keeps it through the loop
        first_sum = warp * warp_sums + 2 * quad * ROW_PITCH + group
        for c in range(column_tiles):
            for t in range(2):
                for j in range(4):
                    at = first_sum + (8 * c + j % 2) * ROW_PITCH + 16 * t + 8 * (j // 2)
                    strand_sums[at] = total[t * column_tiles + c, j]
        cuda.syncthreads()
        # Warp w takes the w-th row of x of each tile, for each panel.
        for c in range(column_tiles):
            row = first_row + 8 * c + warp
            output = first_panel * PANEL_ROWS + lane
            at = (8 * c + warp) * ROW_PITCH + lane
            at_end = at + WARPS * warp_sums
            while at < at_end:
                value = strand_sums[uint32(at)]
                next_panel = at + (warp_sums << strand_bits)
                at += warp_sums
                while at < next_panel:
                    value += strand_sums[uint32(at)]
                    at += warp_sums
                if row < num_rows and output < num_outputs:
                    out[row * out_width + output] = from_float32(value)
                output += PANEL_ROWS

    return quantized_matmul
