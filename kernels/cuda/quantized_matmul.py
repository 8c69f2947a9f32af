"""Rows times a quantised weight matrix that stays quantised: y[m, n] = Σ_k x[m, k] · W[n, k].

Made for decode: M from 1 to 64 rows of x, [M, K] in bfloat16 or float16, against W [N, K] in one of
the formats of `quantized_formats`, laid out as `quantized_layout` draws it; y is [M, N] in x's
type, or in float32 for logits. Its rows may lie further apart than N, so that matrices of several
formats that read the same x write one y side by side. The kernel is `quantized_matmul_tensor`; here
is what can be had of it, and why it is so. Reading W is the work. A weight of Q4_0 is 0.56 bytes,
so a multiprocessor of an H200 is fed some 37 weights a cycle (4.8 TB/s, 132 of them, 1.75 GHz), and
has to widen, multiply and sum them on the side.

Who does what. A block of threads is 8 warps. A warp owns one panel of 32 rows of W and a *strand*
of its k's, that is a run of its units (spans, but where eight share numbers); a panel is dealt out
to 1, 2, 4 or 8 strands, and a block has 8 / strands panels. With 4 strands of 14 spans:

    spans          0 … 3     4 … 7     8 … 11    12, 13
    panel 2·b      warp 0    warp 1    warp 2    warp 3
    panel 2·b + 1  warp 4    warp 5    warp 6    warp 7

Scales. The products of a span, the k's that share a scale, are summed with the bare integers or
floats of four or eight bits, which bfloat16 and float16 hold exactly; the sum is multiplied once by
its d, in float32. Scaling the fragments instead would round every weight to 16 bits (2⁻⁹ in
bfloat16), and take 16 instructions on pairs a tile where the sums take 8 a span at 8 rows of x, 2 a
tile if a span has four. A zero point is taken off while the weights are widened, by the instruction
that takes off a constant anyway (of 8 bits by one more): differences of integers are exact too. The
minimum of Q4_1 is no integer: it is multiplied with the sum of x's k's, which is the product with a
tile of ones, two tensor instructions more for both tiles of W, and no lane has to ask another for
anything.

Scales of shared formats, d · s and m · n, are made where they are needed, exactly, by two
instructions each (`instructions.whole_scales`). A span of Q6_K has two runs with a scale each, and
a tensor instruction takes four k's of each quad: x is read as halves of vectors, so that the first
step of a tile is the first run, and each run has its own sum. Five and six bits are put together
in as few instructions as their halves' places allow (`k_quant_layout`): 51 and 50 for a lane's 32
weights, where planes of nibbles and of upper bits would take 75.

What is in flight. By Little's law 4.8 TB/s over some 0.8 µs are 30 KB a multiprocessor. A lane
keeps a *ring* of tiles on their way in registers: a tile is multiplied, then its registers are
filled with the one a round later. At 8 rows these are 8 vectors of weights, 33 to 40 KB for 8
warps, and two blocks fit on a multiprocessor; beyond, one block, with what rings the registers
allow. The vectors of x, which come from the second cache, are asked for no earlier than four tiles
ahead.

Order. A sum is made span by span within a strand, then over the strands, 0 first. How many strands
there are depends on N alone (`quantized_strands`), each product and sum of spans is fused or not by
the source's word, and a tensor core's C depends on no other column. So an output's bits depend on
its row of x, on W, on how long its spans are and on the generation of tensor cores, and on nothing
else: not on M, not on the rows beside it, not on the variant that M asks for.

The gate. With `gates` a panel is 16 rows of a gate and the 16 rows beside them, so that the thread
that adds up the strands has both sums, and writes the activation of the one times the other.

Biases are read by whoever has added up the strands, and fetched into the second cache before.

Experts. With `of_experts` W is the matrices of all experts of a mixture, and a block's rows are a
tile of pairs (`expert_tiles`): which, and whose, it reads first, so nothing is fetched before that.
Strands are as many as all experts of a token ask for together.

Limits. At 8 rows it is the memory, by design. Cycles that a tile takes to arrive are time for four
instructions each, and the loop has, on 9.0:

                 bytes a tile   time for   bfloat16   float16
    Q4_0             576          111         68         61
    Q4_0_G128        528          102         59         51
    Q4_1             640          123         85         77
    Q4_Z_G128        532          102         64         57
    Q8_0            1088          209         82         82
    Q8_0_G128       1040          200         73         73
    Q8_Z_G128       1048          202         95         95
    MXFP4            544          105         76        109
    FP8             1152          221         87         74
    FP8_G128        1056          203         80         65
    Q5_0             704          135         77         73
    Q5_1             768          148         93         89
    Q4_K             592          114         96         98
    Q5_K             720          139        105        102
    Q6_K             840          162        111        111

44 of the 59 widen a lane's 32 weights in bfloat16: 16 to mask, 16 to take 136 off, 12 to shift, of
which float16 needs 4. From some 32 rows on it is the tensor cores: 16 of their instructions a tile
at two cycles or more each, 24 with a minimum; around them are 120 others with Q4_0, and 75 with
Q4_0_G128. 64 rows are two blocks side by side, the weights coming from the second cache for one of
them. x burdens that cache: with 8 strands no warp shares it, and 8 rows are 512 bytes a tile, as
many as the weights; 64 are 4 KB.

The ladder:
  v1  a scale for every tile of 32 k's, beside its weights. Registers only, no shared memory but for
      the sums at the end.
  v2  one for every span; whole zero points; panels whose weights begin on lines of 128 bytes.
  v3  the same, and may begin before the launch ahead has ended, its first round fetched into the
      second cache (`instructions.early_launch`). Compiled and simulated; `make gpu` measures it.
  v4  weights of five and six bits and shared scales (no instruction of the others is another one).
Next rungs: weights marked to leave the caches first (they go by the ordinary read-only path); x in
shared memory for more panels, for M > 16.
Looked at, not built: more than 8 strands for the 2048 outputs of a small model, which are 64 blocks
with 2.1 MB on their way where Little's law wants 3.9. At K = 2048 these are nearly all that there
is of W in Q4_0 (2.4 MB): nothing could be asked for earlier. At K = 8192 it is 3.6 µs instead of
2.0, by count. Two blocks a panel would have to meet: sums stored, a fence, a counter, sums read,
one trip to the second cache after the other, for about as long as is to be gained. Blocks of 16
warps (4.2 MB; the instructions of 64 multiprocessors then allow 3.8 TB/s) would save 1.1 µs, but
with 16 or 32 rows there are no registers for 16 warps: a block would take its strands in two
passes, to give the same bits. `make gpu` times these sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kernels.cuda.activation import CLAMPED, GATES, SILU
from kernels.cuda.errors import UnsupportedVariantError
from kernels.cuda.quantized_formats import FORMATS, GATE_TURN, PANEL_ROWS
from kernels.cuda.quantized_matmul_tensor import make_quantized_matmul
from kernels.cuda.quantized_strands import COLUMNS, WARPS, blocks_of, strand_bits_of
from kernels.cuda.variant import STORAGE_TYPES, Expectation, require_multiple, require_one_of

DTYPES = ("bfloat16", "float16")
KINDS = (
    (False, False, False),
    (True, False, False),
    (False, True, False),
    (False, False, True),
    (False, True, True),
)
"""`writes_float32`, `of_experts` and `gates` of the variants that a model has a use for."""
BIASED = ((False, False, SILU), (True, False, SILU), (True, True, CLAMPED))
"""`of_experts`, `gates` and `activation` of those with biases."""


@dataclass(frozen=True, slots=True)
class QuantizedMatmulVariant:
    """The compile-time parameters of one product.

    `weights` names the format, `dtype` is that of x and y, `columns` how many rows of x a block
    takes; `writes_float32`: y is not rounded; `of_experts`: rows are those of `expert_tiles`, W all
    experts' matrices; `gates`: W has a gate's rows and those it gates, 16 of each in turns;
    `activation`: of that gate; `biased`: each row of W has a bias, added before anything is gated
    or rounded. Raises UnsupportedVariantError for what the kernel is not written for.
    """

    weights: str
    dtype: str
    columns: int
    writes_float32: bool = False
    of_experts: bool = False
    gates: bool = False
    activation: str = SILU
    biased: bool = False

    def __post_init__(self) -> None:
        require_one_of("weights", FORMATS, self.weights)
        require_one_of("dtype", DTYPES, self.dtype)
        require_one_of("columns", COLUMNS, self.columns)
        if self.gates or self.of_experts or self.biased:
            require_one_of("writes_float32", (False,), self.writes_float32)
        require_one_of("activation", GATES if self.gates else (SILU,), self.activation)

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        output = "_to_float32" if self.writes_float32 else "_gated" if self.gates else ""
        if self.activation != SILU:
            output += f"_{self.activation}"
        if self.biased:
            output += "_biased"
        kind = "quantized_experts" if self.of_experts else "quantized_matmul"
        return f"{kind}_{self.weights.lower()}_{self.dtype}_m{self.columns}{output}"

    @property
    def panel_outputs(self) -> int:
        """Outputs of a panel."""
        return GATE_TURN if self.gates else PANEL_ROWS

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
        rows = ("int32*", "int32*", "int32") if self.of_experts else ("int64",)
        sizes = ("int64", "int64", "int32", "int64")
        return (out, "uint16*", "uint8*", *rows, *sizes, "uint16*")

    @property
    def rings(self) -> tuple[int, int]:
        """Tiles of W and tiles of x that are on their way to a lane; the second divides the first.

        As many as registers allow.
        """
        fmt = FORMATS[self.weights]
        if self.columns == 32:
            return (2, 2)
        if self.columns == 16 and fmt.runs == 2:  # of twice the sums
            return (4, 2)
        if fmt.bits > 5 or self.weights == "Q5_1":
            return (4, 4)
        if self.columns == 16 and self.weights in ("Q4_1", "Q4_Z", "Q5_0", "Q4_K", "Q5_K"):
            return (4, 4)
        if self.dtype == "float16" and (fmt.is_float or self.weights == "Q4_K"):
            return (4, 4)  # of more instructions; registers of 8.0 do not allow 8
        return (8, 4)

    @property
    def tile_rows(self) -> int:
        """Rows of four words that a tile has in the ring of W: its vectors, and the rest."""
        fmt = FORMATS[self.weights]
        return fmt.num_vectors + (1 if fmt.rest_words else 0)

    @property
    def round_spans(self) -> int:
        """Spans of a round of the loop, which is a ring of tiles, or a span if that is longer.

        Where a span is two tiles, a round is at least two spans: what a round does once is done
        less often. With a span for every tile registers do not allow it.
        """
        span_tiles = FORMATS[self.weights].span_tiles
        return max(self.rings[0], 1 if span_tiles == 1 else 4) // span_tiles

    @property
    def round_units(self) -> int:
        """Units that a round touches."""
        return -(-self.round_spans // FORMATS[self.weights].unit_spans)

    @property
    def scale_ring(self) -> int:
        """Spans whose numbers are on their way; it divides a round's."""
        return min(4, self.round_spans) if FORMATS[self.weights].shares else self.round_spans

    @property
    def expectation(self) -> Expectation:
        """At 8 rows two blocks share a multiprocessor, beyond that one has it to itself."""
        resident_blocks = 2 if self.columns == 8 else 1
        instructions = ("HMMA", "LDG.128", "LOP3", "FFMA", *(("MUFU",) if self.gates else ()))
        registers = 128 if self.columns == 8 else 255
        return Expectation(
            registers, instructions, resident_blocks=resident_blocks, begins_early=True
        )

    def strand_bits(self, num_outputs: int) -> int:
        """Return log2 of the strands of a matrix for N outputs. It depends on nothing else."""
        return strand_bits_of(2 * num_outputs if self.gates else num_outputs)

    def grid(
        self, num_rows: int, num_outputs: int, num_inputs: int, strand_bits: int
    ) -> tuple[int, int, int]:
        """Return the launch grid for x [M, K] and N outputs; `strand_bits` is that of N.

        M may exceed `columns`: weights are then read once for every `columns` rows, by blocks side
        by side. Raises UnsupportedVariantError.
        """
        for field, value in (("num_rows", num_rows), ("num_outputs", num_outputs)):
            if value < 1:
                raise UnsupportedVariantError(field, "at least 1", value)
        FORMATS[self.weights].panel_bytes(num_inputs)  # refuses what is no whole spans
        if self.gates:
            require_multiple("num_outputs", self.panel_outputs, num_outputs)
        rows_of_weights = PANEL_ROWS // self.panel_outputs * num_outputs
        return (-(-num_rows // self.columns), blocks_of(rows_of_weights, strand_bits), 1)

    def experts_grid(
        self, num_tiles: int, num_outputs: int, num_inputs: int, strand_bits: int
    ) -> tuple[int, int, int]:
        """Return the launch grid for tiles of pairs (`expert_tiles`); N must be whole panels.

        Raises UnsupportedVariantError.
        """
        require_multiple("num_outputs", self.panel_outputs, num_outputs)
        return self.grid(num_tiles * self.columns, num_outputs, num_inputs, strand_bits)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        return make_quantized_matmul(self)


def variants(*, every: bool) -> list[QuantizedMatmulVariant]:
    """Return a spread of the variants, or every one there is."""
    if every:
        return (
            [
                QuantizedMatmulVariant(weights, dtype, columns, writes_float32, of_experts, gates)
                for weights in FORMATS
                for dtype in DTYPES
                for columns in COLUMNS
                for writes_float32, of_experts, gates in KINDS
            ]
            + [
                QuantizedMatmulVariant(weights, dtype, columns, gates=True, activation="gelu")
                for weights in FORMATS
                for dtype in DTYPES
                for columns in COLUMNS
            ]
            + [
                QuantizedMatmulVariant(
                    weights, dtype, columns, False, of_experts, gates, activation, biased=True
                )
                for weights in FORMATS
                for dtype in DTYPES
                for columns in COLUMNS
                for of_experts, gates, activation in BIASED
            ]
        )
    return [
        QuantizedMatmulVariant("Q8_0", "bfloat16", 8, writes_float32=True),
        QuantizedMatmulVariant("Q4_0_G64", "bfloat16", 16),
        QuantizedMatmulVariant("Q4_1", "float16", 32),
        QuantizedMatmulVariant("Q4_Z_G128", "float16", 8),
        QuantizedMatmulVariant("FP8_G128", "bfloat16", 8),
        QuantizedMatmulVariant("Q4_K", "bfloat16", 8),
        QuantizedMatmulVariant("Q6_K", "float16", 16),
        QuantizedMatmulVariant("Q4_0", "bfloat16", 8, gates=True, activation="gelu"),
        QuantizedMatmulVariant(
            "Q4_1",
            "bfloat16",
            8,
            False,
            of_experts=True,
            gates=True,
            activation=CLAMPED,
            biased=True,
        ),
    ]
