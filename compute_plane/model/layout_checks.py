"""Whether the tensors of files are those that a model must have."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from compute_plane.model.architectures import ARCHITECTURES
from compute_plane.model.errors import ModelFileError, UnsupportedModelError, printable
from compute_plane.model.layout import BIAS
from compute_plane.model.layout_parts import stored_shapes
from compute_plane.model.spec import ModelSpec
from compute_plane.model.spec_faults import faults_of
from compute_plane.model.tensor import TensorFormat

MAX_NAMED: Final = 5
MAX_EXPERTS_OF_ALL_LAYERS: Final = 1 << 16
"""Each is known by names of its own, which take memory before any tensor is looked for."""


def check_numbers(path: Path, spec: ModelSpec, num_tensors: int) -> None:
    """Check the numbers of a file's header alone. Raises ModelFileError naming what cannot be."""
    faults = faults_of(spec)
    if faults:
        raise ModelFileError(path, "; ".join(faults))
    if spec.num_layers > num_tensors:
        raise ModelFileError(
            path, f"{spec.num_layers} layers are declared, but the file has {num_tensors} tensors"
        )
    num_experts = 0 if spec.mixture is None else spec.num_layers * spec.mixture.num_experts
    if num_experts > MAX_EXPERTS_OF_ALL_LAYERS:
        raise ModelFileError(
            path,
            f"experts of all layers must be at most {MAX_EXPERTS_OF_ALL_LAYERS} together, "
            f"got {num_experts}",
        )


def check_layout(
    path: Path,
    spec: ModelSpec,
    stored: Mapping[str, tuple[TensorFormat, tuple[int, ...]]],
    stored_name: Callable[[str], str],
    *,
    in_gguf: bool,
) -> ModelSpec:
    """Check the file's tensors against the numbers of its header, and complete the spec.

    `stored`: the file's own tensor names with format and shape; `stored_name` maps a canonical name
    to the file's, of a GGUF file or a directory. Returns the spec with
    `num_parameters` and `weight_format` counted. Raises ModelFileError naming missing tensors,
    wrong shapes and tensors that have no place.
    """
    check_numbers(path, spec, len(stored))
    shapes = stored_shapes(spec, in_gguf=in_gguf)
    expected = {stored_name(name): shape for name, shape in shapes.items()}
    missing = [name for name in expected if name not in stored]
    if missing:
        raise ModelFileError(path, f"missing tensors: {_listed(missing)}")
    for name, shape in expected.items():
        if stored[name][1] != shape:
            raise ModelFileError(
                path,
                f"tensor {name} has shape {list(stored[name][1])}, the model needs {list(shape)}",
            )
    extra = sorted(name for name in stored if name not in expected)
    biases = [name for name in extra if name.endswith(f".{BIAS}")]
    if biases:
        raise UnsupportedModelError(path, f"biases are not supported: {_listed(biases)}")
    if extra:
        title = ARCHITECTURES[spec.architecture].title
        raise ModelFileError(path, f"tensors that a {title} model does not have: {_listed(extra)}")

    parameters: Counter[str] = Counter()
    for stored_format, shape in stored.values():
        count = 1
        for size in shape:
            count *= size
        parameters[stored_format.label] += count
    return dataclasses.replace(
        spec,
        num_parameters=parameters.total(),
        weight_format=parameters.most_common(1)[0][0],
    )


def _listed(names: list[str]) -> str:
    shown = ", ".join(printable(name) for name in names[:MAX_NAMED])
    return shown if len(names) <= MAX_NAMED else f"{shown} and {len(names) - MAX_NAMED} more"
