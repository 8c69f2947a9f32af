"""What a checkpoint says of matrices of float8, E4M3: `quantization_config` of config.json.

    quant_method           settings                                    scales, of
    fp8                    weight_block_size [n, k]                    blocks of n outputs, k inputs
                           none                                        a matrix
    fbgemm_fp8                                                         an output
    compressed-tensors     format float-quantized or naive-quantized,  a matrix, an output or blocks
                           config_groups.*.weights: type float, 8 bits (`block_structure`)

Inputs of products are not rounded to float8 here, whatever the settings say of them: they keep the
16 or more bits that a step has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from compute_plane.model.errors import UnsupportedModelError, printable
from compute_plane.model.json_file import JsonObject

FP8: Final = "fp8"
FBGEMM_FP8: Final = "fbgemm_fp8"
FLOAT_FORMATS: Final = ("float-quantized", "naive-quantized")
INPUT_MULTIPLE: Final = 32
MAX_BLOCK: Final = 1 << 20
STRATEGIES: Final = ("tensor", "channel", "block")


@dataclass(frozen=True, slots=True)
class Float8Quantization:
    """`block`: (outputs, inputs) that share a scale; None for all of a matrix there are."""

    block: tuple[int | None, int | None]


def read_fp8(section: JsonObject) -> Float8Quantization:
    """Return what the settings of `fp8` or `fbgemm_fp8` say.

    Raises UnsupportedModelError, ModelFileError.
    """
    fmt = section.text("fmt") or "e4m3"
    if fmt != "e4m3":
        raise UnsupportedModelError(
            section.path, f"{section.name('fmt')} must be e4m3, got {printable(fmt)}"
        )
    if section.text("quant_method") == FBGEMM_FP8:
        return Float8Quantization((1, None))
    if section.raw("weight_block_size") is None:
        return Float8Quantization((None, None))
    return Float8Quantization(_block(section, "weight_block_size"))


def read_float_weights(weights: JsonObject) -> Float8Quantization:
    """Return what the settings of a group of compressed-tensors say of its weights."""
    for key, value, expected in (
        ("num_bits", weights.integer("num_bits"), 8),
        ("type", weights.text("type"), "float"),
        ("symmetric", weights.boolean("symmetric") is not False, True),
        ("dynamic", weights.boolean("dynamic") or False, False),
    ):
        if value != expected:
            raise UnsupportedModelError(
                weights.path,
                f"{weights.name(key)} must be {str(expected).lower()}, "
                f"got {printable(str(value)).lower()}",
            )
    strategy = weights.text("strategy")
    if strategy not in STRATEGIES:
        shown = "none" if strategy is None else printable(strategy)
        raise UnsupportedModelError(
            weights.path,
            f"{weights.name('strategy')} must be {' or '.join(STRATEGIES)}, got {shown}",
        )
    if strategy == "block":
        return Float8Quantization(_block(weights, "block_structure"))
    return Float8Quantization((1 if strategy == "channel" else None, None))


def _block(section: JsonObject, key: str) -> tuple[int, int]:
    """Return how many outputs and inputs share a scale."""
    sizes = section.raw(key)
    if (
        not isinstance(sizes, list)
        or len(sizes) != 2
        or any(type(size) is not int or not 1 <= size <= MAX_BLOCK for size in sizes)
        or sizes[1] % INPUT_MULTIPLE
    ):
        raise UnsupportedModelError(
            section.path,
            f"{section.name(key)} must be two sizes, the second a multiple of {INPUT_MULTIPLE}, "
            f"got {printable(repr(sizes), limit=60)}",
        )
    return sizes[0], sizes[1]
