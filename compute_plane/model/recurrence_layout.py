"""What layers with a state have for it, of each kind (`recurrence`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from compute_plane.model import delta_net_layout, mamba2_layout, short_convolution_layout
from compute_plane.model.delta_net import DeltaNet
from compute_plane.model.mamba2 import Mamba2
from compute_plane.model.recurrence import Recurrence
from compute_plane.model.spec import ModelSpec
from compute_plane.model.tensor_parts import RowsOfPart

LOGARITHMS: Final = "A_log"
"""What directories have in place of rates."""
GGUF_NAMES: Final = {
    **delta_net_layout.GGUF_NAMES,
    **short_convolution_layout.GGUF_NAMES,
    **mamba2_layout.GGUF_NAMES,
}
GGUF_VECTORS: Final = {
    delta_net_layout.MIXER: delta_net_layout.GGUF_VECTORS,
    mamba2_layout.MIXER: mamba2_layout.GGUF_VECTORS,
}
"""By mixer, what GGUF files call its parts that are no weights of a module."""
DIRECTORY_VECTORS: Final = {
    delta_net_layout.MIXER: {delta_net_layout.RATES: LOGARITHMS},
    mamba2_layout.MIXER: mamba2_layout.DIRECTORY_VECTORS,
}
"""The same of directories, where they have other names."""
CONVOLUTIONS: Final = (
    delta_net_layout.CONVOLUTION,
    short_convolution_layout.CONVOLUTION,
    mamba2_layout.CONVOLUTION,
)


def recurrence_shapes(spec: ModelSpec, of: Recurrence) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a layer, by name in the layer, and their shapes, in order of use."""
    if isinstance(of, DeltaNet):
        return delta_net_layout.delta_net_shapes(spec, of)
    if isinstance(of, Mamba2):
        return mamba2_layout.mamba2_shapes(spec.hidden_size, of)
    return short_convolution_layout.short_convolution_shapes(of)


def stored_parts(
    spec: ModelSpec, of: Recurrence | None, *, in_gguf: bool
) -> Iterator[tuple[str, RowsOfPart]]:
    """Yield the tensors of a layer that files of this kind hold in others, by name in the layer.

    `of`: what it has in place of attention, or beside it; None: it attends alone.
    """
    if of is None:
        yield from delta_net_layout.stored_gates(spec)
    elif isinstance(of, DeltaNet):
        yield from delta_net_layout.stored_delta_net(spec, of, in_gguf=in_gguf)
    elif isinstance(of, Mamba2):
        yield from mamba2_layout.stored_mamba2(spec.hidden_size, of)


def directory_name(canonical: str) -> str:
    """Return what a directory calls a tensor of a layer with this."""
    module, _, part = canonical.rpartition(".")
    names = DIRECTORY_VECTORS.get(module.rpartition(".")[2], {})
    return f"{module}.{names[part]}" if part in names else canonical


def directory_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a directory's tensor, of a convolution that of its channels and taps."""
    is_single = len(shape) == 3 and shape[1] == 1
    if is_single and name.endswith(tuple(f".{role}.weight" for role in CONVOLUTIONS)):
        return shape[0], shape[2]
    return shape
