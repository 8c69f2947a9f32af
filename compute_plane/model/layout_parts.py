"""Which tensors of a model lie in others in files, or have other names there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Final, TypeAlias

from compute_plane.model import expert_layout, latent_layout, layout, recurrence_layout
from compute_plane.model.layout import DOWN, GATE, GATE_UP, KEY, QKV, QUERY, UP, VALUE, layer_tensor
from compute_plane.model.spec import ModelSpec
from compute_plane.model.tensor_parts import RowRuns, RowsOfPart
from compute_plane.model.turned_heads import TurnedHeads

Part: TypeAlias = RowsOfPart | TurnedHeads
"""Where a tensor of the model lies in one of a file."""

FUSED: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "phi3": {QKV: (QUERY, KEY, VALUE), GATE_UP: (GATE, UP)},
    "glm4": {GATE_UP: (GATE, UP)},
}
"""What files of an architecture hold by another name, and whose rows those are, one by one."""
FUSED_IN_DIRECTORIES: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "granitehybrid": {
        "shared_mlp.input_linear": (GATE, UP),
        "shared_mlp.output_linear": (DOWN,),
    },
}


def parts_of_files(spec: ModelSpec, *, in_gguf: bool) -> dict[str, Part]:
    """Return the tensors that are parts of others, or have other names, in files of this kind."""
    parts: dict[str, Part] = dict(_fused(spec, in_gguf=in_gguf))
    if spec.mixture is not None:
        stored = list(expert_layout.stored_mixture(spec, spec.mixture, in_gguf=in_gguf))
        for layer in range(spec.num_layers):
            if spec.mixture_of(layer) is None:
                continue
            prefix = f"{layout.PREFIX}layers.{layer}."
            for name, rows in stored:
                runs = RowRuns(rows.first, rows.count)
                parts[prefix + name] = RowsOfPart(prefix + rows.stored, (runs,), rows.shape)
    for layer in spec.layers_without_values:
        shape = spec.heads_of(layer).kv_size, spec.hidden_size
        of_keys = RowsOfPart(layer_tensor(layer, KEY), (RowRuns(0, shape[0]),), shape)
        parts[layer_tensor(layer, VALUE)] = of_keys
    for layer in range(spec.num_layers):
        prefix, recurrence = f"{layout.PREFIX}layers.{layer}.", spec.recurrence_of(layer)
        for name, part in recurrence_layout.stored_parts(spec, recurrence, in_gguf=in_gguf):
            parts[prefix + name] = dataclasses.replace(part, stored=prefix + part.stored)
        if spec.latents is not None:
            for name, own in latent_layout.stored_latents(spec.latents, spec.num_heads):
                parts[prefix + name] = dataclasses.replace(own, stored=prefix + own.stored)
    return parts


def _fused(spec: ModelSpec, *, in_gguf: bool) -> Iterator[tuple[str, RowsOfPart]]:
    all_fused = FUSED.get(spec.architecture, {})
    if not in_gguf:
        all_fused = all_fused or FUSED_IN_DIRECTORIES.get(spec.architecture, {})
    shapes = layout.tensor_shapes(spec) if all_fused else {}
    for layer in range(spec.num_layers if all_fused else 0):
        for fused, roles in all_fused.items():
            names = [layer_tensor(layer, role) for role in roles]
            if names[0] not in shapes:  # this layer has something else there
                continue
            counts = [shapes[name][0] for name in names]
            shape, first = (sum(counts), *shapes[names[0]][1:]), 0
            for name, count in zip(names, counts, strict=True):
                yield name, RowsOfPart(layer_tensor(layer, fused), (RowRuns(first, count),), shape)
                first += count


def stored_shapes(spec: ModelSpec, *, in_gguf: bool) -> dict[str, tuple[int, ...]]:
    """Return every tensor that a file must have, by canonical name, in the order of use."""
    parts, shapes = parts_of_files(spec, in_gguf=in_gguf), {}
    for name, shape in layout.tensor_shapes(spec).items():
        part = parts.get(name)
        if part is None:
            shapes[name] = shape
        else:
            shapes[part.stored] = part.shape
    return shapes
