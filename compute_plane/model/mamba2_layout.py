"""What layers with Mamba-2 have in place of attention, or beside it, and how it lies in files.

Letters are those of `kernels.reference.mamba2`; I = H·P.

    canonical, model.layers.N.…    in GGUF files, blk.N.…   shape
    mamba.conv1d.weight            ssm_conv1d.weight        [C, K]         in directories [C, 1, K]
    mamba.conv1d.bias              ssm_conv1d.bias          [C]
    mamba.rates                    ssm_a                    [H]            −e^A; directories have A as A_log; GGUF [H, 1]
    mamba.dt_bias                  ssm_dt.bias              [H]
    mamba.skips                    ssm_d                    [H]            in directories D; GGUF [H, 1]
    mamba.norm.weight              ssm_norm.weight          [I]            GGUF [G, I/G]; not in all of Falcon-H1
    mamba.out_proj.weight          ssm_out.weight           [hidden, I]

  What files have in one:
    mamba.in_proj.weight           ssm_in.weight            [I + C + H, hidden]   rows of z, then x, b, c, then d
  is here
    mamba.in_proj_xbc.weight                                [C, hidden]
    mamba.in_proj_z.weight                                  [I, hidden]
    mamba.in_proj_d.weight                                  [H, hidden]
"""  # noqa: E501 - a table

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from compute_plane.model.mamba2 import Mamba2
from compute_plane.model.tensor_parts import RowRuns, RowsOfPart

MIXER: Final = "mamba"
IN_XBC: Final = f"{MIXER}.in_proj_xbc"
IN_Z: Final = f"{MIXER}.in_proj_z"
IN_D: Final = f"{MIXER}.in_proj_d"
CONVOLUTION: Final = f"{MIXER}.conv1d"
NORM: Final = f"{MIXER}.norm"
OUT: Final = f"{MIXER}.out_proj"
RATES: Final = "rates"
TIME_BIAS: Final = "dt_bias"
SKIPS: Final = "skips"
"""These three are parts of MIXER, without a weight: `layout.layer_tensor(layer, MIXER, RATES)`."""

_INPUTS: Final = f"{MIXER}.in_proj"

GGUF_NAMES: Final = {
    _INPUTS: "ssm_in",
    CONVOLUTION: "ssm_conv1d",
    NORM: "ssm_norm",
    OUT: "ssm_out",
}
GGUF_VECTORS: Final = {RATES: "ssm_a", TIME_BIAS: "ssm_dt.bias", SKIPS: "ssm_d"}
DIRECTORY_VECTORS: Final = {RATES: "A_log", SKIPS: "D"}
"""What directories have in place of some."""


def mamba2_shapes(hidden_size: int, of: Mamba2) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a layer, by name in the layer, and their shapes, in order of use."""
    heads = (of.num_heads,)
    return {
        f"{IN_XBC}.weight": (of.channels, hidden_size),
        f"{IN_Z}.weight": (of.inner_size, hidden_size),
        f"{IN_D}.weight": (of.num_heads, hidden_size),
        f"{CONVOLUTION}.weight": (of.channels, of.kernel_size),
        f"{CONVOLUTION}.bias": (of.channels,),
        f"{MIXER}.{RATES}": heads,
        f"{MIXER}.{TIME_BIAS}": heads,
        f"{MIXER}.{SKIPS}": heads,
        **({f"{NORM}.weight": (of.inner_size,)} if of.has_norm else {}),
        f"{OUT}.weight": (hidden_size, of.inner_size),
    }


def stored_mamba2(hidden_size: int, of: Mamba2) -> Iterator[tuple[str, RowsOfPart]]:
    """Yield the tensors of a layer that files hold in another, by name in the layer."""
    shape, first = (of.num_inputs, hidden_size), 0
    for role, count in ((IN_Z, of.inner_size), (IN_XBC, of.channels), (IN_D, of.num_heads)):
        runs = (RowRuns(first, count),)
        yield f"{role}.weight", RowsOfPart(f"{_INPUTS}.weight", runs, shape)
        first += count
