"""Models of drawn weights in memory, as a plane loads them, but for their text side.

Of any shape: `compute_plane.model.layout` says which tensors one has. Values are of a size at which
every part of a model is to be seen in its logits; a tensor's depend on its name and shape alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType as GgmlType

from bench.gpu.k_blocks import ENCODERS, k_blocks
from compute_plane.model import delta_net_layout, expert_layout, layout
from compute_plane.model.assets import ModelAssets
from compute_plane.model.group_blocks import BLOCK, block_type
from compute_plane.model.loader import LoadedModel
from compute_plane.model.recurrence_layout import CONVOLUTIONS
from compute_plane.model.spec import ModelSpec
from compute_plane.model.tensor import Float32Array, RawTensor, TensorFormat, UInt8Array
from kernels.reference.quantized_kv import LARGEST, to_float8

NOWHERE: Final = Path("memory")
MATRIX_SPREAD: Final = 0.15
VECTOR_SPREAD: Final = 0.6
"""Of embeddings, biases, sinks, taps of convolutions: what is added, or few of."""
ROUTER_SPREAD: Final = 0.3
"""Wider, so that 16 bits seldom decide which experts a token goes through."""
RATES: Final = (0.02, 2.0)
"""How fast states forget: some fast, some slowly."""
NORMS: Final = (0.5, 1.5)
FLOAT8_GROUP: Final = 128
"""Weights that share a scale, as in most checkpoints; 32 where a row is no whole groups."""


class DrawnSource:
    """Weights in memory as a model file would hold them.

    `formats`: by a part of a matrix's name; what has none is bfloat16, vectors are float32.
    """

    def __init__(self, spec: ModelSpec, formats: Mapping[str, TensorFormat]) -> None:
        self._tensors = {
            name: _stored(name, _drawn(name, shape), formats)
            for name, shape in layout.tensor_shapes(spec).items()
        }

    @property
    def names(self) -> Sequence[str]:
        """Canonical names of all tensors."""
        return list(self._tensors)

    def tensor(self, name: str) -> RawTensor:
        """Return one tensor."""
        return self._tensors[name]

    def forget_pages(self) -> None:
        """Nothing is mapped."""


def drawn_model(spec: ModelSpec, formats: Mapping[str, TensorFormat] | None = None) -> LoadedModel:
    """Return a model of a shape."""
    assets = ModelAssets.__new__(ModelAssets)  # nobody asks for its text side
    return LoadedModel(spec, assets, DrawnSource(spec, formats or {}), NOWHERE, None)


def float8_rows(rows: Float32Array, group: int) -> UInt8Array:
    """Return rows [R, K] as blocks of FP8; so many neighbours of a row share a scale."""
    groups = rows.reshape(len(rows), -1, group).astype(np.float32)
    largest = np.abs(groups).max(axis=2, keepdims=True)
    scales = np.where(largest > 0, largest / np.float32(LARGEST["float8"]), np.float32(1))
    codes = to_float8(np.clip(groups / scales, -LARGEST["float8"], LARGEST["float8"]))
    blocks = np.empty((len(rows), rows.shape[1] // BLOCK), block_type(8, has_zeros=False))
    blocks["s"] = np.repeat(scales[..., 0], group // BLOCK, axis=1)
    blocks["q"] = codes.reshape(*blocks.shape, BLOCK)
    return blocks.view(np.uint8).reshape(len(rows), -1)


def _drawn(name: str, shape: tuple[int, ...]) -> Float32Array:
    random = np.random.default_rng(zlib.crc32(name.encode()))
    if name.endswith(delta_net_layout.RATES):
        return -random.uniform(*RATES, shape).astype(np.float32)
    if "norm" in name:
        return random.uniform(*NORMS, shape).astype(np.float32)
    spread = MATRIX_SPREAD
    if f".{expert_layout.ROUTER}.{layout.WEIGHT}" in name:
        spread = ROUTER_SPREAD
    elif name == layout.EMBEDDING or _is_vector(name, shape):
        spread = VECTOR_SPREAD
    return random.standard_normal(shape, dtype=np.float32) * np.float32(spread)


def _is_vector(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is no matrix of a product, so that it is stored in float32."""
    is_taps = any(role in name for role in CONVOLUTIONS)
    return len(shape) == 1 or name.endswith(layout.BIAS) or is_taps


def _stored(name: str, values: Float32Array, formats: Mapping[str, TensorFormat]) -> RawTensor:
    kind = TensorFormat.F32
    if not _is_vector(name, values.shape):
        found = (kind for part, kind in formats.items() if part in name)
        kind = next(found, TensorFormat.BF16)
    rows = values.reshape(-1, values.shape[-1])
    if kind is TensorFormat.FP8:
        group = FLOAT8_GROUP if rows.shape[1] % FLOAT8_GROUP == 0 else BLOCK
        blocks = float8_rows(rows, group)
        return RawTensor(name, name, NOWHERE, kind, values.shape, blocks, scale_group=group)
    if kind.label in ENCODERS:
        blocks = k_blocks(kind.label, rows)
        return RawTensor(name, name, NOWHERE, kind, values.shape, blocks)
    stored = gguf.quants.quantize(rows, GgmlType[kind.label]).view(np.uint8)
    return RawTensor(name, name, NOWHERE, kind, values.shape, stored)
