"""What the router and the experts of a layer are called, and how they lie in each kind of file.

Canonical names are those of Qwen3-MoE's directories, where every expert's matrices are tensors of
their own: E experts, M of them; I: `ModelSpec.intermediate_size`.

    canonical                                         shape
    model.layers.N.mlp.gate.weight                    [E, hidden]      the router
    model.layers.N.mlp.experts.M.gate_proj.weight     [I, hidden]
    model.layers.N.mlp.experts.M.up_proj.weight       [I, hidden]
    model.layers.N.mlp.experts.M.down_proj.weight     [hidden, I]

    in GGUF files                    shape            holds
    blk.N.ffn_gate_inp.weight        [E, hidden]      the router
    blk.N.ffn_gate_exps.weight       [E, I, hidden]   gate_proj of all experts
    blk.N.ffn_up_exps.weight         [E, I, hidden]
    blk.N.ffn_down_exps.weight       [E, hidden, I]

  Some have besides, S: `Mixture.shared_size`:
    canonical                                          in GGUF files                    shape
    model.layers.N.mlp.gate_correction.bias            blk.N.exp_probs_b.bias           [E]   added where experts are chosen
    model.layers.N.mlp.shared_experts.gate_proj.weight blk.N.ffn_gate_shexp.weight      [S, hidden]
    model.layers.N.mlp.shared_experts.up_proj.weight   blk.N.ffn_up_shexp.weight        [S, hidden]
    model.layers.N.mlp.shared_experts.down_proj.weight blk.N.ffn_down_shexp.weight      [hidden, S]
    model.layers.N.mlp.shared_expert_gate.weight       blk.N.ffn_gate_inp_shexp.weight  [1, hidden], there [hidden]

  gpt-oss has biases of all of these: [E] of the router, [I], [I] and [hidden] of an expert (….bias), in GGUF files
  [E, I], [E, I] and [E, hidden]. Its directories: `stacked_experts`.

    in directories, model.layers.N.…                  shape
    Mixtral    block_sparse_moe.gate.weight           [E, hidden]
               block_sparse_moe.experts.M.w1.weight   [I, hidden]       gate_proj; w3 up_proj, w2 down_proj
    GraniteMoE block_sparse_moe.router.layer.weight   [E, hidden]
               block_sparse_moe.input_linear.weight   [E, 2·I, hidden]  gate_proj, then up_proj
               block_sparse_moe.output_linear.weight  [E, hidden, I]    down_proj
    Granite 4  as GraniteMoE, and shared_mlp.input_linear.weight [2·S, hidden], shared_mlp.output_linear.weight [hidden, S]
    Qwen2-MoE  mlp.shared_expert.gate_proj.weight     [S, hidden]       likewise up_proj, down_proj; Qwen3-Next, Qwen3.5 too
    LFM2       feed_forward.gate.weight               [E, hidden]       feed_forward.expert_bias [E], added where experts are chosen
               feed_forward.experts.M.w1.weight       [I, hidden]       as Mixtral's
    GLM-4.5    mlp.gate.e_score_correction_bias       [E]               dots.llm1 as well
    K-EXAONE   mlp.e_score_correction_bias            [E]
    MiniMax-M2 as Mixtral, and block_sparse_moe.e_score_correction_bias [E]
    ERNIE 4.5  mlp.moe_statics.e_score_correction_bias [1, E]
    Gemma 4    mlp.gate_proj.weight                   [S, hidden]       likewise up_proj, down_proj
               router.proj.weight                     [E, hidden]
               experts.gate_up_proj                   [E, 2·I, hidden]  gate_proj, then up_proj
               experts.down_proj                      [E, hidden, I]

  Gemma 4 has besides (in its GGUF files the shared experts as ffn_gate, ffn_up, ffn_down, and gate and up of experts in one):
    canonical                                 in directories                in GGUF files               shape
    model.layers.N.mlp.gate.scale             router.scale                  blk.N.ffn_gate_inp.scale    [hidden]
    model.layers.N.mlp.experts.down_proj.scale router.per_expert_scale      blk.N.ffn_down_exps.scale   [E]
    model.layers.N.mlp.experts_norm.weight    pre_feedforward_layernorm_2   blk.N.pre_ffw_norm_2.weight [hidden]
    model.layers.N.mlp.shared_output_norm…    post_feedforward_layernorm_1  blk.N.post_ffw_norm_1.weight
    model.layers.N.mlp.experts_output_norm…   post_feedforward_layernorm_2  blk.N.post_ffw_norm_2.weight
"""  # noqa: E501 - a table

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from compute_plane.model.spec import Mixture, ModelSpec

ROUTER: Final = "mlp.gate"
EXPERTS: Final = "mlp.experts"
GATE: Final = "gate_proj"
UP: Final = "up_proj"
DOWN: Final = "down_proj"

CORRECTION: Final = "mlp.gate_correction"
SHARED: Final = "mlp.shared_experts"
SHARED_GATE: Final = "mlp.shared_expert_gate"
SCALE: Final = "scale"
"""The part of a router's vector that its norm has for weights, and of all experts' factors."""
EXPERTS_NORM: Final = "mlp.experts_norm"
SHARED_OUTPUT_NORM: Final = "mlp.shared_output_norm"
EXPERTS_OUTPUT_NORM: Final = "mlp.experts_output_norm"

GGUF_NAMES: Final = {
    ROUTER: "ffn_gate_inp",
    CORRECTION: "exp_probs_b",
    f"{SHARED}.{GATE}": "ffn_gate_shexp",
    f"{SHARED}.{UP}": "ffn_up_shexp",
    f"{SHARED}.{DOWN}": "ffn_down_shexp",
    SHARED_GATE: "ffn_gate_inp_shexp",
    f"{EXPERTS}.{GATE}": "ffn_gate_exps",
    f"{EXPERTS}.{UP}": "ffn_up_exps",
    f"{EXPERTS}.{DOWN}": "ffn_down_exps",
    f"{EXPERTS}.gate_{UP}": "ffn_gate_up_exps",
    EXPERTS_NORM: "pre_ffw_norm_2",
    SHARED_OUTPUT_NORM: "post_ffw_norm_1",
    EXPERTS_OUTPUT_NORM: "post_ffw_norm_2",
}
"""Of a GGUF file's tensors, the experts' of one kind in one."""

_NUMBERED: Final = {GATE: "w1", UP: "w3", DOWN: "w2"}
_MLP: Final = "mlp"
_BLOCK: Final = "block_sparse_moe"
_CORRECTION: Final = "e_score_correction_bias"
_SHARED_OF_QWEN2: Final = "mlp.shared_expert"
_SHARE_ONE: Final = ("qwen2moe", "qwen3next", "qwen35moe")
_OWN_EXPERTS: Final = {
    "mixtral": (_BLOCK, ""),
    "lfm2moe": ("feed_forward", "expert_bias"),
    "minimax-m2": (_BLOCK, _CORRECTION),
}
"""By architecture, what holds experts with w1, w2 and w3, and what it calls their correction."""
GEMMA4: Final = "gemma4"
GGUF_NAMES_OF_GEMMA4: Final = {
    f"{SHARED}.{GATE}": "ffn_gate",
    f"{SHARED}.{UP}": "ffn_up",
    f"{SHARED}.{DOWN}": "ffn_down",
}
NAMES_OF_GEMMA4: Final = {
    f"{ROUTER}.weight": "router.proj.weight",
    f"{ROUTER}.{SCALE}": "router.scale",
    f"{EXPERTS}.{DOWN}.{SCALE}": "router.per_expert_scale",
    f"{SHARED}.{GATE}.weight": "mlp.gate_proj.weight",
    f"{SHARED}.{UP}.weight": "mlp.up_proj.weight",
    f"{SHARED}.{DOWN}.weight": "mlp.down_proj.weight",
    f"{EXPERTS_NORM}.weight": "pre_feedforward_layernorm_2.weight",
    f"{SHARED_OUTPUT_NORM}.weight": "post_feedforward_layernorm_1.weight",
    f"{EXPERTS_OUTPUT_NORM}.weight": "post_feedforward_layernorm_2.weight",
}
"""What its directories call tensors of a mixture."""
_OF_GRANITE: Final = ("granitemoe", "granitehybrid")
_SHARED_OF_GRANITE: Final = "shared_mlp"
_STATICS_OF_ERNIE: Final = "mlp.moe_statics"


@dataclass(frozen=True, slots=True)
class RowsOfRole:
    """Where a tensor's rows lie in files: `count` from `first` on of those of the one `stored`.

    `stored`: its name in a layer. `shape`: of all that is stored there.
    """

    stored: str
    first: int
    count: int
    shape: tuple[int, ...]


def expert_role(expert: int, part: str) -> str:
    """Return the role of one of an expert's matrices: GATE, UP or DOWN."""
    return f"{EXPERTS}.{expert}.{part}"


def parts_of(spec: ModelSpec) -> list[str]:
    """Return the parts of an expert, in the order of use."""
    return [GATE, UP, DOWN] if spec.gates_mlps else [UP, DOWN]


def mixture_shapes(spec: ModelSpec, mixture: Mixture) -> dict[str, tuple[int, ...]]:
    """Return the roles of a layer's router and experts and their shapes, in the order of use."""
    parts = _part_shapes(spec, spec.intermediate_size)
    shapes: dict[str, tuple[int, ...]] = {ROUTER: (mixture.num_experts, spec.hidden_size)}
    for expert in range(mixture.num_experts):
        shapes |= {expert_role(expert, part): shape for part, shape in parts.items()}
    return shapes


def shared_shapes(spec: ModelSpec, mixture: Mixture) -> dict[str, tuple[int, ...]]:
    """Return the roles and shapes of what all tokens of a layer go through; empty if nothing."""
    if not mixture.shared_size:
        return {}
    parts = _part_shapes(spec, mixture.shared_size)
    shapes: dict[str, tuple[int, ...]] = {f"{SHARED}.{part}": parts[part] for part in parts}
    if mixture.gates_shared:
        shapes[SHARED_GATE] = (1, spec.hidden_size)
    return shapes


def bias_shapes(spec: ModelSpec, mixture: Mixture) -> dict[str, tuple[int, ...]]:
    """Return the roles of what has a vector beside its matrices, and the vectors' shapes."""
    shapes: dict[str, tuple[int, ...]] = {}
    if spec.has_all_biases:
        shapes = {role: shape[:1] for role, shape in mixture_shapes(spec, mixture).items()}
    if mixture.corrects_choice:
        shapes[CORRECTION] = (mixture.num_experts,)
    return shapes


def own_norm_shapes(spec: ModelSpec, mixture: Mixture) -> dict[str, tuple[int, ...]]:
    """Return the tensors of norms and factors that a mixture may have, by name in a layer."""
    if not mixture.has_own_norms:
        return {}
    norms = EXPERTS_NORM, SHARED_OUTPUT_NORM, EXPERTS_OUTPUT_NORM
    vectors = f"{ROUTER}.{SCALE}", *(f"{norm}.weight" for norm in norms)
    return {
        **dict.fromkeys(vectors, (spec.hidden_size,)),
        f"{EXPERTS}.{DOWN}.{SCALE}": (mixture.num_experts,),
    }


def _part_shapes(spec: ModelSpec, inner: int) -> dict[str, tuple[int, int]]:
    hidden = spec.hidden_size
    shapes = {GATE: (inner, hidden), UP: (inner, hidden), DOWN: (hidden, inner)}
    return {part: shapes[part] for part in parts_of(spec)}


def stored_mixture(
    spec: ModelSpec, mixture: Mixture, *, in_gguf: bool
) -> Iterator[tuple[str, RowsOfRole]]:
    """Yield the tensors of a layer that files of this kind hold by other names or in others."""
    if in_gguf:
        yield from _stacked(spec, mixture)
        if mixture.gates_shared:
            gate = f"{SHARED_GATE}.weight"
            yield gate, RowsOfRole(gate, 0, 1, (spec.hidden_size,))
    elif spec.architecture == GEMMA4:
        stored = f"experts.gate_{UP}", f"experts.{DOWN}"
        yield from _fused_and_stacked(spec, mixture, *stored)
    elif spec.architecture in _SHARE_ONE:
        for role, shape in shared_shapes(spec, mixture).items():
            yield f"{role}.weight", _whole(role.replace(SHARED, _SHARED_OF_QWEN2), shape)
    elif spec.architecture in _OWN_EXPERTS:
        yield from _named_by_number(spec, mixture, *_OWN_EXPERTS[spec.architecture])
    elif mixture.corrects_choice:
        module, shape = ROUTER, (mixture.num_experts,)
        if spec.architecture == "exaone-moe":
            module = _MLP
        elif spec.architecture == "ernie4_5-moe":
            module, shape = _STATICS_OF_ERNIE, (1, mixture.num_experts)
        yield f"{CORRECTION}.bias", RowsOfRole(f"{module}.{_CORRECTION}", 0, 1, shape)
    elif spec.architecture in _OF_GRANITE:
        shape = mixture.num_experts, spec.hidden_size
        yield f"{ROUTER}.weight", _whole(f"{_BLOCK}.router.layer", shape)
        stored = f"{_BLOCK}.input_linear.weight", f"{_BLOCK}.output_linear.weight"
        yield from _fused_and_stacked(spec, mixture, *stored)
        if mixture.shared_size:
            yield from _fused_and_shared(spec, mixture)


def _named_by_number(
    spec: ModelSpec, mixture: Mixture, block: str, correction: str
) -> Iterator[tuple[str, RowsOfRole]]:
    """Yield those of a block whose experts have w1, w2 and w3."""
    yield f"{ROUTER}.weight", _whole(f"{block}.gate", (mixture.num_experts, spec.hidden_size))
    if mixture.corrects_choice:
        stored = RowsOfRole(f"{block}.{correction}", 0, 1, (mixture.num_experts,))
        yield f"{CORRECTION}.bias", stored
    for expert in range(mixture.num_experts):
        for part, shape in _part_shapes(spec, spec.intermediate_size).items():
            module = f"{block}.experts.{expert}.{_NUMBERED[part]}"
            yield f"{expert_role(expert, part)}.weight", _whole(module, shape)


def _whole(module: str, shape: tuple[int, ...]) -> RowsOfRole:
    return RowsOfRole(f"{module}.weight", 0, shape[0], shape)


def _stacked(spec: ModelSpec, mixture: Mixture) -> Iterator[tuple[str, RowsOfRole]]:
    if mixture.is_fused_in_gguf:
        fused = f"{EXPERTS}.gate_{UP}.weight", f"{EXPERTS}.{DOWN}.weight"
        yield from _fused_and_stacked(spec, mixture, *fused)
        return
    for part, (rows, columns) in _part_shapes(spec, spec.intermediate_size).items():
        stored, shape = f"{EXPERTS}.{part}", (mixture.num_experts, rows, columns)
        for expert in range(mixture.num_experts):
            role = expert_role(expert, part)
            yield f"{role}.weight", RowsOfRole(f"{stored}.weight", expert * rows, rows, shape)
            if spec.has_all_biases:
                yield f"{role}.bias", RowsOfRole(f"{stored}.bias", expert, 1, shape[:2])


def _fused_and_stacked(
    spec: ModelSpec, mixture: Mixture, stored: str, outputs: str
) -> Iterator[tuple[str, RowsOfRole]]:
    count, inner, hidden = mixture.num_experts, spec.intermediate_size, spec.hidden_size
    shape = count, 2 * inner, hidden
    for expert in range(count):
        for place, part in enumerate((GATE, UP)):
            first = (2 * expert + place) * inner
            yield f"{expert_role(expert, part)}.weight", RowsOfRole(stored, first, inner, shape)
        rows = RowsOfRole(outputs, expert * hidden, hidden, (count, hidden, inner))
        yield f"{expert_role(expert, DOWN)}.weight", rows


def _fused_and_shared(spec: ModelSpec, mixture: Mixture) -> Iterator[tuple[str, RowsOfRole]]:
    size, hidden = mixture.shared_size, spec.hidden_size
    stored, shape = f"{_SHARED_OF_GRANITE}.input_linear.weight", (2 * size, hidden)
    for place, part in enumerate((GATE, UP)):
        yield f"{SHARED}.{part}.weight", RowsOfRole(stored, place * size, size, shape)
    yield f"{SHARED}.{DOWN}.weight", _whole(f"{_SHARED_OF_GRANITE}.output_linear", (hidden, size))
