"""Few rows times a dense weight matrix, with what a layer does before and after it in one launch.

    y[m, n] = Σ_k x'[m, k] · W[n, k]            x [M, K], W [N, K] as model files store it, y [M, N]

    beside    y is biased: y[m, n] += bias[n]
    before    x' = x, or its normalisation: x'[m, k] = x[m, k] · weight[k] / √(mean(x[m]²) + eps)
    after     rounded    out[m, n] = y[m, n]
              float32    the same, not rounded: logits
              added      out[m, n] += y[m, n]: out is the residual stream
              gated      out[m, n] = a(y[m, n], y[m, N + n]), W being [2·N, K]; a: of `activation`

Made for decode in bfloat16 or float16, M from 1 to 16. A decode layer is six or seven launches with
it and nine without: each launch has to begin and to drain, some microseconds in which the memory
waits, and there is no time for that where a layer's weights are read in 30 (1 B parameters) to 100
µs (8 B). A library's product of few rows is as fast in itself. The kernel is `dense_matmul_tensor`.

Who does what: as in `quantized_matmul`. A block of threads is 8 warps, a warp one panel of 32 or 16
rows of W and a *strand* of its k's, whole tiles of 32; strands are as many as `strand_bits_of` says
for W's rows. A panel that gates is 16 rows of the gate and the 16 beside them, so that one thread
has both sums. Panels of 16 rows are for matrices whose panels of 32 would leave many
multiprocessors without a block: 64 blocks for 2048 outputs, half of an H200.

Normalisation. The factor of a row is not known before all of its squares are summed, and need not
be: it is the same for all k. So a warp multiplies x with the norm's weight, rounds to 16 bits, and
sums the squares of x on the side; the factor is multiplied onto the sums, in float32, by the thread
that writes them. It costs no wait, one rounding, as a norm in a launch of its own does, and
instructions (below). Every block sums the squares of all its rows anew, from vectors that it reads
in any case. x · weight has to fit its type, which of float16 no one can promise: there the norm is
a launch of its own.

What is in flight: a ring of tiles in registers, for 8 warps 64 KB of W, 48 with panels of 16 or 8
normalised rows; Little's law wants 30 KB a multiprocessor (`quantized_matmul`). At 8 rows two
blocks share one. The first round is fetched into the second cache before the launch ahead has ended
(`instructions.early_launch`), if this one is launched so.

Experts: as in `quantized_matmul`.

Instructions. The time in which 2 KB of W arrive is time for 394, and the loop has, on 9.0:

                      8 rows            16 rows
                  plain   normed     plain   normed
    panel of 32     35       84        51      132
    panel of 16     41      112        64      212

Order: a sum is made tile by tile within a strand, then over the strands, 0 first; squares lane by
lane, over the four lanes that share a row, over the strands. No other row has a say, nor has M, so
an output's bits depend on its row, on W's shape and on the generation of tensor cores alone.

Limits. x comes from the second cache once for each panel, or once for each block if a block has
several panels: 8 rows are a quarter of the bytes of a panel of 32, 16 a half. So at 16 rows
matrices of 4096 outputs (8 strands) are read at 1.5 times their bytes from that cache, those of
2048 with panels of 16 at twice their bytes; beyond that a library with shared tiles is the better
one. On an H200 (2026-11-26) 4096 × 14336 with a gate is read at 0.96 of a device copy for 1 and 8
rows, 0.90 for 16; 14336 × 4096 at 0.90 and 0.83; small ones take 3.5 µs beyond their reading.

The ladder:
  v1  registers only. Compiled and simulated.
  v2  this. May begin before the launch ahead has ended; asking for the ring itself before the wait
      kept 64 registers across it, and normalised rows of panels of 32 spilled 200 bytes. Compiled
      and simulated.
  v3  weights past the first cache, whole lines into the second; norms of large matrices before them
      (`NORMALISED_BYTES`). On an H200 57.9 µs for 4096 × 14336 with a gate, v2 75.9, torch's
      product alone 56.1.
Next rungs: x in shared memory for more rows; what a product takes beyond its reading.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kernels.cuda.activation import CLAMPED, GATES, SILU
from kernels.cuda.dense_matmul_tensor import TILE_ROWS, make_dense_matmul
from kernels.cuda.errors import UnsupportedVariantError
from kernels.cuda.quantized_formats import TILE_INPUTS
from kernels.cuda.quantized_strands import WARPS, strand_bits_of
from kernels.cuda.variant import STORAGE_TYPES, Expectation, require_one_of

DTYPES: Final = ("bfloat16", "float16")
NORMALISED: Final = ("bfloat16",)
"""Dtypes whose range holds x · weight."""
COLUMNS: Final = (8, 16)
"""Rows of x that a block may take: a variant each."""
PANELS: Final = (16, 32)
"""Rows of W of a panel."""
WRITES: Final = ("rounded", "float32", "added", "gated")
EXPERTS_WRITE: Final = ("rounded", "gated")
BIASED: Final = (
    ("added", 16, False, SILU),
    ("added", 32, False, SILU),
    ("rounded", 32, True, SILU),
    ("gated", 32, True, CLAMPED),
)
"""`writes`, `panel_rows`, `of_experts` and `activation` of the variants with biases."""
FEW_PANELS: Final = 96
"""Fewer panels of 32 rows than that are cut in two: a block for each would leave too many out. Not
with a norm, of which each panel multiplies x anew: 16 rows × 2048 × 3072 took 11.3 µs instead of
8.3 (H200, 2026-11-26)."""
NORMALISED_BYTES: Final = 56 << 20
"""Of a matrix, up to which a norm in its product takes less than one before it, which is a launch
of 2.5 µs. Beyond, what x takes in every panel costs more: 75.9 µs instead of 61.2 for 4096 × 14336
with a gate, 18.9 instead of 16.5 for 4096 × 6144 (H200, 2026-11-26)."""


@dataclass(frozen=True, slots=True)
class DenseMatmulVariant:
    """The compile-time parameters of one product.

    `dtype` is that of x, W and the norm's weights, `columns` how many rows of x a block takes.
    `writes`, `normalises`: what comes after and before, as above. `panel_rows`: of a panel, 32
    where it gates or of experts. `of_experts`: rows are those of `expert_tiles`, W all experts'
    matrices; what they give is rounded or gated. `activation`: of the gate, where there is one.
    `biased`: each row of W has a bias, added before anything is gated or rounded. Raises
    UnsupportedVariantError for what the kernel is not written for.
    """

    dtype: str
    columns: int
    writes: str = "rounded"
    normalises: bool = False
    panel_rows: int = 32
    of_experts: bool = False
    activation: str = SILU
    biased: bool = False

    def __post_init__(self) -> None:
        require_one_of("dtype", NORMALISED if self.normalises else DTYPES, self.dtype)
        require_one_of("columns", COLUMNS, self.columns)
        require_one_of("writes", EXPERTS_WRITE if self.of_experts else WRITES, self.writes)
        if self.of_experts:
            require_one_of("normalises", (False,), self.normalises)
        if self.normalises or self.writes == "float32":
            require_one_of("biased", (False,), self.biased)
        require_one_of("activation", GATES if self.gates else (SILU,), self.activation)
        is_wide = self.gates or self.of_experts  # of whose panels there are enough
        require_one_of("panel_rows", PANELS[1:] if is_wide else PANELS, self.panel_rows)

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        norm = "normed_" if self.normalises else ""
        kind = "dense_experts" if self.of_experts else "dense_matmul"
        writes = self.writes if self.activation == SILU else f"{self.activation}_{self.writes}"
        writes += "_biased" if self.biased else ""
        return f"{kind}_{norm}{writes}_{self.dtype}_m{self.columns}_n{self.panel_rows}"

    @property
    def gates(self) -> bool:
        """Whether W has two rows for an output."""
        return self.writes == "gated"

    @property
    def panel_tiles(self) -> int:
        """Tiles of 16 rows of W in a panel."""
        return self.panel_rows // TILE_ROWS

    @property
    def panel_outputs(self) -> int:
        """Outputs of a panel."""
        return TILE_ROWS if self.gates else self.panel_rows

    @property
    def ring(self) -> int:
        """Tiles that are on their way to a lane: as many as registers allow."""
        if self.panel_rows == PANELS[0]:
            return 5 if self.normalises and self.columns == COLUMNS[0] else 6
        return 3 if self.normalises and self.columns == COLUMNS[0] else 4

    @property
    def out_dtype(self) -> str:
        """The dtype of `out`."""
        return "float32" if self.writes == "float32" else self.dtype

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * WARPS

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        out = STORAGE_TYPES[self.out_dtype] + "*"
        if self.of_experts:
            rows = ("int32*", "int32*", "int32")
            sizes: tuple[str, ...] = ("int64", "int64", "int32", "int64")
            return (out, "uint16*", "uint16*", *rows, *sizes, "uint16*")
        sizes = ("int64", "int64", "int64", "int32", "int64")
        return (out, "uint16*", "uint16*", "uint16*", *sizes, "float32", "uint16*")

    @property
    def expectation(self) -> Expectation:
        """At 8 rows two blocks share a multiprocessor, beyond that one has it to itself."""
        is_narrow = self.columns == COLUMNS[0]
        instructions = ("HMMA", "LDG.128", *(("FFMA", "MUFU") if self.normalises else ()))
        registers = 128 if is_narrow else 255
        return Expectation(
            registers, instructions, resident_blocks=2 if is_narrow else 1, begins_early=True
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
        if num_inputs < 1 or num_inputs % TILE_INPUTS:
            raise UnsupportedVariantError("num_inputs", f"a multiple of {TILE_INPUTS}", num_inputs)
        block_outputs = self.panel_outputs * (WARPS >> strand_bits)
        return (-(-num_rows // self.columns), -(-num_outputs // block_outputs), 1)

    def experts_grid(
        self, num_tiles: int, num_outputs: int, num_inputs: int, strand_bits: int
    ) -> tuple[int, int, int]:
        """Return the launch grid for tiles of pairs (`expert_tiles`).

        Raises UnsupportedVariantError.
        """
        return self.grid(num_tiles * self.columns, num_outputs, num_inputs, strand_bits)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        return make_dense_matmul(self)


def panel_rows_of(num_outputs: int, *, is_normed: bool = False) -> int:
    """Return the `panel_rows` for N outputs that do not gate; it has no say in a sum's order."""
    return PANELS[1] if is_normed or num_outputs > FEW_PANELS * PANELS[1] else PANELS[0]


def normalises(dtype: str, weight_rows: int, num_inputs: int) -> bool:
    """Return whether a product with a matrix of so many rows and inputs has its norm in it."""
    return dtype in NORMALISED and 2 * weight_rows * num_inputs <= NORMALISED_BYTES


def columns_of(num_rows: int) -> int:
    """Return the `columns` of the variant for M rows: the fewest that hold them, or the most."""
    return next((columns for columns in COLUMNS if columns >= num_rows), COLUMNS[-1])


def variants(*, every: bool) -> list[DenseMatmulVariant]:
    """Return a spread of the variants, or every one that a model has a use for."""
    if not every:
        return [
            DenseMatmulVariant("bfloat16", 8, "gated", normalises=True),
            DenseMatmulVariant("bfloat16", 16, "rounded", normalises=True, panel_rows=16),
            DenseMatmulVariant("bfloat16", 8, "added", panel_rows=16),
            DenseMatmulVariant("float16", 16, "float32"),
            DenseMatmulVariant("bfloat16", 8, "gated", of_experts=True),
            DenseMatmulVariant("bfloat16", 16, "gated", activation="gelu"),
        ]
    of_experts = [
        DenseMatmulVariant(dtype, columns, writes, of_experts=True)
        for dtype in DTYPES
        for columns in COLUMNS
        for writes in EXPERTS_WRITE
    ]
    by_gelu = [
        DenseMatmulVariant(dtype, columns, "gated", activation="gelu")
        for dtype in DTYPES
        for columns in COLUMNS
    ]
    biased = [
        DenseMatmulVariant(
            dtype, columns, writes, False, panel_rows, of_experts, activation, biased=True
        )
        for dtype in DTYPES
        for columns in COLUMNS
        for writes, panel_rows, of_experts, activation in BIASED
    ]
    return [*of_experts, *by_gelu, *biased] + [
        DenseMatmulVariant(dtype, columns, writes, is_normed, panel_rows)
        for dtype in DTYPES
        for columns in COLUMNS
        for writes in WRITES
        for is_normed in (dtype in NORMALISED and writes != "added",)
        for panel_rows in (PANELS[1:] if writes == "gated" else PANELS)
    ]
