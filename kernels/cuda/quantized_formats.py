"""The formats in which weights stay quantised on the device, and the bytes that each takes.

A format is what a stored integer q stands for, and how many neighbouring weights of a row, its
*span*, share the numbers beside it:

                value            beside q         bits a weight at a span of   32      64     128
    Q4_0        (q − 8) · d      d                                            4.5    4.25    4.125
    Q4_Z        (q − z) · d      d, z of 4 bits                               4.625  4.3125  4.156
    Q4_1        q · d + m        d, m                                         5
    Q8_0        q · d            d                                            8.5    8.25    8.125
    Q8_Z        (q − z) · d      d, z of 8 bits                               8.75   8.375   8.1875
    Q5_0        (q − 16) · d     d                                            5.5
    Q5_1        q · d + m        d, m                                         6
    MXFP4       f(q) · 2^(s−127) s of 8 bits                                  4.25
    FP8         f(q) · s         s of 32 bits                                 9               8.25
    Q4_K, Q5_K  q · (d · s) + m · n    s and n of 6 bits                      4.625, 5.625
    Q6_K        (q − 32) · (d · s)     s of 8 bits for each 16                6.5625

d and m are float16, the s of FP8 is float32; the integers of eight bits are signed, z too; f(q) is
a float of four bits (`four_bit_floats`) or of eight (`eight_bit_floats`). All but Q4_Z, Q8_Z and
FP8 are GGUF's with spans of 32. Group-wise checkpoints have larger groups, and where theirs are
not symmetric, whole zero points: Q4_Z keeps those as they are, which is exact and takes fewer bits
than the float16 minimum −z · d would, that is not. Nothing pays for a zero point that it has not. A
group larger than 128 is stored as spans of 128: at 4 bits, a span of 256 would save 1.5 % more of
the bytes, and a matrix seldom has a number of them that warps can share evenly. Checkpoints of
float8 have blocks of 128, or one scale for a whole row, and nearly all of them multiples of 128
inputs; what is left has spans of 32, and none of 64.

The scales of *shared* formats (the "K-quants") are integers s times a d that eight spans have in
common, a *unit* of 256 k's; n and m likewise. Files have s and n of Q4_K and Q5_K in 6 bits, 4.5
and 5.5 a weight; here each is a byte, which takes 2.8 and 2.3 % more and is a number after two
instructions. Q6_K has a scale for each half of a span, a *run*, and not a bit more than its files.
Other formats have units of one span.

A label is the kind's name, and the span behind it where that is not 32: Q4_0, Q4_0_G128.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kernels.cuda.errors import UnsupportedVariantError

PANEL_ROWS: Final = 32
"""Rows of a matrix that lie together (`quantized_layout`)."""
TILE_INPUTS: Final = 32
"""k's of a tile, and of a block of a model file."""
SPANS: Final = (32, 64, 128)
GATE_TURN: Final = PANEL_ROWS // 2
"""Rows of a gate, and of what it gates, that lie in turns where one product has both."""
VECTOR_BYTES: Final = 512
"""Of a warp: 16 bytes a lane."""
LINE_BYTES: Final = 128
"""Of the caches: where every panel begins."""
SCALE_BYTES: Final = {"float16": 2, "exponent": 1, "float32": 4, "integer": 1}
"""Of a scale, and of a minimum, by how it is stored; an exponent is that of a power of two."""
SHARED_SPANS: Final = 8
"""Spans whose integer scales share a float16."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A format: `kind` as in the table, `bits` a weight, less `offset`; `span` as above.

    `has_minimum`, `has_zeros`: whether m and z are there. `is_float`: q stands for a float.
    `scale`: how d or s is stored, as in `SCALE_BYTES`; integers share float16. `runs`: of k's of a
    span that have a scale each.
    """

    kind: str
    bits: int
    offset: int = 0
    has_minimum: bool = False
    has_zeros: bool = False
    is_float: bool = False
    scale: str = "float16"
    span: int = TILE_INPUTS
    runs: int = 1

    @property
    def label(self) -> str:
        """The format's name."""
        return self.kind if self.span == TILE_INPUTS else f"{self.kind}_G{self.span}"

    @property
    def num_vectors(self) -> int:
        """Vectors of 16 bytes a lane in a tile."""
        return self.bits // 4

    @property
    def rest_words(self) -> int:
        """Words a lane has of a tile behind its vectors: of five and six bits."""
        return self.bits % 4

    @property
    def tile_bytes(self) -> int:
        """Bytes of the weights of a tile of 32 rows and 32 k's."""
        return self.bits * PANEL_ROWS * TILE_INPUTS // 8

    @property
    def span_tiles(self) -> int:
        """Tiles of a span."""
        return self.span // TILE_INPUTS

    @property
    def shares(self) -> bool:
        """Whether scales are integers, times a float16 that the spans of a unit share."""
        return self.scale == "integer"

    @property
    def unit_spans(self) -> int:
        """Spans of a unit, which is never parted."""
        return SHARED_SPANS if self.shares else 1

    @property
    def unit(self) -> int:
        """K's of a unit."""
        return self.unit_spans * self.span

    @property
    def group_bytes(self) -> int:
        """Bytes of the scales and minima that the four rows of a lane have for a span."""
        return 4 * SCALE_BYTES[self.scale] * self.runs * (2 if self.has_minimum else 1)

    @property
    def shared_group_bytes(self) -> int:
        """Bytes of the float16 that the four rows of a lane have for a unit."""
        return 4 * SCALE_BYTES["float16"] * (2 if self.has_minimum else 1) if self.shares else 0

    @property
    def zeros_at(self) -> int:
        """Bytes from a span's scales to its zero points, where it has some."""
        return 8 * self.group_bytes

    @property
    def span_bytes(self) -> int:
        """Bytes of the numbers that a panel has for a span alone."""
        return self.zeros_at + (PANEL_ROWS * self.bits // 8 if self.has_zeros else 0)

    @property
    def shared_bytes(self) -> int:
        """Bytes of the float16 that a panel has for a unit."""
        return 8 * self.shared_group_bytes

    @property
    def unit_bytes(self) -> int:
        """Bytes of all numbers beside the weights that a panel has for a unit."""
        return self.unit_spans * self.span_bytes + self.shared_bytes

    @property
    def bits_of_weight(self) -> float:
        """Bits a weight, with the numbers beside it."""
        return self.bits + 8 * self.unit_bytes / (PANEL_ROWS * self.unit)

    def scales_at(self, num_inputs: int) -> int:
        """Return the bytes from the start of a panel of K inputs to its scales."""
        return num_inputs // TILE_INPUTS * self.tile_bytes

    def numbers_bytes(self, num_inputs: int) -> int:
        """Return the bytes of all numbers beside the weights of a panel of K inputs."""
        return num_inputs // self.unit * self.unit_bytes

    def panel_bytes(self, num_inputs: int) -> int:
        """Return the bytes of a panel of K inputs, filled up to whole lines.

        Raises UnsupportedVariantError.
        """
        if num_inputs <= 0 or num_inputs % self.unit:
            raise UnsupportedVariantError("num_inputs", f"a multiple of {self.unit}", num_inputs)
        filled = self.scales_at(num_inputs) + self.numbers_bytes(num_inputs)
        return -(-filled // LINE_BYTES) * LINE_BYTES


FORMATS: Final[Mapping[str, WeightFormat]] = {
    fmt.label: fmt
    for fmt in (
        *(WeightFormat("Q8_0", 8, span=span) for span in SPANS),
        *(WeightFormat("Q4_0", 4, offset=8, span=span) for span in SPANS),
        WeightFormat("Q4_1", 4, has_minimum=True),
        WeightFormat("Q5_0", 5, offset=16),
        WeightFormat("Q5_1", 5, has_minimum=True),
        WeightFormat("Q4_K", 4, has_minimum=True, scale="integer"),
        WeightFormat("Q5_K", 5, has_minimum=True, scale="integer"),
        WeightFormat("Q6_K", 6, offset=32, scale="integer", runs=2),
        *(WeightFormat("Q4_Z", 4, has_zeros=True, span=span) for span in SPANS),
        *(WeightFormat("Q8_Z", 8, has_zeros=True, span=span) for span in SPANS),
        WeightFormat("MXFP4", 4, is_float=True, scale="exponent"),
        *(WeightFormat("FP8", 8, is_float=True, scale="float32", span=span) for span in (32, 128)),
    )
}
"""By label."""


def weight_format(label: str) -> WeightFormat:
    """Return a format by its label. Raises UnsupportedVariantError."""
    if label not in FORMATS:
        raise UnsupportedVariantError("weights", f"one of {', '.join(FORMATS)}", label)
    return FORMATS[label]


def label_for(kind: str, group: int) -> str:
    """Return the label of the largest span that `group` neighbours of the same scale fill.

    Raises UnsupportedVariantError.
    """
    fits = [fmt for fmt in FORMATS.values() if fmt.kind == kind and group % fmt.span == 0]
    if not fits:
        raise UnsupportedVariantError("group", f"a multiple of {TILE_INPUTS} for {kind}", group)
    return max(fits, key=lambda fmt: fmt.span).label


def packed_bytes(label: str, num_outputs: int, num_inputs: int) -> int:
    """Return the bytes of a packed matrix [N, K]. Raises UnsupportedVariantError."""
    return -(-num_outputs // PANEL_ROWS) * weight_format(label).panel_bytes(num_inputs)
