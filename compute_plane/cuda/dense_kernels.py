"""The kernels that multiply few rows with dense weights, and when they are taken.

A step of up to `MOST_ROWS` tokens; more rows go to torch's library, which shares what it reads of
them among more outputs (`kernels.cuda.dense_matmul`). So the number is the kernels', and the number
of tokens alone decides which of both a product is computed by.

Products of some more rows have few outputs for a device: the library splits their inputs among
blocks of threads, and sums up and rounds in a launch of its own. Where the next norm adds them, it
sums up as well (`num_product_parts`), which is a launch less, and nothing is rounded in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kernels.cuda.activation import SILU
from kernels.cuda.dense_matmul import (
    COLUMNS,
    DTYPES,
    DenseMatmulVariant,
    columns_of,
    normalises,
    panel_rows_of,
)
from kernels.cuda.quantized_formats import PANEL_ROWS, TILE_INPUTS
from kernels.cuda.rms_norm import PARTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from compute_plane.cuda.launchers import Launcher
    from compute_plane.cuda.operands import Around, Writes
    from compute_plane.model.spec import ModelSpec
    from kernels.cuda.variant import Variant

MOST_ROWS: Final = COLUMNS[-1]


TILE_OUTPUTS: Final = 128
"""Outputs of a block of the library's kernels for few rows."""
FEW_ROWS: Final = 32
MOST_SPLIT_ROWS: Final = 64
LEAST_PART: Final = 1024
"""Inputs of a part."""


def num_product_parts(
    num_rows: int, num_outputs: int, num_inputs: int, num_multiprocessors: int
) -> int:
    """Into how many parts, 1, 2 or 4, the inputs of a product are split that a norm adds.

    On an H200 (µs; whole, in 2 and in 4 parts, of which the norm reads 0.3 and 0.8 more): 32 rows,
    4096 × 4096 13.2, 11.4, 11.3; 4096 × 14336 35.3, 32.2, 32.8; 64 rows 12.2, 12.2, 12.0; 37.2,
    35.6, 33.9.
    """
    if num_rows > MOST_SPLIT_ROWS or (num_rows > FEW_ROWS and num_inputs < 2 * num_outputs):
        return 1
    room = num_multiprocessors // -(-num_outputs // TILE_OUTPUTS)
    wanted = PARTS[0] if num_rows <= FEW_ROWS else PARTS[-1]
    return next(
        (
            parts
            for parts in sorted(PARTS, reverse=True)
            if parts <= min(wanted, room)
            and num_inputs % parts == 0
            and num_inputs // parts >= LEAST_PART
        ),
        1,
    )


class DenseKernels:
    """Products with the dense matrices of one model. `dtype`: of a step, by name.

    `is_dense`: whether the model has dense matrices that rows are multiplied with; without, there
    are no kernels.
    """

    def __init__(
        self, launcher: Launcher, spec: ModelSpec, dtype: str, *, is_dense: bool = True
    ) -> None:
        self._launcher = launcher
        self._dtype = dtype
        # A norm that adds what it has normalised before is a launch of its own, and so is one whose
        # weights 16 bits would not hold.
        self._can_normalise = not (spec.has_output_norms or spec.norms_need_float32)
        # By what becomes of it, by outputs, by whether it normalises, and by columns.
        self._products: dict[tuple[Writes, int, bool], dict[int, DenseMatmulVariant]] = {}
        if not is_dense or dtype not in DTYPES:
            return
        for writes, num_outputs, has_norm in _products_of(spec):
            weight_rows = 2 * num_outputs if writes == "gated" else num_outputs
            can_normalise = self._can_normalise and has_norm
            is_normed = can_normalise and normalises(dtype, weight_rows, spec.hidden_size)
            activation = spec.activation if writes == "gated" else SILU
            panel_rows = PANEL_ROWS
            if writes != "gated":
                panel_rows = panel_rows_of(num_outputs, is_normed=is_normed)
            self._products[writes, num_outputs, is_normed] = {
                columns: DenseMatmulVariant(
                    dtype, columns, writes, is_normed, panel_rows, activation=activation,
                    biased=writes == "added" and spec.has_all_biases,
                )
                for columns in COLUMNS
            }  # fmt: skip

    @property
    def variants(self) -> list[Variant]:
        """Every kernel that may be launched."""
        products = self._products.values()
        return list(dict.fromkeys(one for of in products for one in of.values()))

    def normalises(self, weight: Tensor) -> bool:
        """Whether products of hidden states with a matrix [N, K] have their norm in them."""
        return self._can_normalise and normalises(self._dtype, *weight.shape)

    def takes(self, num_rows: int, weight: Tensor) -> bool:
        """Whether there is a kernel for so many rows and a matrix [N, K]."""
        has_kernels = bool(self._products) and num_rows <= MOST_ROWS
        return has_kernels and weight.shape[1] % TILE_INPUTS == 0

    def matmul(self, out: Tensor, x: Tensor, weight: Tensor, around: Around) -> None:
        """Write x · Wᵀ with what is around it, as in `DeviceOperations`."""
        num_rows, num_outputs = out.shape
        products = self._products[around.writes, num_outputs, around.norm is not None]
        variant = products[columns_of(num_rows)]
        sizes = num_rows, num_outputs, weight.shape[1], variant.strand_bits(num_outputs)
        self._launcher.launch(
            variant,
            variant.grid(*sizes),
            out,
            x,
            weight,
            weight if around.norm is None else around.norm,
            *sizes,
            num_outputs,
            around.eps,
            x if around.bias is None else around.bias,
        )


def _products_of(spec: ModelSpec) -> Iterator[tuple[Writes, int, bool]]:
    """Yield what becomes of each product of a model, its outputs, and whether it has a norm.

    That of hidden states: queries made of a latent of theirs are made of normalised rows.
    """
    latents = spec.latents
    if latents is None:
        for heads in spec.kinds_of_heads:
            yield "rounded", heads.query_size + 2 * heads.kv_size, True
            if spec.kv_sources:
                yield "rounded", heads.query_size, True
    else:
        queries = spec.num_heads * latents.head_size
        yield "rounded", latents.row_size, True
        yield "rounded", latents.query_rank or queries, True
        if latents.query_rank:
            yield "rounded", queries, False
    if spec.gates_attention:
        yield "rounded", spec.query_size, True
    if spec.recurrence is not None:
        yield "rounded", spec.recurrence.num_inputs, True
    if spec.layer_input_size:
        yield "rounded", spec.layer_input_size, False
        yield "rounded", spec.num_layers * spec.layer_input_size, False
    yield "rounded" if spec.has_output_norms else "added", spec.hidden_size, False
    for size in sorted(spec.common_mlp_sizes):
        yield "gated" if spec.gates_mlps else "rounded", size, True
    yield "float32", spec.vocab_size, True
