"""What tensors of layers are multiplied by when they are read: what files leave out (Falcon-H1).

Of every layer:

    input_norm    …input_layernorm.weight           mlp_norm    …post_attention_layernorm.weight
    values        …self_attn.v_proj.weight          steps       …mamba.in_proj_d.weight
    channels      …mamba.conv1d.weight, the rows of x, of b and of c
    out           …mamba.norm.weight, or where there is no norm …mamba.out_proj.weight
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from compute_plane.model import layout, mamba2_layout
from compute_plane.model.mamba2 import Mamba2

if TYPE_CHECKING:
    from compute_plane.model.spec import ModelSpec
    from compute_plane.model.tensor import Float32Array


@dataclass(frozen=True, slots=True)
class TensorFactors:
    """By what the tensors above are multiplied, in all layers alike."""

    input_norm: float
    mlp_norm: float
    values: float
    steps: float
    channels: tuple[float, float, float]
    out: float


def factor_of(spec: ModelSpec, name: str) -> float | Float32Array:
    """Return what a tensor is multiplied by, 1 for most. `name`: canonical.

    Of a convolution a number for each row, float32 [C].
    """
    factors, of = spec.factors, spec.recurrence
    if factors is None or not isinstance(of, Mamba2):
        return 1.0
    role = name.removeprefix(f"{layout.PREFIX}layers.").partition(".")[2]
    if role == f"{mamba2_layout.CONVOLUTION}.{layout.WEIGHT}":
        sizes = of.inner_size, *[of.num_groups * of.state_size] * 2
        return np.repeat(np.asarray(factors.channels, np.float32), sizes)
    out = mamba2_layout.NORM if of.has_norm else mamba2_layout.OUT
    return {
        f"{layout.ATTN_NORM}.{layout.WEIGHT}": factors.input_norm,
        f"{layout.MLP_NORM}.{layout.WEIGHT}": factors.mlp_norm,
        f"{layout.VALUE}.{layout.WEIGHT}": factors.values,
        f"{mamba2_layout.IN_D}.{layout.WEIGHT}": factors.steps,
        f"{out}.{layout.WEIGHT}": factors.out,
    }.get(role, 1.0)
