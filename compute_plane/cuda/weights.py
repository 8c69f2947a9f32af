"""A model's weights on the device, and the number formats of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from compute_plane.cuda.adapters import DeviceAdapters
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
    """`gate_up`: 2·F outputs, the gate first; F where there is no gate. `down`: hidden."""

    gate_up: Projection
    down: Projection


@dataclass(frozen=True, slots=True, eq=False)
class DeviceAttention:
    """Attention of a layer.

    `qkv`: (H + 2·G)·D outputs, the query heads first, and these alone where keys and values are an
    earlier layer's. `o`: of what it gives. `qkv_bias`: [(H + 2·G)·D]; `head_norms`: [D] each, for
    query and for key heads, if it has those; `o_bias`: [hidden]; `sinks`: float32 [H]
    (`DeviceOperations.attention_decode`); `gate`: H·D outputs, whose sigmoid multiplies what
    attention gives. None where the architecture has none.
    """

    qkv: Projection
    o: Projection
    qkv_bias: Tensor | None = None
    head_norms: tuple[Tensor, Tensor | None] | None = None
    o_bias: Tensor | None = None
    sinks: Tensor | None = None
    gate: Projection | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DeviceLatents:
    """Attention of a layer over latents; letters: `compute_plane.model.latents`.

    `latents`: R + P outputs. `queries`: H·(N + P) outputs, of the hidden state or of what
    `first_queries` give, normalised by `query_norm`, [query rank]. `latent_norm`: [R]. `keys`:
    [H, R, N], `values`: [H, V, R]. `o`: of what heads give.
    """

    latents: Projection
    latent_norm: Tensor
    queries: Projection
    keys: Tensor
    values: Tensor
    o: Projection
    first_queries: Projection | None = None
    query_norm: Tensor | None = None

    @property
    def o_bias(self) -> None:
        """There is none."""
        return None


@dataclass(frozen=True, slots=True, eq=False)
class DeviceRecurrence:
    """What layers that keep states have in place of attention, or beside it, whatever it is.

    `inputs`: all that is computed of a token before it goes through the state; `o`: of what comes
    out. `convolution`: float32 [K, C], of the last K tokens.
    """

    inputs: Projection
    o: Projection
    convolution: Tensor

    @property
    def o_bias(self) -> None:
        """There is none."""
        return None


@dataclass(frozen=True, slots=True, eq=False)
class DeviceDeltaNet(DeviceRecurrence):
    """Gated DeltaNet: `kernels.reference.delta_net`.

    `inputs`: C + Hv·Dv + 2·Hv outputs: q, k, v before the convolution, z, b, a. `rates`,
    `time_bias`: float32 [Hv]; `norm`: float32 [Dv].
    """

    rates: Tensor
    time_bias: Tensor
    norm: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DeviceConvolution(DeviceRecurrence):
    """A gated convolution: `kernels.reference.gated_convolution`.

    `inputs`: 3·C outputs: b, c, x.
    """


@dataclass(frozen=True, slots=True, eq=False)
class DeviceMamba2(DeviceRecurrence):
    """Mamba-2: `kernels.reference.mamba2`.

    `inputs`: C + H·P + H outputs: x, b, c before the convolution, z, d. All float32: `bias`, [C];
    `rates`, `time_bias`, `skips`, [H]; `norm`, [H·P], None if there is none.
    """

    bias: Tensor
    rates: Tensor
    time_bias: Tensor
    skips: Tensor
    norm: Tensor | None


Mixer: TypeAlias = (
    DeviceAttention | DeviceLatents | DeviceDeltaNet | DeviceConvolution | DeviceMamba2
)
"""What lets a token see those before it."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceLayerInput:
    """What a layer makes of its inputs: `gate`, P outputs, `output` of P inputs, `output_norm`."""

    gate: Projection
    output: Projection
    output_norm: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DeviceLayerInputs:
    """What the inputs of all layers are made of; `compute_plane.model.layer_inputs_layout`.

    `embedding`: [V, L·P]. `projection`: L·P outputs. `norm`: [P].
    """

    embedding: Matrix
    projection: Projection
    norm: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DeviceLayer:
    """One decoder layer; matrices are [output features, input features], vectors [hidden].

    `feedforward`: one MLP or a mixture. `output_norms`: of what mixer and MLP give, before it is
    added. None where the architecture has none, and of a layer that is one of both, the other.
    `scale`: what the residual stream is multiplied by behind it. `beside`: what keeps a state where
    the mixer is attention, which reads the same.
    """

    attn_norm: Tensor | None
    mixer: Mixer | None
    mlp_norm: Tensor | None
    feedforward: DeviceMlp | DeviceExperts | None
    output_norms: tuple[Tensor, Tensor] | None = None
    layer_input: DeviceLayerInput | None = None
    scale: float = 1.0
    beside: DeviceRecurrence | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DeviceWeights:
    """All weights; `lm_head` has the very matrix `embedding` where they are tied.

    `dtype`: of a step, and of whatever is not quantised, but for what is more exact: routers, and
    norms whose weights are more than 1 as they are stored. `num_bytes`: held by all of them, a tied
    matrix once. `conversions`: of the matrices that do not run in their file's format.
    `layer_inputs`: of models that have them. `adapters`: that rows may be computed with.
    """

    dtype: torch.dtype

    embedding: Matrix
    layers: tuple[DeviceLayer, ...]
    final_norm: Tensor
    lm_head: Projection
    num_bytes: int
    conversions: tuple[Conversion, ...]
    layer_inputs: DeviceLayerInputs | None = None
    adapters: DeviceAdapters | None = None
