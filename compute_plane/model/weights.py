"""A Llama model's weights in float32."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from compute_plane.model import layout
from compute_plane.model.spec import ModelSpec
from compute_plane.model.tensor import TensorSource

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class LlamaLayer:
    """One decoder layer; matrices are [output features, input features], so y = x @ w.T.

    `attn_norm`, `mlp_norm`: [hidden]. `q`: [H·D, hidden], `k`, `v`: [G·D, hidden],
    `o`: [hidden, H·D]. `gate`, `up`: [intermediate, hidden], `down`: [hidden, intermediate].
    The rows of `q` and `k` are in the half-split order (`compute_plane.model.rope`).
    """

    attn_norm: Float32Array
    q: Float32Array
    k: Float32Array
    v: Float32Array
    o: Float32Array
    mlp_norm: Float32Array
    gate: Float32Array
    up: Float32Array
    down: Float32Array


@dataclass(frozen=True, slots=True, eq=False)
class LlamaWeights:
    """All weights, float32, C-contiguous.

    `embedding`, `lm_head`: [V, hidden]; the same array if the embeddings are tied.
    """

    embedding: Float32Array
    layers: tuple[LlamaLayer, ...]
    final_norm: Float32Array
    lm_head: Float32Array

    @property
    def num_bytes(self) -> int:
        """Bytes held; a tied matrix counts once."""
        arrays = [self.embedding, self.final_norm]
        if self.lm_head is not self.embedding:
            arrays.append(self.lm_head)
        for layer in self.layers:
            arrays += [getattr(layer, field) for field in LlamaLayer.__slots__]
        return sum(array.nbytes for array in arrays)


def load_llama_weights(
    spec: ModelSpec, source: TensorSource, *, num_threads: int = 2
) -> LlamaWeights:
    """Decode every tensor to float32, `num_threads` tensors at a time.

    Peak memory is the result plus the pages of the mapped file that the system keeps.
    Raises ModelFileError if a weight is not finite.
    """
    names = list(layout.tensor_shapes(spec))
    # NumPy lets go of the interpreter lock inside its loops, so threads decode side by side.
    with ThreadPoolExecutor(num_threads, thread_name_prefix="weights") as pool:
        arrays = dict(
            zip(names, pool.map(lambda name: source.tensor(name).to_float32(), names), strict=True)
        )
    embedding = arrays[layout.EMBEDDING]
    return LlamaWeights(
        embedding=embedding,
        layers=tuple(_layer(arrays, layer) for layer in range(spec.num_layers)),
        final_norm=arrays[layout.FINAL_NORM],
        lm_head=embedding if spec.tie_embeddings else arrays[layout.LM_HEAD],
    )


def _layer(arrays: dict[str, Float32Array], layer: int) -> LlamaLayer:
    """Gather the arrays of one layer."""

    def of(role: str) -> Float32Array:
        return arrays[layout.layer_tensor(layer, role)]

    return LlamaLayer(
        attn_norm=of(layout.ATTN_NORM),
        q=of(layout.QUERY),
        k=of(layout.KEY),
        v=of(layout.VALUE),
        o=of(layout.OUTPUT),
        mlp_norm=of(layout.MLP_NORM),
        gate=of(layout.GATE),
        up=of(layout.UP),
        down=of(layout.DOWN),
    )
