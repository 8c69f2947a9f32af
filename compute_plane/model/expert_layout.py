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

  gpt-oss has biases of all of these: [E] of the router, [I], [I] and [hidden] of an expert (….bias), in GGUF files
  [E, I], [E, I] and [E, hidden]. Its directories: `stacked_experts`.

    in directories, model.layers.N.…                  shape
    Mixtral    block_sparse_moe.gate.weight           [E, hidden]
               block_sparse_moe.experts.M.w1.weight   [I, hidden]       gate_proj; w3 up_proj, w2 down_proj
    GraniteMoE block_sparse_moe.router.layer.weight   [E, hidden]
               block_sparse_moe.input_linear.weight   [E, 2·I, hidden]  gate_proj, then up_proj
               block_sparse_moe.output_linear.weight  [E, hidden, I]    down_proj
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

GGUF_NAMES: Final = {
    ROUTER: "ffn_gate_inp",
    f"{EXPERTS}.{GATE}": "ffn_gate_exps",
    f"{EXPERTS}.{UP}": "ffn_up_exps",
    f"{EXPERTS}.{DOWN}": "ffn_down_exps",
}
"""Of a GGUF file's tensors, the experts' of one kind in one."""

_MIXTRAL: Final = {GATE: "w1", UP: "w3", DOWN: "w2"}
_BLOCK: Final = "block_sparse_moe"


@dataclass(frozen=True, slots=True)
class RowsOfRole:
    """Where a role's rows lie in files: `count` from `first` on of the rows of the role `stored`.

    `shape`: of all that is stored there. `part`: "weight" or "bias", of both.
    """

    stored: str
    first: int
    count: int
    shape: tuple[int, ...]
    part: str = "weight"


def expert_role(expert: int, part: str) -> str:
    """Return the role of one of an expert's matrices: GATE, UP or DOWN."""
    return f"{EXPERTS}.{expert}.{part}"


def mixture_shapes(spec: ModelSpec, mixture: Mixture) -> dict[str, tuple[int, ...]]:
    """Return the roles of a layer's router and experts and their shapes, in the order of use."""
    shapes: dict[str, tuple[int, ...]] = {ROUTER: (mixture.num_experts, spec.hidden_size)}
    for expert in range(mixture.num_experts):
        shapes |= {expert_role(expert, part): shape for part, shape in _part_shapes(spec).items()}
    return shapes


def bias_shapes(spec: ModelSpec, mixture: Mixture) -> dict[str, tuple[int, ...]]:
    """Return the roles of a layer's router and experts and the shapes of their biases."""
    return {role: shape[:1] for role, shape in mixture_shapes(spec, mixture).items()}


def _part_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    inner, hidden = spec.intermediate_size, spec.hidden_size
    return {GATE: (inner, hidden), UP: (inner, hidden), DOWN: (hidden, inner)}


def stored_mixture(
    spec: ModelSpec, mixture: Mixture, *, in_gguf: bool
) -> Iterator[tuple[str, RowsOfRole]]:
    """Yield the roles that files of this kind hold by other names or in other tensors."""
    if in_gguf:
        yield from _stacked(spec, mixture)
    elif spec.architecture == "mixtral":
        yield ROUTER, _whole(f"{_BLOCK}.gate", (mixture.num_experts, spec.hidden_size))
        for expert in range(mixture.num_experts):
            for part, shape in _part_shapes(spec).items():
                stored = f"{_BLOCK}.experts.{expert}.{_MIXTRAL[part]}"
                yield expert_role(expert, part), _whole(stored, shape)
    elif spec.architecture == "granitemoe":
        yield ROUTER, _whole(f"{_BLOCK}.router.layer", (mixture.num_experts, spec.hidden_size))
        yield from _fused_and_stacked(spec, mixture)


def _whole(stored: str, shape: tuple[int, ...]) -> RowsOfRole:
    return RowsOfRole(stored, 0, shape[0], shape)


def _stacked(spec: ModelSpec, mixture: Mixture) -> Iterator[tuple[str, RowsOfRole]]:
    for part, (rows, columns) in _part_shapes(spec).items():
        shape = mixture.num_experts, rows, columns
        for expert in range(mixture.num_experts):
            run = RowsOfRole(f"{EXPERTS}.{part}", expert * rows, rows, shape)
            yield expert_role(expert, part), run
            if spec.has_all_biases:
                biases = mixture.num_experts, rows
                yield (
                    expert_role(expert, part),
                    RowsOfRole(f"{EXPERTS}.{part}", expert, 1, biases, "bias"),
                )


def _fused_and_stacked(spec: ModelSpec, mixture: Mixture) -> Iterator[tuple[str, RowsOfRole]]:
    count, inner, hidden = mixture.num_experts, spec.intermediate_size, spec.hidden_size
    stored, shape = f"{_BLOCK}.input_linear", (count, 2 * inner, hidden)
    for expert in range(count):
        for place, part in enumerate((GATE, UP)):
            first = (2 * expert + place) * inner
            yield expert_role(expert, part), RowsOfRole(stored, first, inner, shape)
        down = RowsOfRole(
            f"{_BLOCK}.output_linear", expert * hidden, hidden, (count, hidden, inner)
        )
        yield expert_role(expert, DOWN), down
