"""What layers with a gated convolution have in place of attention, and how it lies in files (LFM2).

Letters are those of `kernels.reference.gated_convolution`; C is the width of hidden states.

    canonical, model.layers.N.…    in GGUF files, blk.N.…      shape
    conv.in_proj.weight            shortconv.in_proj.weight    [3·C, C]    rows of b, then c, then x
    conv.conv.weight               shortconv.conv.weight       [C, K]      in directories [C, 1, K]
    conv.out_proj.weight           shortconv.out_proj.weight   [C, C]
"""

from __future__ import annotations

from typing import Final

from compute_plane.model.short_convolution import ShortConvolution

MIXER: Final = "conv"
INPUTS: Final = f"{MIXER}.in_proj"
CONVOLUTION: Final = f"{MIXER}.conv"
OUT: Final = f"{MIXER}.out_proj"

GGUF_NAMES: Final = {
    INPUTS: "shortconv.in_proj",
    CONVOLUTION: "shortconv.conv",
    OUT: "shortconv.out_proj",
}


def short_convolution_shapes(of: ShortConvolution) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a layer, by name in the layer, and their shapes, in order of use."""
    return {
        f"{INPUTS}.weight": (3 * of.channels, of.channels),
        f"{CONVOLUTION}.weight": (of.channels, of.kernel_size),
        f"{OUT}.weight": (of.channels, of.channels),
    }
