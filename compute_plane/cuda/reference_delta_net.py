"""Gated DeltaNet on tensors of torch's CPU device, by `kernels.reference`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compute_plane.cuda.reference_blocks import floats
from compute_plane.cuda.state_pool import layer_state_floats
from kernels.reference.delta_net import DeltaNetState, DeltaNetWeights, delta_net

if TYPE_CHECKING:
    from compute_plane.cuda.operands import LayerDeltaNet, StateRows
    from compute_plane.model.delta_net import DeltaNet


def go_on(
    out: Tensor,
    states: Tensor,
    layer: int,
    inputs: Tensor,
    rows: StateRows,
    own: LayerDeltaNet,
) -> None:
    """Bring the tokens of rows through their states: `DeviceOperations.delta_net`.

    Raises ValueError for rows that overlap or have one state, and tokens that are another row's.
    """
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
    last, seen = 0, set[int]()
    for number, (first, count, index, is_new) in enumerate(rows.rows.tolist()):
        if not count:
            continue
        end = first + count
        if first < last or index in seen or set(rows.token_rows[first:end].tolist()) != {number}:
            raise ValueError(f"row {number} has tokens {first} to {end}, state {index}")
        last = end
        seen.add(index)
        state = state_of(states[index], layer, sizes)
        if is_new:
            state.inputs[:] = state.memory[:] = 0
        own_rows = projected[first:end]
        found = delta_net(own_rows[:, :width], own_rows[:, width:], weights, state)
        out[first:end] = torch.from_numpy(found).to(out.dtype)


def state_of(state: Tensor, layer: int, sizes: DeltaNet) -> DeltaNetState:
    """Return a layer's part of a state, as views of its memory. `state`: float32 [floats]."""
    num_floats = layer_state_floats(sizes)
    part = state[layer * num_floats : (layer + 1) * num_floats].numpy()
    kept = (sizes.kernel_size - 1) * sizes.channels
    shape = sizes.num_value_heads, sizes.key_dim, sizes.value_dim
    return DeltaNetState(part[:kept].reshape(-1, sizes.channels), part[kept:].reshape(shape))
