"""What a Gemma 4 is beside other decoders, as its GGUF files have it (`gemma4`).

Sizes of heads by two keys, numbers of kv heads and widths of MLPs by one or by one for each layer,
and the frequencies of layers without windows by a tensor of divisors.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from compute_plane.model import layout, stored_names
from compute_plane.model.caps import LOGITS_CAP
from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.gemma4 import Gemma4, check_sharing, with_gemma4
from compute_plane.model.gguf_gemma import LOCAL_BASE, LOCAL_THETA
from compute_plane.model.gguf_header import GgufFile
from compute_plane.model.gguf_metadata import GgufMetadata
from compute_plane.model.heads import Heads
from compute_plane.model.rope_scaling import FrequencyDivisors, RopeScaling
from compute_plane.model.spec import MAX_LAYERS, ModelSpec
from compute_plane.model.spec_faults import faults_of

GEMMA4: Final = "gemma4"
GLOBAL_SIZES: Final = ("attention.key_length", "attention.value_length", "rope.dimension_count")
LOCAL_SIZES: Final = tuple(f"{key}_swa" for key in GLOBAL_SIZES)
KV_HEADS: Final = "attention.head_count_kv"
MLP_WIDTHS: Final = "feed_forward_length"
SHARING: Final = "attention.shared_kv_layers"
INPUT_SIZE: Final = "embedding_length_per_layer_input"
GLOBAL_THETA: Final = 1e6


@dataclass(frozen=True, slots=True)
class SizesByLayer:
    """What layers have of their own: heads, and the width of their MLP.

    `local`, `others`: heads of layers with windows and without. `mlp`, `sharing_mlp`: widths of
    layers with keys and values of their own, and without. `num_sharing`: how many of the latter.
    """

    local: Heads
    others: Heads
    mlp: int
    sharing_mlp: int
    num_sharing: int


def sizes_of_gemma4(
    path: Path,
    keys: GgufMetadata,
    prefix: str,
    num_heads: int,
    num_layers: int,
    with_window: Collection[int],
) -> SizesByLayer:
    """Return the sizes of a file's layers. Raises ModelFileError, UnsupportedModelError."""
    num_sharing = keys.integer(prefix + SHARING) or 0
    check_sharing(path, num_layers, num_sharing)
    first = num_layers - num_sharing
    kv_heads = _by_layer(path, keys, prefix + KV_HEADS, num_layers)
    widths = _by_layer(path, keys, prefix + MLP_WIDTHS, num_layers)

    def one(key: str, values: list[int], of: list[int], default: int) -> int:
        found = {values[layer] for layer in of}
        if len(found) > 1:
            raise UnsupportedModelError(
                path, f"{prefix}{key} must be the same in layers of one kind, got {sorted(found)}"
            )
        return found.pop() if found else default

    local = [layer for layer in range(num_layers) if layer in with_window]
    others = [layer for layer in range(num_layers) if layer not in with_window]
    global_kv_heads = one(KV_HEADS, kv_heads, others, 0)
    mlp = one(MLP_WIDTHS, widths, list(range(first)), 0)
    return SizesByLayer(
        local=Heads(
            num_heads,
            one(KV_HEADS, kv_heads, local, global_kv_heads),
            _size(path, keys, prefix, LOCAL_SIZES),
        ),
        others=Heads(num_heads, global_kv_heads, _size(path, keys, prefix, GLOBAL_SIZES)),
        mlp=mlp,
        sharing_mlp=one(MLP_WIDTHS, widths, list(range(first, num_layers)), mlp),
        num_sharing=num_sharing,
    )


def with_keys_of_gemma4(
    file: GgufFile,
    keys: GgufMetadata,
    spec: ModelSpec,
    sizes: SizesByLayer,
    scaling: RopeScaling | None,
    with_window: Collection[int],
) -> ModelSpec:
    """Return the spec of a Gemma 4; `spec`: as other decoders', of its local layers.

    `scaling`: of the others. Raises ModelFileError, UnsupportedModelError. Numbers that no model
    has are left as they are: they are refused with the others.
    """
    if faults_of(spec):
        return spec
    prefix = f"{GEMMA4}."
    if scaling is not None and not isinstance(scaling, FrequencyDivisors):
        raise UnsupportedModelError(file.path, f"{prefix}rope.scaling is not supported")
    local = frozenset(with_window)
    first = next((layer for layer in range(spec.num_layers) if layer not in local), 0)
    values = stored_names.gguf_name(layout.layer_tensor(first, layout.VALUE))
    theta, cap = keys.number(prefix + "rope.freq_base"), keys.number(prefix + LOGITS_CAP)
    return with_gemma4(
        file.path,
        spec,
        Gemma4(
            local_layers=local,
            global_heads=sizes.others,
            global_theta=GLOBAL_THETA if theta is None else theta,
            divisors=None if scaling is None else scaling.divisors,
            has_values=values in file.tensors,
            num_sharing=sizes.num_sharing,
            sharing_mlp_size=sizes.sharing_mlp,
            layer_input_size=keys.integer(prefix + INPUT_SIZE) or 0,
            logits_cap=cap or None,
            embedding_scale=math.sqrt(spec.hidden_size),
        ),
    )


def local_theta(keys: GgufMetadata, prefix: str) -> float:
    """Return the base of layers with windows."""
    theta = keys.number(prefix + LOCAL_BASE)
    return LOCAL_THETA if theta is None else theta


def _by_layer(path: Path, keys: GgufMetadata, key: str, num_layers: int) -> list[int]:
    """Return a number for each layer, of which a file says one or all."""
    if not (keys.has(key) and keys.is_array(key)):
        return [keys.require_integer(key)] * num_layers
    values = keys.integers(key, MAX_LAYERS)
    if values is None or len(values) != num_layers:
        raise ModelFileError(path, f"{key} must have a number for each of {num_layers} layers")
    return [int(value) for value in values]


def _size(path: Path, keys: GgufMetadata, prefix: str, names: tuple[str, ...]) -> int:
    """Return the size of a head, which all `names` must say that are there."""
    size = keys.require_integer(prefix + names[0])
    for name in names[1:]:
        other = keys.integer(prefix + name)
        if other not in (None, size):
            raise UnsupportedModelError(
                path, f"{prefix}{name} must equal the head size {size}, got {other}"
            )
    return size
