"""Group-wise quantised checkpoints, written by hand: a plain quantiser and each format's packer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from compute_plane.model.group_config import read_quantization
from compute_plane.model.group_parts import take_group_matrices
from compute_plane.model.json_file import JsonObject
from compute_plane.model.safetensors import read_header
from compute_plane.model.stored_tensor import ARRAY_TYPES
from compute_plane.model.tensor import RawTensor

CT = "compressed-tensors"
DOWN = "model.layers.1.mlp.down_proj"
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
TORCH_TYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


@dataclass(frozen=True)
class Scheme:
    """How a checkpoint is quantised.

    `order`: "none": groups are neighbours and there is no g_idx; "plain": so says a g_idx;
    "act": groups are strewn. `scale_type`: of scales and of what is not quantised.
    """

    method: str = "gptq"
    bits: int = 4
    group_size: int = 32
    symmetric: bool = True
    version: str = "gptq"
    order: str = "none"
    scale_type: str = "F16"

    def config(self) -> dict[str, Any]:
        """The checkpoint's `quantization_config`."""
        if self.method == "gptq":
            return {
                "quant_method": "gptq", "bits": self.bits, "group_size": self.group_size,
                "sym": self.symmetric, "desc_act": self.order == "act",
                "checkpoint_format": self.version, "damp_percent": 0.1,
            }  # fmt: skip
        if self.method == "awq":
            return {
                "quant_method": "awq", "bits": self.bits, "group_size": self.group_size,
                "zero_point": True, "version": "GEMM", "modules_to_not_convert": ["lm_head"],
            }  # fmt: skip
        is_channel = self.group_size == -1
        weights = {
            "num_bits": self.bits, "type": "int", "symmetric": self.symmetric,
            "strategy": "channel" if is_channel else "group", "dynamic": False,
            "group_size": None if is_channel else self.group_size,
            "actorder": "group" if self.order == "act" else None,
        }  # fmt: skip
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
        return {
            "quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None,
        }  # fmt: skip

    def groups(self, num_inputs: int) -> np.ndarray:
        """The group of each input."""
        size = num_inputs if self.group_size == -1 else self.group_size
        groups = np.arange(num_inputs) // size
        if self.order == "act":
            # The same inputs are the large ones for whatever reads them.
            groups = groups[np.random.default_rng(num_inputs).permutation(num_inputs)]
        return groups


@dataclass(frozen=True)
class Quantised:
    """A matrix [N, K] of integers, with scales and zero points [N, G] and each input's group."""

    q: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    groups: np.ndarray

    def weights(self) -> np.ndarray:
        """s · (q − z), float64 [N, K]."""
        scales, zeros = self.scales[:, self.groups], self.zeros[:, self.groups]
        return scales.astype(np.float64) * (self.q - zeros)


def quantised(weights: np.ndarray, scheme: Scheme) -> Quantised:
    """Round a matrix to the nearest integers of its groups."""
    groups, most = scheme.groups(weights.shape[1]), 2**scheme.bits - 1
    num_groups = groups.max() + 1
    scales, zeros = (np.zeros((len(weights), num_groups)) for _ in range(2))
    for group in range(num_groups):
        part = weights[:, groups == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if scheme.symmetric:
            scales[:, group] = np.maximum(-low, high) * 2 / most
            zeros[:, group] = (most + 1) // 2
        else:
            scales[:, group] = (high - low) / most
            zeros[:, group] = np.rint(-low / scales[:, group])
    scales = rounded(scales, scheme.scale_type)
    q = np.clip(np.rint(weights / scales[:, groups] + zeros[:, groups]), 0, most)
    return Quantised(q.astype(np.int64), scales, zeros.astype(np.int64), groups)


def rounded(values: np.ndarray, kind: str) -> np.ndarray:
    return torch.from_numpy(values).to(TORCH_TYPES[kind]).double().numpy()


def packed(integers: np.ndarray, bits: int, axis: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Put integers [A, B] into words of 32 bits along an axis, the lowest bits first."""
    lines = np.moveaxis(integers, axis, 0).astype(np.uint64)
    per_word = 32 // bits
    missing = -len(lines) % per_word
    lines = np.concatenate([lines, np.zeros((missing, lines.shape[1]), np.uint64)])
    words = np.zeros((len(lines) // per_word, lines.shape[1]), np.uint64)
    for place in range(per_word):
        which = order[place] if order else place
        words |= lines[which::per_word] << np.uint64(bits * place)
    words = np.moveaxis(words, 0, axis).astype(np.uint32).view(np.int32)
    return torch.from_numpy(np.ascontiguousarray(words))


def parts_of(matrix: Quantised, scheme: Scheme) -> dict[str, torch.Tensor]:
    """A matrix as a checkpoint stores it, by the part's name."""
    dtype, bits = TORCH_TYPES[scheme.scale_type], scheme.bits
    scales = torch.from_numpy(matrix.scales).to(dtype)
    if scheme.method == "compressed-tensors":
        parts = {
            "weight_packed": packed(matrix.q, bits, 1),
            "weight_scale": scales,
            "weight_shape": torch.tensor(matrix.q.shape),
        }
        if not scheme.symmetric:
            parts["weight_zero_point"] = packed(matrix.zeros, bits, 0)
        order_name = "weight_g_idx"
    else:
        order = AWQ_ORDER if scheme.method == "awq" else ()
        zeros = matrix.zeros.T - (scheme.method == "gptq" and scheme.version == "gptq")
        axis = 1 if scheme.method == "awq" else 0
        parts = {
            "qweight": packed(matrix.q.T, bits, axis, order),
            "qzeros": packed(zeros, bits, 1, order),
            "scales": scales.T.contiguous(),
        }
        order_name = "g_idx"
    if scheme.order != "none":
        parts[order_name] = torch.from_numpy(matrix.groups.astype(np.int32))
    return parts


@dataclass(frozen=True)
class Checkpoint:
    """`tensors`: as they are stored. `weights`: what they mean, float32, by canonical name."""

    scheme: Scheme
    tensors: dict[str, torch.Tensor]
    weights: dict[str, np.ndarray]

    def save(self, path: Path) -> None:
        save_file(self.tensors, path)


def checkpoint(weights: Mapping[str, np.ndarray], scheme: Scheme) -> Checkpoint:
    """Quantise the matrices of a model's layers; what else there is stays as it is."""
    tensors, meant = {}, {}
    for name, values in weights.items():
        if name.endswith("_proj.weight"):
            matrix = quantised(values, scheme)
            prefix = name.removesuffix("weight")
            tensors |= {prefix + part: t for part, t in parts_of(matrix, scheme).items()}
            meant[name] = matrix.weights().astype(np.float32)
        else:
            tensors[name] = torch.from_numpy(values).to(TORCH_TYPES[scheme.scale_type])
            meant[name] = tensors[name].float().numpy()
    return Checkpoint(scheme, tensors, meant)


def write(tiny, directory: Path, made: Checkpoint, **config) -> Path:
    """Write a checkpoint as a Hugging Face directory; `config` changes its quantisation."""
    settings_of = {"quantization_config": made.scheme.config() | config}
    tiny.directory(directory, tiny.model(), config=settings_of)
    made.save(directory / "model.safetensors")
    return directory


def small(tiny, scheme: Scheme = Scheme()) -> Checkpoint:
    return checkpoint(tiny.model().weights, scheme)


def damage(made: Checkpoint, changes: dict) -> Checkpoint:
    """Change tensors; a name without a dot is that of a part of one matrix."""
    tensors = dict(made.tensors)
    for part, change in changes.items():
        name = part if "." in part else f"{DOWN}.{part}"
        found = tensors.pop(name, None)
        if change is not None:
            tensors[name] = change(found) if callable(change) else change
    return dataclasses.replace(made, tensors=tensors)


def read_alone(path: Path, config: JsonObject, shape: tuple[int, ...]) -> RawTensor:
    """Read a matrix that is alone in a file, and called m."""
    quantization = read_quantization(config)
    assert quantization is not None
    stored = read_header(path, tuple(ARRAY_TYPES))
    (tensor,) = take_group_matrices(stored, quantization, {"m.weight": shape}).values()
    assert not stored
    return tensor
