"""Which tensors a model has, what shape each has, and what GGUF calls them.

The canonical names are those of Hugging Face checkpoints.

    canonical                                        GGUF                      shape
    model.embed_tokens.weight                        token_embd.weight         [V, hidden]
    model.layers.N.input_layernorm.weight            blk.N.attn_norm.weight    [hidden]
    model.layers.N.self_attn.q_proj.weight           blk.N.attn_q.weight       [H·D, hidden]
    model.layers.N.self_attn.k_proj.weight           blk.N.attn_k.weight       [G·D, hidden]
    model.layers.N.self_attn.v_proj.weight           blk.N.attn_v.weight       [G·D, hidden]
    model.layers.N.self_attn.o_proj.weight           blk.N.attn_output.weight  [hidden, H·D]
    model.layers.N.post_attention_layernorm.weight   blk.N.ffn_norm.weight     [hidden]
    model.layers.N.mlp.gate_proj.weight              blk.N.ffn_gate.weight     [intermediate, hidden]
    model.layers.N.mlp.up_proj.weight                blk.N.ffn_up.weight       [intermediate, hidden]
    model.layers.N.mlp.down_proj.weight              blk.N.ffn_down.weight     [hidden, intermediate]
    model.norm.weight                                output_norm.weight        [hidden]
    lm_head.weight (unless tied)                     output.weight             [V, hidden]
  Qwen2 has besides, and likewise of k and v [G·D]:
    model.layers.N.self_attn.q_proj.bias             blk.N.attn_q.bias         [H·D]
  Qwen3 has besides:
    model.layers.N.self_attn.q_norm.weight           blk.N.attn_q_norm.weight  [D]
    model.layers.N.self_attn.k_norm.weight           blk.N.attn_k_norm.weight  [D]
"""  # noqa: E501 - a table

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from compute_plane.model.errors import ModelFileError, UnsupportedModelError, printable
from compute_plane.model.spec import ARCHITECTURES, ModelSpec, faults_of
from compute_plane.model.tensor import TensorFormat

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"

ATTN_NORM = "input_layernorm"
QUERY = "self_attn.q_proj"
KEY = "self_attn.k_proj"
VALUE = "self_attn.v_proj"
OUTPUT = "self_attn.o_proj"
QUERY_NORM = "self_attn.q_norm"
KEY_NORM = "self_attn.k_norm"
MLP_NORM = "post_attention_layernorm"
GATE = "mlp.gate_proj"
UP = "mlp.up_proj"
DOWN = "mlp.down_proj"

WEIGHT = "weight"
BIAS = "bias"

GGUF_LAYER_NAMES = {
    ATTN_NORM: "attn_norm",
    QUERY: "attn_q",
    KEY: "attn_k",
    VALUE: "attn_v",
    OUTPUT: "attn_output",
    QUERY_NORM: "attn_q_norm",
    KEY_NORM: "attn_k_norm",
    MLP_NORM: "ffn_norm",
    GATE: "ffn_gate",
    UP: "ffn_up",
    DOWN: "ffn_down",
}
GGUF_GLOBAL_NAMES = {
    EMBEDDING: "token_embd.weight",
    FINAL_NORM: "output_norm.weight",
    LM_HEAD: "output.weight",
}
GGUF_ROPE_DIVISORS = "rope_freqs.weight"

MAX_NAMED = 5


def layer_tensor(layer: int, role: str, part: str = WEIGHT) -> str:
    """Return the canonical name of a layer's tensor; `role` is one of this module's constants."""
    return f"model.layers.{layer}.{role}.{part}"


def qkv_biases(spec: ModelSpec, layer: int) -> list[str]:
    """Return the names of a layer's biases of queries, keys and values; empty if it has none."""
    roles = (QUERY, KEY, VALUE) if spec.has_qkv_bias else ()
    return [layer_tensor(layer, role, BIAS) for role in roles]


def head_norms(spec: ModelSpec, layer: int) -> list[str]:
    """Return the names of a layer's norms of query and key heads; empty if it has none."""
    roles = (QUERY_NORM, KEY_NORM) if spec.has_head_norms else ()
    return [layer_tensor(layer, role) for role in roles]


def gguf_name(canonical: str) -> str:
    """Return what a GGUF file calls a canonical tensor."""
    if canonical in GGUF_GLOBAL_NAMES:
        return GGUF_GLOBAL_NAMES[canonical]
    layer, role = canonical.removeprefix("model.layers.").split(".", 1)
    role, _, part = role.rpartition(".")
    return f"blk.{layer}.{GGUF_LAYER_NAMES[role]}.{part}"


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return every tensor the model must have, canonical name to shape, in the order of use."""
    hidden, intermediate = spec.hidden_size, spec.intermediate_size
    layer_shapes: dict[str, tuple[int, ...]] = {
        ATTN_NORM: (hidden,),
        QUERY: (spec.query_size, hidden),
        KEY: (spec.kv_size, hidden),
        VALUE: (spec.kv_size, hidden),
        OUTPUT: (hidden, spec.query_size),
        MLP_NORM: (hidden,),
        GATE: (intermediate, hidden),
        UP: (intermediate, hidden),
        DOWN: (hidden, intermediate),
    }
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, hidden)}
    for layer in range(spec.num_layers):
        for role, shape in layer_shapes.items():
            shapes[layer_tensor(layer, role)] = shape
        sizes = (spec.query_size, spec.kv_size, spec.kv_size)
        shapes |= {name: (n,) for name, n in zip(qkv_biases(spec, layer), sizes, strict=False)}
        shapes |= dict.fromkeys(head_norms(spec, layer), (spec.head_dim,))
    shapes[FINAL_NORM] = (hidden,)
    if not spec.tie_embeddings:
        shapes[LM_HEAD] = (spec.vocab_size, hidden)
    return shapes


def check_numbers(path: Path, spec: ModelSpec, num_tensors: int) -> None:
    """Check the numbers of a file's header alone. Raises ModelFileError naming what cannot be."""
    faults = faults_of(spec)
    if faults:
        raise ModelFileError(path, "; ".join(faults))
    if spec.num_layers > num_tensors:
        raise ModelFileError(
            path, f"{spec.num_layers} layers are declared, but the file has {num_tensors} tensors"
        )


def check_layout(
    path: Path,
    spec: ModelSpec,
    stored: Mapping[str, tuple[TensorFormat, tuple[int, ...]]],
    stored_name: Callable[[str], str],
) -> ModelSpec:
    """Check the file's tensors against the numbers of its header, and complete the spec.

    `stored`: the file's own tensor names with format and shape; `stored_name` maps a canonical name
    to the file's. Returns the spec with `num_parameters` and `weight_format` counted.
    Raises ModelFileError naming missing tensors, wrong shapes and tensors that have no place.
    """
    check_numbers(path, spec, len(stored))
    expected = {stored_name(name): shape for name, shape in tensor_shapes(spec).items()}
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
