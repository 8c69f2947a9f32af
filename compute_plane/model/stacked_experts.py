"""Experts of directories that hold those of a layer in one tensor, inputs first or in four bits.

E experts, I: `ModelSpec.intermediate_size`, G groups of 32 inputs. Under model.layers.N.…

    gpt-oss, as it is published                    holds
    mlp.experts.gate_up_proj_blocks [E, 2·I, G, 16]    codes of four bits (`mxfp4`); rows 2i are of
    mlp.experts.gate_up_proj_scales [E, 2·I, G]        gate_proj, rows 2i + 1 of up_proj
    mlp.experts.down_proj_blocks    [E, hidden, G, 16]
    mlp.experts.down_proj_scales    [E, hidden, G]
    in 16 or 32 bits
    mlp.experts.gate_up_proj        [E, hidden, 2·I]   inputs first; columns 2i are of gate_proj,
    mlp.experts.down_proj           [E, I, hidden]     2i + 1 of up_proj
    in both
    mlp.experts.gate_up_proj_bias   [E, 2·I]           in turns, too
    mlp.experts.down_proj_bias      [E, hidden]
    mlp.router.weight, .bias        [E, hidden], [E]
    self_attn.sinks                 [H]

    Qwen3-VL with experts
    mlp.experts.gate_up_proj        [E, hidden, 2·I]   columns of gate_proj, then those of up_proj
    mlp.experts.down_proj           [E, I, hidden]
    as transformers 5 writes it, and Qwen3.5 always, outputs first: [E, 2·I, hidden], [E, hidden, I]

Here they become tensors by their canonical names, one of each expert's matrices and biases.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np

from compute_plane.model import expert_layout, layout, mxfp4
from compute_plane.model.errors import ModelFileError, UnsupportedModelError, printable
from compute_plane.model.spec import ModelSpec
from compute_plane.model.stored_tensor import FLOATS, StoredTensor
from compute_plane.model.tensor import (
    AnyArray,
    RawTensor,
    Rows,
    StoredRows,
    TensorFormat,
    UInt8Array,
)

CODES: Final = "U8"
"""The type of codes and scales."""
RENAMED: Final = {
    "mlp.router.weight": f"{expert_layout.ROUTER}.{layout.WEIGHT}",
    "mlp.router.bias": f"{expert_layout.ROUTER}.{layout.BIAS}",
    "self_attn.sinks": f"{layout.SINKS}.{layout.WEIGHT}",
}
"""What these directories call a layer's tensors that are else as they should be."""
OUTPUTS_FIRST: Final = ("qwen3next", "qwen35moe")
GATE_UP: Final = f"{expert_layout.EXPERTS}.gate_up_proj"
DOWN: Final = f"{expert_layout.EXPERTS}.{expert_layout.DOWN}"


def has_stacked_experts(tensors: Container[str], spec: ModelSpec) -> bool:
    """Tell whether a directory's tensors, by name, hold experts so."""
    return spec.mixture is not None and (
        spec.has_all_biases or f"{layout.PREFIX}layers.0.{GATE_UP}" in tensors
    )


def _stored(spec: ModelSpec) -> dict[str, tuple[str, slice]]:
    """Return in which tensor an expert's matrices lie, and which of its outputs are theirs."""
    gate, up = slice(0, None, 2), slice(1, None, 2)
    if not spec.has_all_biases:
        gate, up = slice(spec.intermediate_size), slice(spec.intermediate_size, None)
    return {
        expert_layout.GATE: (GATE_UP, gate),
        expert_layout.UP: (GATE_UP, up),
        expert_layout.DOWN: (DOWN, slice(None)),
    }


@dataclass(frozen=True, slots=True, eq=False)
class StridedRows:
    """Rows whose elements are strewn over a file; a `StoredRows`. `elements`: [rows, columns]."""

    elements: AnyArray

    @property
    def shape(self) -> tuple[int, int]:
        """[rows, bytes of a row]."""
        rows, columns = self.elements.shape
        return rows, columns * self.elements.itemsize

    def __getitem__(self, which: Rows, /) -> UInt8Array:
        return np.ascontiguousarray(self.elements[which]).view(np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class Mxfp4Rows:
    """Rows of codes and scales that lie apart, as in `mxfp4.blocks_of`; a `StoredRows`."""

    codes: UInt8Array
    scales: UInt8Array

    @property
    def shape(self) -> tuple[int, int]:
        """[rows, bytes of a row]."""
        num_rows, num_groups = self.scales.shape
        return num_rows, num_groups * mxfp4.BLOCK_BYTES

    def __getitem__(self, which: Rows, /) -> UInt8Array:
        return mxfp4.blocks_of(self.codes[which], self.scales[which])


def take_stacked_experts(
    where: Path, tensors: dict[str, StoredTensor], spec: ModelSpec
) -> dict[str, RawTensor]:
    """Take the experts out of a directory's tensors, by canonical name, and rename others.

    `where`: what should have them. Raises ModelFileError naming a tensor that is missing,
    or of another shape or type than it should be, UnsupportedModelError for inputs that are no
    whole groups.
    """
    taken: dict[str, RawTensor] = {}
    if spec.mixture is None:
        return taken
    for layer in range(spec.num_layers):
        prefix = f"{layout.PREFIX}layers.{layer}."
        for name, canonical in RENAMED.items():
            if prefix + name in tensors:
                tensors[prefix + canonical] = tensors.pop(prefix + name)
        for stored in (GATE_UP, DOWN):
            _check_presence(where, tensors, spec, prefix + stored)
        for part, (stored, outputs) in _stored(spec).items():
            found = {layout.WEIGHT: _matrices(tensors, spec, prefix + stored, outputs)}
            if spec.has_all_biases:
                found[layout.BIAS] = _biases(tensors, spec, prefix + stored, outputs)
            for suffix, experts in found.items():
                for expert, (source, shape, fmt, rows) in enumerate(experts):
                    role = expert_layout.expert_role(expert, part)
                    name = layout.layer_tensor(layer, role, suffix)
                    taken[name] = RawTensor(name, source.name, source.path, fmt, shape, rows)
        for stored in (GATE_UP, DOWN):
            for ending in ("", "_blocks", "_scales", "_bias"):
                tensors.pop(prefix + stored + ending, None)
    return taken


Expert: TypeAlias = tuple[StoredTensor, tuple[int, ...], TensorFormat, StoredRows]
"""What is of one expert: where it lies, its shape, its format and its rows."""


def _matrices(
    tensors: dict[str, StoredTensor], spec: ModelSpec, name: str, outputs: slice
) -> Iterator[Expert]:
    """Yield the matrices of a layer's experts. `outputs`: which of a tensor's are theirs."""
    count, num_outputs, num_inputs = _sizes(spec, name)
    if f"{name}_blocks" in tensors:
        codes, scales = (tensors[f"{name}_{ending}"] for ending in ("blocks", "scales"))
        if num_inputs % mxfp4.GROUP:
            raise UnsupportedModelError(
                codes.path,
                f"tensor {printable(codes.name)} has {num_inputs} inputs; "
                f"multiples of {mxfp4.GROUP} are read",
            )
        groups = num_inputs // mxfp4.GROUP
        _check(scales, (CODES,), (count, num_outputs, groups))
        _check(codes, (CODES,), (count, num_outputs, groups, mxfp4.GROUP_BYTES))
        for own, scale in zip(codes.array(), scales.array(), strict=True):
            rows = Mxfp4Rows(own[outputs], scale[outputs])
            yield codes, (rows.shape[0], num_inputs), TensorFormat.MXFP4, rows
        return
    stored = tensors[name]
    is_turned = _are_outputs_first(tensors, spec, name)
    sizes = (num_outputs, num_inputs) if is_turned else (num_inputs, num_outputs)
    _check(stored, FLOATS, (count, *sizes))
    for own in stored.array():
        elements = own[outputs] if is_turned else own[:, outputs].T
        yield stored, elements.shape, FLOATS[stored.dtype], StridedRows(elements)


def _are_outputs_first(tensors: dict[str, StoredTensor], spec: ModelSpec, name: str) -> bool:
    """Tell whether a tensor that is not in four bits holds outputs first.

    Of Qwen3.5, and of Qwen3-VL as transformers 5 writes it; there down_proj says so, unless it is
    square, which is refused. Raises UnsupportedModelError.
    """
    if spec.architecture in OUTPUTS_FIRST:
        return True
    if spec.hidden_size == spec.intermediate_size and not spec.has_all_biases:
        stored = tensors[name]
        raise UnsupportedModelError(
            stored.path,
            f"tensor {printable(stored.name)}: experts as wide as the model may lie either way",
        )
    down = tensors.get(name.removesuffix(GATE_UP).removesuffix(DOWN) + DOWN)
    if spec.has_all_biases or down is None:
        return False
    return down.shape[-2:] == (spec.hidden_size, spec.intermediate_size)


def _biases(
    tensors: dict[str, StoredTensor], spec: ModelSpec, name: str, outputs: slice
) -> Iterator[Expert]:
    """Yield the biases of a layer's experts."""
    count, num_outputs, _ = _sizes(spec, name)
    stored = tensors[f"{name}_bias"]
    _check(stored, FLOATS, (count, num_outputs))
    for own in stored.array():
        elements = own[outputs]
        yield stored, elements.shape, FLOATS[stored.dtype], StridedRows(elements[None])


def _sizes(spec: ModelSpec, name: str) -> tuple[int, int, int]:
    """Return experts, outputs and inputs of a tensor."""
    assert spec.mixture is not None
    if name.endswith(DOWN):
        return spec.mixture.num_experts, spec.hidden_size, spec.intermediate_size
    return spec.mixture.num_experts, 2 * spec.intermediate_size, spec.hidden_size


def _check_presence(where: Path, tensors: Container[str], spec: ModelSpec, name: str) -> None:
    """Check that there is all that a tensor of experts is stored in."""
    is_coded = any(f"{name}_{ending}" in tensors for ending in ("blocks", "scales"))
    endings = ["_blocks", "_scales"] if is_coded else [""]
    endings += ["_bias"] if spec.has_all_biases else []
    missing = [name + ending for ending in endings if name + ending not in tensors]
    if missing:
        raise ModelFileError(where, f"missing tensors: {', '.join(map(printable, missing))}")


def _check(stored: StoredTensor, dtypes: Container[str], shape: tuple[int, ...]) -> None:
    """Check type and shape of a tensor."""
    shown = f"tensor {printable(stored.name)}"
    if stored.dtype not in dtypes:
        raise ModelFileError(stored.path, f"{shown} has type {stored.dtype}")
    if stored.shape != shape:
        raise ModelFileError(
            stored.path, f"{shown} has shape {list(stored.shape)}, the model needs {list(shape)}"
        )
