"""What the hidden states are multiplied by behind a layer (Gemma 4)."""

from __future__ import annotations

import math

from compute_plane.model import layout
from compute_plane.model.spec import ModelSpec
from compute_plane.model.tensor import TensorSource


def layer_scale(spec: ModelSpec, source: TensorSource, layer: int) -> float:
    """Return it, 1 where there is nothing. Raises ModelFileError for one that is not finite."""
    names = layout.layer_scale(spec, layer)
    return math.prod(float(source.tensor(name).to_float32()[0]) for name in names)
