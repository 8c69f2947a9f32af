"""The layers with Mamba-2 that a GGUF file describes; letters: `kernels.reference.mamba2`.

attention.head_count_kv   key and value heads of each layer: 0 where it has Mamba-2, or no mixer;
                          Falcon-H1, where Mamba-2 is beside attention in all layers, has one number
ssm.conv_kernel   K       ssm.time_step_rank   H
ssm.state_size    N       ssm.inner_size       H·P
ssm.group_count   G, of Granite 4 1
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.gguf_metadata import GgufMetadata
from compute_plane.model.mamba2 import Mamba2

GRANITE_HYBRID: Final = "granitehybrid"
FALCON_H1: Final = "falcon-h1"


def gguf_mamba2(
    path: Path,
    keys: GgufMetadata,
    prefix: str,
    layers: frozenset[int],
    norm_eps: float,
    *,
    has_norm: bool = True,
) -> Mamba2 | None:
    """Return what `layers` have in place of attention, or beside it; None: there are none.

    `prefix`: of the architecture's keys. `norm_eps`: of all norms. `has_norm`: behind the state.
    Raises ModelFileError, UnsupportedModelError.
    """
    if not layers:
        return None
    groups = keys.require_integer(prefix + "ssm.group_count")
    if groups != 1 and prefix == f"{GRANITE_HYBRID}.":
        raise UnsupportedModelError(path, f"{prefix}ssm.group_count must be 1, got {groups}")
    num_heads = keys.require_integer(prefix + "ssm.time_step_rank")
    inner_size = keys.require_integer(prefix + "ssm.inner_size")
    if num_heads < 1 or inner_size % num_heads:
        raise ModelFileError(
            path,
            f"{prefix}ssm.inner_size {inner_size} is not a multiple of "
            f"{prefix}ssm.time_step_rank {num_heads}",
        )
    return Mamba2(
        num_heads=num_heads,
        head_dim=inner_size // num_heads,
        state_size=keys.require_integer(prefix + "ssm.state_size"),
        kernel_size=keys.require_integer(prefix + "ssm.conv_kernel"),
        norm_eps=norm_eps,
        layers=layers,
        num_groups=groups,
        has_norm=has_norm,
    )
