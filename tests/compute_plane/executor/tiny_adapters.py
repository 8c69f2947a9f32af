"""Drawn adapters of tiny models, and sources whose matrices have one merged in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from compute_plane.model import layout
from compute_plane.model.adapter import ROLES, Adapter, LowRankPair
from compute_plane.model.spec import ModelSpec
from compute_plane.model.tensor import RawTensor, TensorFormat
from tests.compute_plane.executor.tiny_sources import ArraySource, raw_tensor


def tiny_adapter(
    spec: ModelSpec, seed: int, rank: int = 4, roles: Sequence[str] = ROLES, size: float = 0.1
) -> Adapter:
    """Return an adapter of all matrices with these roles that a model has; of another rank each.

    `size`: of its elements, about; what it adds is that of the model's weights or less.
    """
    random, shapes = np.random.default_rng(seed), layout.tensor_shapes(spec)
    pairs = {}
    for layer in range(spec.num_layers):
        for number, role in enumerate(roles):
            name = layout.layer_tensor(layer, role)
            if name in shapes:
                n, k = shapes[name]
                r = rank + number
                down, up = (
                    random.standard_normal(shape, dtype=np.float32) * np.float32(size)
                    for shape in ((r, k), (n, r))
                )
                pairs[name] = LowRankPair(down, up)
    return Adapter(f"adapter {seed}", pairs)


class MergedSource(ArraySource):
    """The weights of another, to which an adapter is added: what a row with it is computed with."""

    def __init__(self, source: ArraySource, adapter: Adapter) -> None:
        self._tensors = dict(source._tensors)
        for name, pair in adapter.pairs.items():
            self._tensors[name] = merged(source.tensor(name), pair)


def merged(tensor: RawTensor, pair: LowRankPair) -> RawTensor:
    """Return a tensor with a pair added, in float32."""
    whole = tensor.to_float32() + pair.up @ pair.down
    return raw_tensor(tensor.name, whole.astype(np.float32), TensorFormat.F32)
