"""Weights in memory as a model file would hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType as GgmlType

from bench.gpu.drawn_models import FLOAT8_GROUP, float8_rows
from bench.gpu.k_blocks import ENCODERS, k_blocks
from compute_plane.model import (
    delta_net_layout,
    layout,
    mamba2_layout,
)
from compute_plane.model.assets import ModelAssets
from compute_plane.model.expert_layout import (
    SCALE,
)
from compute_plane.model.loader import LoadedModel
from compute_plane.model.quantize import convert_rows
from compute_plane.model.recurrence_layout import CONVOLUTIONS
from compute_plane.model.spec import ModelSpec
from compute_plane.model.tensor import RawTensor, TensorFormat
from tests.compute_plane.model.llama_weights import LlamaWeights, layer_fields


class ArraySource:
    """Weights in memory as a model file would hold them, each matrix in a format of choice.

    `orders`: by a part of a matrix's name, a seed for the order that its columns are stored in.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: LlamaWeights,
        formats: Mapping[str, TensorFormat] | None,
        orders: Mapping[str, int] | None = None,
    ) -> None:
        arrays = {
            layout.EMBEDDING: weights.embedding,
            layout.FINAL_NORM: weights.final_norm,
            layout.LM_HEAD: weights.lm_head,
        }
        for index, layer in enumerate(weights.layers):
            for name, field in layer_fields(spec, index).items():
                arrays[name] = getattr(layer, field)
            for role, array in layer.mixture.items():
                arrays[layout.layer_tensor(index, role)] = array
            arrays |= layer.named
        self._tensors = {}
        for name in layout.tensor_shapes(spec):
            array, kind = arrays[name], _format_of(name, formats or {})
            seed = next((seed for part, seed in (orders or {}).items() if part in name), None)
            if seed is None:
                self._tensors[name] = raw_tensor(name, array, kind)
            else:
                order = np.random.default_rng(seed).permutation(array.shape[1])
                strewn = raw_tensor(name, np.ascontiguousarray(array[:, order]), kind)
                self._tensors[name] = replace(strewn, input_order=order)

    @property
    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def tensor(self, name: str) -> RawTensor:
        return self._tensors[name]

    def forget_pages(self) -> None:
        """Nothing is mapped."""


def model_in_memory(
    spec: ModelSpec,
    weights: LlamaWeights,
    formats: Mapping[str, TensorFormat] | None = None,
    orders: Mapping[str, int] | None = None,
) -> LoadedModel:
    """Return a model as a plane loads it, but for its text side, which it has none of."""
    source = ArraySource(spec, weights, formats, orders)
    return LoadedModel(spec, ModelAssets.__new__(ModelAssets), source, Path("memory"), None)


def _format_of(name: str, formats: Mapping[str, TensorFormat]) -> TensorFormat:
    """Return the format a tensor is stored in: by the part of its name that `formats` has."""
    vectors = (
        layout.BIAS, delta_net_layout.RATES, delta_net_layout.TIME_BIAS, mamba2_layout.SKIPS, SCALE,
    )  # fmt: skip
    parts = ("norm", layout.SINKS, layout.LAYER_SCALE, *CONVOLUTIONS)
    if name.endswith(vectors) or any(part in name for part in parts):
        return TensorFormat.F32
    return next((kind for part, kind in formats.items() if part in name), TensorFormat.F32)


def raw_tensor(name: str, array: np.ndarray, kind: TensorFormat) -> RawTensor:
    """Return an array as a stored tensor; 4 to 6 bits and float8 are rounded to here."""
    group = 32
    rows = array.reshape(-1, array.shape[-1])
    stored = np.ascontiguousarray(rows).view(np.uint8)
    if kind is TensorFormat.F16:
        stored = rows.astype(np.float16).view(np.uint8)
    elif kind in (TensorFormat.Q4_0, TensorFormat.Q4_1):
        stored = four_bit_blocks(rows, kind)
    elif kind is TensorFormat.FP8:
        group = FLOAT8_GROUP if rows.shape[1] % FLOAT8_GROUP == 0 else group
        stored = float8_rows(rows, group)
    elif kind.label in ENCODERS:
        stored = k_blocks(kind.label, rows)
    elif kind in (TensorFormat.Q5_0, TensorFormat.Q5_1, TensorFormat.MXFP4):
        stored = gguf.quants.quantize(rows, GgmlType[kind.label])
    elif kind is not TensorFormat.F32:
        f32 = TensorFormat.F32
        stored = convert_rows(stored, f32, kind, path=Path("memory"), name=name)
    return RawTensor(name, name, Path("memory"), kind, array.shape, stored, scale_group=group)


def four_bit_blocks(rows: np.ndarray, kind: TensorFormat) -> np.ndarray:
    """Return rows [R, K] rounded to 4 bits in blocks of 32, as GGUF stores them."""
    values = rows.reshape(-1, 32).astype(np.float32)
    if kind is TensorFormat.Q4_1:
        low, high = values.min(axis=1), values.max(axis=1)
        numbers = [(high - low) / 15, low]
        quants = np.rint((values - low[:, None]) / np.maximum(numbers[0], 1e-9)[:, None])
    else:
        numbers = [np.abs(values).max(axis=1) / 7]
        quants = np.rint(values / np.maximum(numbers[0], 1e-9)[:, None]) + 8
    q = quants.astype(np.uint8)
    parts = [n.astype(np.float16).reshape(-1, 1).view(np.uint8) for n in numbers]
    blocks = np.concatenate([*parts, q[:, :16] | q[:, 16:] << 4], axis=1)
    return blocks.reshape(len(rows), -1)
