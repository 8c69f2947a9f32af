"""A model's weights on the device, and the number formats of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from compute_plane.cuda.experts import DeviceExperts
    from compute_plane.cuda.matrices import Matrix, Projection
    from compute_plane.executor.weight_formats import Conversion

DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True, eq=False)
class DeviceMlp:
    """`gate_up`: 2·F outputs, the gate first; `down`: hidden."""

    gate_up: Projection
    down: Projection


@dataclass(frozen=True, slots=True, eq=False)
class DeviceLayer:
    """One decoder layer; matrices are [output features, input features], vectors [hidden].

    `qkv`: (H + 2·G)·D outputs, the query heads first. `feedforward`: one MLP or a mixture.
    `qkv_bias`: [(H + 2·G)·D]; `head_norms`: [D] each, for query and for key heads; `output_norms`:
    of what attention and the MLP give, before it is added; `o_bias`: of what attention gives;
    `sinks`: float32 [H] (`DeviceOperations.attention_decode`). None where the architecture has
    none.
    """

    attn_norm: Tensor | None
    qkv: Projection
    o: Projection
    mlp_norm: Tensor | None
    feedforward: DeviceMlp | DeviceExperts
    qkv_bias: Tensor | None = None
    head_norms: tuple[Tensor, Tensor] | None = None
    output_norms: tuple[Tensor, Tensor] | None = None
    o_bias: Tensor | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DeviceWeights:
    """All weights; `lm_head` has the very matrix `embedding` where they are tied.

    `dtype`: of a step, and of whatever is not quantised, but for what is more exact: routers, and
    norms whose weights are more than 1 as they are stored. `num_bytes`: held by all of them, a tied
    matrix once. `conversions`: of the matrices that do not run in their file's format.
    """

    dtype: torch.dtype

    embedding: Matrix
    layers: tuple[DeviceLayer, ...]
    final_norm: Tensor
    lm_head: Projection
    num_bytes: int
    conversions: tuple[Conversion, ...]
