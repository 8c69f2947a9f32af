"""What config.json says of an LFM2: its convolutions, and how wide its MLP is."""

from __future__ import annotations

from typing import Final

from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.hf_windows import FULL_ATTENTION
from compute_plane.model.json_file import JsonObject
from compute_plane.model.short_convolution import ShortConvolution
from compute_plane.model.spec import MAX_INTERMEDIATE_SIZE, MAX_LAYERS

CONVOLUTION: Final = "conv"
DEFAULT_KERNEL_SIZE: Final = 3
DEFAULT_MULTIPLE: Final = 256


def config_convolution(config: JsonObject) -> ShortConvolution | None:
    """Return what some layers have in place of attention; None: all attend.

    Which they are `layer_types` says, or else `full_attn_idxs` says which they are not. Raises
    ModelFileError.
    """
    layers = _layers(config, config.integer("num_hidden_layers"))
    if not layers:
        return None
    return ShortConvolution(
        channels=config.integer("hidden_size"),
        kernel_size=config.integer("conv_L_cache", DEFAULT_KERNEL_SIZE),
        layers=layers,
    )


def _layers(config: JsonObject, num_layers: int) -> frozenset[int]:
    if num_layers > MAX_LAYERS:  # refused with the other numbers
        return frozenset()
    kinds, attending = config.raw("layer_types"), config.raw("full_attn_idxs")
    if kinds is None:
        if attending is None:
            return frozenset()
        if not isinstance(attending, list) or any(type(layer) is not int for layer in attending):
            raise ModelFileError(config.path, "full_attn_idxs must be numbers of layers")
        return frozenset(range(num_layers)) - frozenset(attending)
    known = (CONVOLUTION, FULL_ATTENTION)
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or any(kind not in known for kind in kinds)
    ):
        raise ModelFileError(
            config.path, f"layer_types must be {' or '.join(known)} for each of {num_layers} layers"
        )
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == CONVOLUTION)


def lfm2_intermediate_size(config: JsonObject) -> int:
    """Return the width of the MLP, which may be less than what is said. Raises ModelFileError.

    Two thirds of it, times a factor, up to a multiple: the width of an MLP without a gate that has
    as many parameters.
    """
    size = config.optional_integer("block_ff_dim")
    size = config.integer("intermediate_size") if size is None else size
    if config.boolean("block_auto_adjust_ff_dim") is False:
        return size
    factor = config.number("block_ffn_dim_multiplier", 1.0)
    multiple = config.integer("block_multiple_of", DEFAULT_MULTIPLE)
    for name, value in (("block_ffn_dim_multiplier", factor), ("block_multiple_of", multiple)):
        if not 0 < value <= MAX_INTERMEDIATE_SIZE:
            raise ModelFileError(
                config.path, f"{name} must be more than 0 and at most {MAX_INTERMEDIATE_SIZE}"
            )
    if not 1 <= size <= MAX_INTERMEDIATE_SIZE:  # refused with the other numbers
        return size
    return -(-int(factor * int(2 * size / 3)) // multiple) * multiple


def refuse_other_lfm2(config: JsonObject) -> None:
    """Refuse an LFM2 whose convolutions have biases. Raises UnsupportedModelError."""
    if config.boolean("conv_bias"):
        raise UnsupportedModelError(config.path, "conv_bias = true is not supported")
