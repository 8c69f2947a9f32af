"""A model's weights on the device, in one dtype, and the number formats there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from compute_plane.model.weights import LlamaWeights

DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class DeviceLayer:
    """One decoder layer; matrices are [output features, input features].

    `qkv`: [(H + 2·G)·D, E], the query heads first. `gate_up`: [2·F, E], the gate first.
    """

    attn_norm: Tensor
    qkv: Tensor
    o: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class DeviceWeights:
    """All weights; `lm_head` is the very tensor `embedding` where they are tied."""

    embedding: Tensor
    layers: tuple[DeviceLayer, ...]
    final_norm: Tensor
    lm_head: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all of them."""
        return self.embedding.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes held; a tied matrix counts once."""
        tensors = [self.embedding, self.final_norm]
        if self.lm_head is not self.embedding:
            tensors.append(self.lm_head)
        for layer in self.layers:
            tensors += [getattr(layer, name) for name in DeviceLayer.__slots__]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def place_weights(weights: LlamaWeights, dtype: torch.dtype, device: torch.device) -> DeviceWeights:
    """Return weights in `dtype` on `device`, matrices that read the same input joined."""

    def placed(*parts: npt.NDArray[Any]) -> Tensor:
        # A model file's memory may be mapped and read-only, which torch warns of: copy.
        tensors = [torch.from_numpy(np.array(part)).to(device, dtype) for part in parts]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    embedding = placed(weights.embedding)
    is_tied = weights.lm_head is weights.embedding
    return DeviceWeights(
        embedding=embedding,
        layers=tuple(
            DeviceLayer(
                attn_norm=placed(layer.attn_norm),
                qkv=placed(layer.q, layer.k, layer.v),
                o=placed(layer.o),
                mlp_norm=placed(layer.mlp_norm),
                gate_up=placed(layer.gate, layer.up),
                down=placed(layer.down),
            )
            for layer in weights.layers
        ),
        final_norm=placed(weights.final_norm),
        lm_head=embedding if is_tied else placed(weights.lm_head),
    )
