"""What layers read of a second embedding, on the device (see `model.layer_inputs_layout`).

before the layers   second embedding · √P ─→ inputs
                    embedding ─→ projection ─→ norm of each part, added, · 1/√2 ─→ inputs [T, L·P]
in each layer       hidden ─→ gate ─→ GELU · its inputs ─→ output ─→ norm, added to hidden
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from compute_plane.cuda.layer_products import Hidden, LayerProducts
    from compute_plane.cuda.weights import DeviceLayerInput, DeviceLayerInputs
    from compute_plane.model.spec import ModelSpec

OF_BOTH: Final = math.sqrt(0.5)
"""What the sum of both parts of the inputs is multiplied by."""


class LayerInputs:
    """Queues them on a device's operations. `products`: those of the model's layers."""

    def __init__(
        self, products: LayerProducts, spec: ModelSpec, weights: DeviceLayerInputs
    ) -> None:
        self._products = products
        self._weights = weights
        self._scale = math.sqrt(spec.layer_input_size)
        # What is projected is divided by √hidden: so is what the norm's epsilon is added to.
        self._eps = spec.rms_norm_eps * spec.hidden_size

    def made(self, residual: Tensor, token_ids: Tensor) -> Tensor:
        """Return the inputs of all layers, [T, L·P]. `residual`: as the first layer reads it."""
        weights, operations = self._weights, self._products.operations
        projected = self._products.product(residual, weights.projection)
        inputs = torch.empty_like(projected)
        operations.embedding(inputs, weights.embedding, token_ids)
        inputs.mul_(self._scale)
        operations.add_normed_parts(inputs, projected, weights.norm, self._eps, OF_BOTH)
        return inputs

    def add(self, hidden: Hidden, inputs: Tensor, layer: int, own: DeviceLayerInput) -> None:
        """Add what a layer makes of its inputs to the residual stream."""
        products = self._products
        gates = products.normed(hidden, None, own.gate)
        gated = torch.empty_like(gates)
        products.operations.gate_apart(gated, gates, inputs, layer * gates.shape[1])
        products.add(hidden, gated, own.output, own.output_norm)
