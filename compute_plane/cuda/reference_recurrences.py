"""Layers with states on tensors of torch's CPU device, by `kernels.reference`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compute_plane.cuda.reference_blocks import floats
from kernels.reference.delta_net import DeltaNetState, DeltaNetWeights, delta_net
from kernels.reference.gated_convolution import gated_convolution
from kernels.reference.mamba2 import Mamba2State, Mamba2Weights, mamba2

if TYPE_CHECKING:
    from collections.abc import Iterator

    from compute_plane.cuda.operands import (
        LayerConvolution,
        LayerDeltaNet,
        LayerMamba2,
        StateRows,
    )
    from compute_plane.model.delta_net import DeltaNet
    from compute_plane.model.mamba2 import Mamba2
    from kernels.interface import Float32Array


def go_through_delta_net(
    out: Tensor,
    states: Tensor,
    layer: int,
    inputs: Tensor,
    rows: StateRows,
    own: LayerDeltaNet,
) -> None:
    """Do `DeviceOperations.delta_net`. Raises ValueError as `going_on` does."""
    sizes, projected = own.sizes, floats(inputs)
    weights = DeltaNetWeights(
        convolution=own.convolution.numpy().T,
        rates=own.rates.numpy(),
        time_bias=own.time_bias.numpy(),
        norm=own.norm.numpy(),
        eps=own.eps,
        num_key_heads=sizes.num_key_heads,
        are_tiled=sizes.value_heads_tiled,
    )
    width = sizes.channels + sizes.value_size
    for tokens, part in going_on(states, layer, sizes.state_floats, rows):
        own_rows = projected[tokens]
        state = _delta_net_state(part, sizes)
        found = delta_net(own_rows[:, :width], own_rows[:, width:], weights, state)
        out[tokens] = torch.from_numpy(found).to(out.dtype)


def go_through_convolution(
    out: Tensor,
    states: Tensor,
    layer: int,
    inputs: Tensor,
    rows: StateRows,
    own: LayerConvolution,
) -> None:
    """Do `DeviceOperations.gated_convolution`. Raises ValueError as `going_on` does."""
    projected, weights = floats(inputs), own.weight.numpy().T
    channels, width = weights.shape
    for tokens, part in going_on(states, layer, (width - 1) * channels, rows):
        found = gated_convolution(projected[tokens], weights, part.reshape(-1, channels))
        out[tokens] = torch.from_numpy(found).to(out.dtype)


def go_through_mamba2(
    out: Tensor,
    states: Tensor,
    layer: int,
    inputs: Tensor,
    rows: StateRows,
    own: LayerMamba2,
) -> None:
    """Do `DeviceOperations.mamba2`. Raises ValueError as `going_on` does."""
    sizes, projected = own.sizes, floats(inputs)
    weights = Mamba2Weights(
        convolution=own.convolution.numpy().T,
        bias=own.bias.numpy(),
        rates=own.rates.numpy(),
        time_bias=own.time_bias.numpy(),
        skips=own.skips.numpy(),
        norm=None if own.norm is None else own.norm.numpy(),
        eps=sizes.norm_eps,
        num_groups=sizes.num_groups,
    )
    width = sizes.channels + sizes.inner_size
    for tokens, part in going_on(states, layer, sizes.state_floats, rows):
        own_rows = projected[tokens]
        state = _mamba2_state(part, sizes)
        found = mamba2(own_rows[:, :width], own_rows[:, width:], weights, state)
        out[tokens] = torch.from_numpy(found).to(out.dtype)


def going_on(
    states: Tensor, layer: int, num_floats: int, rows: StateRows
) -> Iterator[tuple[slice, Float32Array]]:
    """Yield the tokens of each row that has any, and a layer's part of its state, where it lies.

    `num_floats`: of such a part. One of a row that is new is emptied. Raises ValueError for rows
    that overlap or have one state, and tokens that are another row's.
    """
    last, seen = 0, set[int]()
    for number, (first, count, index, is_new) in enumerate(rows.rows.tolist()):
        if not count:
            continue
        end = first + count
        if first < last or index in seen or set(rows.token_rows[first:end].tolist()) != {number}:
            raise ValueError(f"row {number} has tokens {first} to {end}, state {index}")
        last = end
        seen.add(index)
        part = states[index, layer * num_floats : (layer + 1) * num_floats].numpy()
        if is_new:
            part[:] = 0
        yield slice(first, end), part


def _delta_net_state(part: Float32Array, sizes: DeltaNet) -> DeltaNetState:
    """Return a layer's part of a state as views of its memory."""
    kept = (sizes.kernel_size - 1) * sizes.channels
    shape = sizes.num_value_heads, sizes.key_dim, sizes.value_dim
    return DeltaNetState(part[:kept].reshape(-1, sizes.channels), part[kept:].reshape(shape))


def _mamba2_state(part: Float32Array, sizes: Mamba2) -> Mamba2State:
    """Likewise."""
    kept = (sizes.kernel_size - 1) * sizes.channels
    shape = sizes.num_heads, sizes.state_size, sizes.head_dim
    return Mamba2State(part[:kept].reshape(-1, sizes.channels), part[kept:].reshape(shape))
