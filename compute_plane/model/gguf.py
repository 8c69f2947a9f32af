"""Models in GGUF files."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from compute_plane.model import layout, stored_names
from compute_plane.model.architectures import ARCHITECTURES
from compute_plane.model.caps import LOGITS_CAP, SCORES_CAP
from compute_plane.model.errors import ModelFileError, UnsupportedModelError, printable
from compute_plane.model.exact_context import exact_length, with_long_contexts
from compute_plane.model.gguf_gemma import GEMMA2, LOCAL_BASE, with_gemma
from compute_plane.model.gguf_gemma4 import (
    GEMMA4,
    local_theta,
    sizes_of_gemma4,
    with_keys_of_gemma4,
)
from compute_plane.model.gguf_header import GgufFile, TensorEntry
from compute_plane.model.gguf_kv_heads import gguf_num_kv_heads
from compute_plane.model.gguf_latents import DEEPSEEK2, KEY_LENGTH, gguf_latents
from compute_plane.model.gguf_metadata import GgufMetadata
from compute_plane.model.gguf_mixture import gguf_intermediate_size, gguf_mixture
from compute_plane.model.gguf_nemotron import (
    NEMOTRON,
    nemotron_intermediate_size,
    norm_epsilon,
    with_single_layers,
)
from compute_plane.model.gguf_recurrence import SAID_BY_HEADS, gguf_recurrence
from compute_plane.model.gguf_rope import read_rope_scaling
from compute_plane.model.gguf_windows import SLIDING_WINDOW, read_windows
from compute_plane.model.layout_checks import check_layout
from compute_plane.model.layout_parts import parts_of_files
from compute_plane.model.mapped_file import forget_pages
from compute_plane.model.multipliers import Multipliers, with_multipliers
from compute_plane.model.pooling import gguf_pooling
from compute_plane.model.spec import (
    MAX_LAYERS,
    ModelSpec,
)
from compute_plane.model.tensor import RawTensor
from compute_plane.model.windows import turning_in_windows, turning_unscaled, with_windows

PHI3 = "phi3"
GLM4 = "glm4"
GLM4_MOE = "glm4moe"
TURN_IN_PART = (PHI3, GLM4, GLM4_MOE, "minimax-m2", "qwen3next", "qwen35", "qwen35moe")
SECTIONS = "rope.dimension_sections"
SMOLLM3 = "smollm3"
SMOLLM3_INTERVAL = 4
"""Every so many layers of a SmolLM3 one has no rotary positions; its files do not say so."""

# Keys of an architecture that change the arithmetic in ways this package does not compute, if they
# are there at all.
UNSUPPORTED_KEYS = (
    KEY_LENGTH,
    "attention.temperature_length",
    SCORES_CAP,
    LOGITS_CAP,
)
EMBEDDING_SCALE = "embedding_scale"
RESIDUAL_SCALE = "residual_scale"
ATTENTION_SCALE = "attention.scale"
LOGIT_SCALE = "logit_scale"
MULTIPLIERS = (EMBEDDING_SCALE, RESIDUAL_SCALE, ATTENTION_SCALE, LOGIT_SCALE)
"""Keys of an architecture that has them; of others they are not supported."""
ROPE_PATTERN = "attention.rope_pattern"
"""Whether each layer has rotary positions."""
HAS_ROPE = "rope.scaling.finetuned"
"""A file of Granite where it says no has no rotary positions at all."""
OF_GRANITE = ("granite", "granitemoe", "granitehybrid", "granite_swa")
GEMMA3 = "gemma3"
OLMO2 = "olmo2"
FIRST_BIAS = layout.layer_tensor(0, layout.QUERY, layout.BIAS)
FIRST_HEAD_NORM = layout.layer_tensor(0, layout.QUERY_NORM)
SUPPORTED = tuple(name for name, kind in ARCHITECTURES.items() if kind.is_in_gguf)


def read_gguf_spec(
    file: GgufFile, name: str | None = None, *, long_context: bool = False
) -> ModelSpec:
    """Return the model's numbers, checked against the tensors of the file.

    `name` replaces the name in the file. `long_context`: as of `with_long_contexts`. Raises
    ModelFileError for a contradiction, UnsupportedModelError for a model that is none of the
    architectures, plain.
    """
    keys = GgufMetadata(file)
    architecture = keys.require_text("general.architecture")
    if architecture not in SUPPORTED:
        raise UnsupportedModelError(
            file.path,
            f"architecture {printable(architecture)} is not supported; supported are "
            f"{', '.join(SUPPORTED)} (docs/models.md says of which models)",
        )
    prefix = f"{architecture}."
    hidden_size = keys.require_integer(prefix + "embedding_length")
    num_heads = keys.require_integer(prefix + "attention.head_count")
    context_length = keys.require_integer(prefix + "context_length")
    rope_theta = keys.number(prefix + "rope.freq_base")
    layers_ahead = _num_layers_ahead(keys, prefix)
    num_layers = keys.require_integer(prefix + "block_count") - layers_ahead
    scaling = read_rope_scaling(file, keys, prefix, context_length)
    latents = gguf_latents(file.path, keys, prefix, scaling)
    window, layers = read_windows(
        file.path, keys, prefix, min(num_layers, MAX_LAYERS), context_length
    )
    sizes = None
    if architecture == GEMMA4:
        of_heads = num_heads, min(num_layers, MAX_LAYERS), layers
        sizes = sizes_of_gemma4(file.path, keys, prefix, *of_heads)
        head_dim = sizes.local.head_dim
    elif latents is None:
        head_dim = _head_dim(file, keys, prefix, hidden_size, num_heads)
    else:
        head_dim = latents.row_size
    mixture = gguf_mixture(file, keys, prefix, 0 if sizes is None else sizes.mlp)
    stored_name = keys.text("general.name")
    spec = ModelSpec(
        name=name or printable(stored_name or file.path.stem),
        architecture=architecture,
        vocab_size=_vocab_size(file, keys, prefix),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=1
        if latents is not None
        else sizes.local.num_kv_heads
        if sizes is not None
        else gguf_num_kv_heads(
            file.path,
            keys,
            prefix,
            num_heads,
            num_layers + layers_ahead,
            may_have_none=architecture in SAID_BY_HEADS,
        ),
        head_dim=head_dim,
        hidden_size=hidden_size,
        intermediate_size=nemotron_intermediate_size(
            file.path, keys, prefix, num_layers + layers_ahead
        )
        if architecture in NEMOTRON
        else gguf_intermediate_size(keys, prefix, mixture)
        if sizes is None or mixture is not None
        else sizes.mlp,
        context_length=exact_length(architecture, context_length, scaling),
        rope_theta=(10000.0 if rope_theta is None else rope_theta)
        if sizes is None
        else local_theta(keys, prefix),
        rope_scaling=scaling if sizes is None else None,
        rms_norm_eps=norm_epsilon(keys, prefix)
        if architecture in NEMOTRON
        else keys.require_number(prefix + "attention.layer_norm_rms_epsilon"),
        tie_embeddings=stored_names.gguf_name(layout.LM_HEAD) not in file.tensors,
        num_parameters=0,
        weight_format="",
        rotary_dim=_rotary_dim(file, keys, prefix, head_dim)
        if latents is None and sizes is None
        else None
        if latents is None
        else latents.turning,
        layers_without_rope=_layers_without_rope(
            file, keys, architecture, min(num_layers, MAX_LAYERS)
        ),
        mixture=mixture,
        pooling=gguf_pooling(file.path, keys, prefix),
        lacks_qkv_bias=ARCHITECTURES[architecture].may_lack_qkv_bias
        and stored_names.gguf_name(FIRST_BIAS) not in file.tensors,
        lacks_head_norms=ARCHITECTURES[architecture].may_lack_head_norms
        and stored_names.gguf_name(FIRST_HEAD_NORM) not in file.tensors,
        layers_ahead=layers_ahead,
        recurrence=gguf_recurrence(file, keys, prefix, num_layers, layers_ahead),
        latents=latents,
    )
    if architecture in NEMOTRON:
        spec = with_single_layers(file, keys, prefix, spec)
    spec = with_long_contexts(spec, file.path, are_wanted=long_context)
    spec = with_windows(file.path, spec, window, layers, prefix + SLIDING_WINDOW)
    if ARCHITECTURES[architecture].turns_in_windows:
        spec = turning_in_windows(spec, window, layers)
    if architecture == OLMO2 and window is not None:
        theta = keys.number(prefix + LOCAL_BASE)
        theta = spec.rope_theta if theta is None else theta
        spec = turning_unscaled(spec, theta, frozenset(layers))
    if architecture in (GEMMA2, GEMMA3):
        spec = with_gemma(file.path, keys, prefix, spec, frozenset(layers))
    if sizes is not None:
        spec = with_keys_of_gemma4(file, keys, spec, sizes, scaling, layers)
    if ARCHITECTURES[architecture].has_multipliers:
        spec = with_multipliers(file.path, spec, _multipliers(keys, prefix))
    _refuse_variants(file, keys, prefix)
    stored = {
        tensor_name: (entry.format, stored_names.gguf_shape(tensor_name, entry.shape))
        for tensor_name, entry in file.tensors.items()
        if tensor_name not in stored_names.GGUF_OF_ROPE
        and not stored_names.is_left_out(spec, tensor_name, in_gguf=True)
    }
    name_of = partial(stored_names.gguf_name, architecture=architecture)
    return check_layout(file.path, spec, stored, name_of, in_gguf=True)


class GgufSource:
    """The tensors of a checked GGUF file by canonical name; a `TensorSource`."""

    def __init__(self, file: GgufFile, spec: ModelSpec) -> None:
        self._file = file
        self._spec = spec
        self._names = tuple(layout.tensor_shapes(spec))
        self._parts = parts_of_files(spec, in_gguf=True)
        self._head_orders = layout.head_orders(
            spec, turns_neighbours=ARCHITECTURES[spec.architecture].turns_neighbours != "never"
        )

    @property
    def names(self) -> Sequence[str]:
        """Canonical names of all tensors, in the order of use."""
        return self._names

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    def tensor(self, name: str) -> RawTensor:
        """Return one tensor; its bytes are a view of the mapped file."""
        part = self._parts.get(name)
        stored_name = stored_names.gguf_name(
            name if part is None else part.stored, self._spec.architecture
        )
        entry = self._file.tensors[stored_name]
        shape = stored_names.gguf_shape(stored_name, entry.shape)
        tensor = RawTensor(
            name=name,
            stored_name=stored_name,
            path=entry.path,
            format=entry.format,
            shape=shape,
            stored=_rows(entry, shape),
            head_order=self._head_orders.get(name),
        )
        return tensor if part is None else part.part_of(tensor, name)

    def forget_pages(self) -> None:
        """Give back the memory that what was read of the file takes."""
        buffers = {id(entry.buffer): entry.buffer for entry in self._file.tensors.values()}
        for buffer in buffers.values():
            forget_pages(buffer)


def _rows(
    entry: TensorEntry, shape: tuple[int, ...]
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Return a tensor's bytes, uint8 [rows, bytes of a row]."""
    flat = np.frombuffer(entry.buffer, np.uint8, entry.num_bytes, entry.offset)
    return flat.reshape(-1, entry.format.row_bytes(shape[-1]))


def _vocab_size(file: GgufFile, keys: GgufMetadata, prefix: str) -> int:
    """Return the embedding's row count, which the declared size must not contradict."""
    embedding = file.tensors.get(stored_names.gguf_name(layout.EMBEDDING))
    if embedding is None:
        raise ModelFileError(
            file.path, f"missing tensors: {stored_names.gguf_name(layout.EMBEDDING)}"
        )
    rows = embedding.shape[0]
    declared = keys.integer(prefix + "vocab_size")
    if declared is not None and declared != rows:
        raise ModelFileError(
            file.path, f"{prefix}vocab_size is {declared}, but the embedding has {rows} rows"
        )
    return rows


def _head_dim(
    file: GgufFile, keys: GgufMetadata, prefix: str, hidden_size: int, num_heads: int
) -> int:
    head_dim = keys.integer(prefix + "attention.key_length")
    if head_dim is None:
        if num_heads < 1 or hidden_size % num_heads:
            raise ModelFileError(
                file.path,
                f"{prefix}embedding_length {hidden_size} is not a multiple of "
                f"{prefix}attention.head_count {num_heads}",
            )
        head_dim = hidden_size // num_heads
    _check_head_size(file, keys, prefix + "attention.value_length", head_dim)
    return head_dim


def _check_head_size(file: GgufFile, keys: GgufMetadata, key: str, head_dim: int) -> None:
    size = keys.integer(key)
    if size is not None and size != head_dim:
        raise UnsupportedModelError(
            file.path, f"{key} must equal the head size {head_dim}, got {size}"
        )


def _num_layers_ahead(keys: GgufMetadata, prefix: str) -> int:
    """Return how many layers behind those of the model predict further on."""
    if not ARCHITECTURES[prefix.removesuffix(".")].predicts_ahead:
        return 0
    return keys.integer(prefix + "nextn_predict_layers") or 0


def _rotary_dim(file: GgufFile, keys: GgufMetadata, prefix: str, head_dim: int) -> int | None:
    """Return how many elements of a head turn; None: all."""
    key = prefix + "rope.dimension_count"
    if prefix.removesuffix(".") in TURN_IN_PART:
        size = keys.integer(key)
        return None if size == head_dim else size
    _check_head_size(file, keys, key, head_dim)
    return None


def _layers_without_rope(
    file: GgufFile, keys: GgufMetadata, architecture: str, num_layers: int
) -> frozenset[int]:
    """Return the layers in which no head turns."""
    if architecture == SMOLLM3:
        return frozenset(range(SMOLLM3_INTERVAL - 1, num_layers, SMOLLM3_INTERVAL))
    if keys.has(f"{architecture}.{ROPE_PATTERN}"):
        key = f"{architecture}.{ROPE_PATTERN}"
        each = keys.booleans(key, MAX_LAYERS)
        if each is None or len(each) != num_layers:
            raise ModelFileError(
                file.path, f"{key} must have an element for each of {num_layers} layers"
            )
        return frozenset(layer for layer, turns in enumerate(each) if not turns)
    if architecture in OF_GRANITE and keys.boolean(f"{architecture}.{HAS_ROPE}") is False:
        return frozenset(range(num_layers))
    return frozenset()


def _multipliers(keys: GgufMetadata, prefix: str) -> Multipliers:
    """Return the multipliers; as in llama.cpp 0 is none."""
    return Multipliers(
        embedding=keys.number(prefix + EMBEDDING_SCALE) or 1.0,
        residual=keys.number(prefix + RESIDUAL_SCALE) or 1.0,
        attention=keys.number(prefix + ATTENTION_SCALE) or None,
        logits=keys.number(prefix + LOGIT_SCALE) or 1.0,
    )


def _refuse_variants(file: GgufFile, keys: GgufMetadata, prefix: str) -> None:
    """Refuse what shares the architecture's name but computes something else."""
    if prefix in (f"{GLM4}.", f"{GLM4_MOE}.") and keys.has(prefix + SECTIONS):
        # Its converter lays the rows of queries and keys otherwise then.
        raise UnsupportedModelError(
            file.path,
            f"{prefix}{SECTIONS} is not supported: of GLM only models of text alone are",
        )
    if keys.boolean(prefix + "attention.causal") is False:
        raise UnsupportedModelError(file.path, "attention that is not causal is not supported")
    quantization = keys.integer("general.quantization_version")
    if quantization not in (None, 2):
        raise UnsupportedModelError(
            file.path, f"quantization version must be 2, got {quantization}"
        )
    architecture = prefix.removesuffix(".")
    has_multipliers = ARCHITECTURES[architecture].has_multipliers
    unsupported = [*UNSUPPORTED_KEYS, *(() if has_multipliers else MULTIPLIERS)]
    if architecture == DEEPSEEK2:
        unsupported.remove(KEY_LENGTH)
    if architecture == GEMMA4 or ARCHITECTURES[architecture].caps_scores:
        unsupported.remove(LOGITS_CAP)
    if ARCHITECTURES[architecture].caps_scores:
        unsupported.remove(SCORES_CAP)
    for key in (*(prefix + key for key in unsupported), "adapter.type"):
        if keys.has(key):
            raise UnsupportedModelError(file.path, f"{key} is not supported")
