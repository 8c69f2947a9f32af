"""The MLP of a layer, or its mixture of experts, as it will lie on the device.

The matrices of all experts are planned as one, a stack (`experts`), where they can be one behind
the other: where no inputs have an order of their own, and quantised matrices are whole panels.

    a stack     gate 0 │ up 0 │ gate 1 │ up 1 │ …      one matrix [E · 2·F, hidden]
    otherwise   gate 0 │ up 0     gate 1 │ up 1   …    a matrix each
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from compute_plane.cuda.experts import (
    DeviceExperts,
    ExpertBiases,
    ExpertMatrices,
    ExpertNorms,
    SharedExperts,
    StackedMatrix,
)
from compute_plane.cuda.planned_matrix import (
    Placed,
    PlannedMatrix,
    projection_of,
    values_of,
)
from compute_plane.cuda.weights import DeviceMlp
from compute_plane.model import expert_layout, layout
from compute_plane.model.errors import UnsupportedModelError
from compute_plane.model.spec import Mixture, ModelSpec
from compute_plane.model.tensor import RawTensor, TensorFormat, TensorSource
from kernels.cuda.quantized_formats import GATE_TURN, PANEL_ROWS


@dataclass(frozen=True, slots=True, eq=False)
class PlannedMlp:
    """As in `DeviceMlp`."""

    gate_up: tuple[PlannedMatrix, ...]
    down: tuple[PlannedMatrix, ...]

    @property
    def matrices(self) -> tuple[PlannedMatrix, ...]:
        """All of it."""
        return (*self.gate_up, *self.down)

    def at(self, placed: Placed) -> DeviceMlp:
        """Return it where it lies."""
        return DeviceMlp(projection_of(placed, self.gate_up), projection_of(placed, self.down))


@dataclass(frozen=True, slots=True, eq=False)
class PlannedBiases:
    """As in `ExpertBiases`, but vectors: of all experts one, each expert's behind the other's."""

    router: PlannedMatrix
    gate_up: PlannedMatrix
    down: PlannedMatrix


@dataclass(frozen=True, slots=True, eq=False)
class PlannedShared:
    """As in `SharedExperts`."""

    mlp: PlannedMlp
    gate: PlannedMatrix | None = None

    def at(self, placed: Placed) -> SharedExperts:
        """Return it where it lies."""
        mlp, gate = self.mlp.at(placed), self.gate
        return SharedExperts(
            mlp.gate_up, mlp.down, None if gate is None else values_of(placed(gate))
        )


@dataclass(frozen=True, slots=True, eq=False)
class PlannedNorms:
    """As in `ExpertNorms`. `factors`: as in `DeviceExperts`."""

    router: PlannedMatrix
    experts: PlannedMatrix
    shared_output: PlannedMatrix
    experts_output: PlannedMatrix
    factors: PlannedMatrix

    @property
    def vectors(self) -> tuple[PlannedMatrix, ...]:
        """All of it."""
        of_both = self.shared_output, self.experts_output
        return (self.router, self.experts, *of_both, self.factors)

    def at(self, placed: Placed) -> tuple[ExpertNorms, Tensor]:
        """Return norms and factors where they lie."""
        *norms, factors = (values_of(placed(one)).view(-1) for one in self.vectors)
        return ExpertNorms(*norms), factors


@dataclass(frozen=True, slots=True, eq=False)
class PlannedExperts:
    """As in `DeviceExperts`.

    `parts`: of each expert; where it `is_stacked` one, with the matrices of all.
    """

    router: PlannedMatrix
    parts: tuple[PlannedMlp, ...]
    num_experts: int
    is_stacked: bool
    biases: PlannedBiases | None = None
    correction: PlannedMatrix | None = None
    shared: PlannedShared | None = None
    norms: PlannedNorms | None = None

    @property
    def vectors(self) -> tuple[PlannedMatrix, ...]:
        """What is in float32 or no matrix: the router, what gates, biases, corrections."""
        biases, shared = self.biases, self.shared
        found = [self.router, self.correction, None if shared is None else shared.gate]
        if biases is not None:
            found += [biases.router, biases.gate_up, biases.down]
        found += () if self.norms is None else self.norms.vectors
        return tuple(one for one in found if one is not None)

    @property
    def of_experts(self) -> tuple[PlannedMatrix, ...]:
        """What chosen experts multiply with."""
        return tuple(matrix for part in self.parts for matrix in part.matrices)

    @property
    def matrices(self) -> tuple[PlannedMatrix, ...]:
        """All of it but `vectors`."""
        of_all = () if self.shared is None else self.shared.mlp.matrices
        return (*self.of_experts, *of_all)

    def at(self, placed: Placed) -> DeviceExperts:
        """Return it where it lies."""
        correction, shared = self.correction, self.shared
        router, norms, factors = values_of(placed(self.router)), None, None
        if self.norms is not None:
            norms, factors = self.norms.at(placed)
            # What it reads is divided by √hidden, too: here nothing is rounded to 16 bits.
            router = router * router.shape[1] ** -0.5
        return DeviceExperts(
            router,
            self._matrices(placed, [part.gate_up for part in self.parts]),
            self._matrices(placed, [part.down for part in self.parts]),
            None if self.biases is None else self._placed_biases(placed, self.biases),
            None if correction is None else values_of(placed(correction)).view(-1),
            None if shared is None else shared.at(placed),
            norms,
            factors,
        )

    def _placed_biases(self, placed: Placed, biases: PlannedBiases) -> ExpertBiases:
        """Return biases where they lie, those of gates as their rows do."""
        router, gate_up, down = (
            values_of(placed(planned)) for planned in (biases.router, biases.gate_up, biases.down)
        )
        of_stacks: tuple[Tensor, ...] = (gate_up.view(self.num_experts, -1),)
        matrices = self.parts[0].gate_up
        if matrices[0].in_turns:
            turns = gate_up.view(self.num_experts, 2, -1, GATE_TURN).transpose(1, 2)
            of_stacks = (turns.reshape(self.num_experts, -1),)
        elif self.is_stacked and len(matrices) > 1:
            of_stacks = tuple(half.contiguous() for half in of_stacks[0].chunk(2, dim=1))
        return ExpertBiases(router.view(-1), of_stacks, down.view(self.num_experts, -1))

    def _matrices(
        self, placed: Placed, parts: Iterable[tuple[PlannedMatrix, ...]]
    ) -> ExpertMatrices:
        projections = tuple(projection_of(placed, part) for part in parts)
        if not self.is_stacked:
            return ExpertMatrices(projections)
        return ExpertMatrices.stacked(
            [StackedMatrix.of(matrix, self.num_experts) for matrix in projections[0].parts]
        )


def plan_feedforward(
    spec: ModelSpec,
    source: TensorSource,
    layer: int,
    format_of: Callable[[RawTensor], TensorFormat],
    joined: Callable[..., tuple[PlannedMatrix, ...]],
    vector: Callable[..., PlannedMatrix],
) -> PlannedMlp | PlannedExperts | None:
    """Plan a layer's MLP or its mixture, if it has one; as `plan_mlp` and `plan_experts`."""
    mixture = spec.mixture_of(layer)
    if mixture is not None:
        return plan_experts(spec, mixture, source, layer, format_of, joined, vector)
    if not spec.has_mlp(layer):
        return None
    names = (layout.layer_tensor(layer, role) for role in layout.mlp_roles(spec))
    return plan_mlp(joined, [source.tensor(name) for name in names])


def plan_mlp(
    joined: Callable[..., tuple[PlannedMatrix, ...]], tensors: Sequence[RawTensor]
) -> PlannedMlp:
    """Plan an MLP. `joined`: plans matrices of tensors that read the same input.

    `tensors`: gate, up, down; or the last two.
    """
    *gate_up, down = tensors
    (planned,) = joined(down)
    order = None
    if planned.is_quantised:
        # Its order becomes that of gate's and up's outputs.
        order = down.input_order
        planned = replace(planned, tensors=(replace(down, input_order=None),))
    return PlannedMlp(tuple(map(_in_turns, joined(*gate_up, row_order=order))), (planned,))


def _in_turns(planned: PlannedMatrix) -> PlannedMatrix:
    """Plan a gate and what it gates in turns, if both are of one quantised matrix."""
    num_outputs = planned.tensors[0].shape[0]
    has_both = len(planned.tensors) > 1 and planned.is_quantised
    return replace(planned, in_turns=has_both and num_outputs % GATE_TURN == 0)


def plan_experts(
    spec: ModelSpec,
    mixture: Mixture,
    source: TensorSource,
    layer: int,
    format_of: Callable[[RawTensor], TensorFormat],
    joined: Callable[..., tuple[PlannedMatrix, ...]],
    vector: Callable[..., PlannedMatrix],
) -> PlannedExperts:
    """Plan a layer's mixture. Raises UnsupportedModelError where experts run in several formats.

    `vector`: plans a vector of the tensors of these names, in the dtype of a step or in `target`.
    """

    def tensor(role: str) -> RawTensor:
        return source.tensor(layout.layer_tensor(layer, role))

    parts = expert_layout.parts_of(spec)
    experts = [
        tuple(tensor(expert_layout.expert_role(expert, part)) for part in parts)
        for expert in range(mixture.num_experts)
    ]
    formats = {tuple(map(format_of, expert)) for expert in experts}
    if len(formats) > 1:
        raise UnsupportedModelError(
            experts[0][0].path,
            f"experts of a layer must be stored in one format, those of layer {layer} are not",
        )
    (*of_read, of_down), *_ = formats
    router = PlannedMatrix((tensor(expert_layout.ROUTER),), TensorFormat.F32)
    *read, downs = (tuple(part) for part in zip(*experts, strict=True))
    gate_up: tuple[PlannedMatrix, ...]
    if len(set(of_read)) == 1:
        both = tuple(tensor for of_one in zip(*read, strict=True) for tensor in of_one)
        stack = _stacked(both, of_read[0], mixture)
        gate_up = (_in_turns(stack) if spec.gates_mlps else stack,)
    else:
        gate_up = tuple(
            _stacked(tensors, own, mixture) for tensors, own in zip(read, of_read, strict=True)
        )
    biases = _plan_biases(mixture, layer, vector) if spec.has_all_biases else None
    correction = None
    if mixture.corrects_choice:
        name = layout.layer_tensor(layer, expert_layout.CORRECTION, layout.BIAS)
        correction = vector(name, target=TensorFormat.F32)
    norms = _plan_norms(layer, vector) if mixture.has_own_norms else None
    beside = biases, correction, _plan_shared(mixture, parts, tensor, joined), norms
    stacked = PlannedMlp(gate_up, (_stacked(downs, of_down, mixture),))
    if all(map(_can_be_stacked, stacked.matrices)):
        return PlannedExperts(router, (stacked,), mixture.num_experts, True, *beside)
    planned = tuple(plan_mlp(joined, expert) for expert in experts)
    return PlannedExperts(router, planned, mixture.num_experts, False, *beside)


def _plan_shared(
    mixture: Mixture,
    parts: Sequence[str],
    tensor: Callable[[str], RawTensor],
    joined: Callable[..., tuple[PlannedMatrix, ...]],
) -> PlannedShared | None:
    """Plan what all tokens of a layer go through. `tensor`: by its role; `parts`: of an MLP."""
    if not mixture.shared_size:
        return None
    mlp = plan_mlp(joined, [tensor(f"{expert_layout.SHARED}.{part}") for part in parts])
    gate = None
    if mixture.gates_shared:
        gate = PlannedMatrix((tensor(expert_layout.SHARED_GATE),), TensorFormat.F32)
    return PlannedShared(mlp, gate)


def _plan_norms(layer: int, vector: Callable[..., PlannedMatrix]) -> PlannedNorms:
    def of(role: str, part: str = layout.WEIGHT, **target: TensorFormat) -> PlannedMatrix:
        return vector(layout.layer_tensor(layer, role, part), **target)

    down = f"{expert_layout.EXPERTS}.{expert_layout.DOWN}"
    return PlannedNorms(
        router=of(expert_layout.ROUTER, expert_layout.SCALE),
        experts=of(expert_layout.EXPERTS_NORM),
        shared_output=of(expert_layout.SHARED_OUTPUT_NORM),
        experts_output=of(expert_layout.EXPERTS_OUTPUT_NORM),
        factors=of(down, expert_layout.SCALE, target=TensorFormat.F32),
    )


def _plan_biases(
    mixture: Mixture, layer: int, vector: Callable[..., PlannedMatrix]
) -> PlannedBiases:
    def name(role: str) -> str:
        return layout.layer_tensor(layer, role, layout.BIAS)

    def of_all(*parts: str) -> PlannedMatrix:
        experts = range(mixture.num_experts)
        roles = (expert_layout.expert_role(expert, part) for expert in experts for part in parts)
        return vector(*map(name, roles))

    return PlannedBiases(
        router=vector(name(expert_layout.ROUTER), target=TensorFormat.F32),
        gate_up=of_all(expert_layout.GATE, expert_layout.UP),
        down=of_all(expert_layout.DOWN),
    )


def _stacked(
    tensors: tuple[RawTensor, ...], target: TensorFormat, mixture: Mixture
) -> PlannedMatrix:
    """Plan all experts' matrices as one."""
    return PlannedMatrix(tensors, target, num_stacked=mixture.num_experts)


def _can_be_stacked(planned: PlannedMatrix) -> bool:
    """Whether each of a stack's matrices is read as if it were alone."""
    if not planned.is_quantised:
        return True
    if any(tensor.input_order is not None for tensor in planned.tensors):
        return False
    return planned.num_outputs // planned.num_stacked % PANEL_ROWS == 0
