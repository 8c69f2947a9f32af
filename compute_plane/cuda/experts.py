"""What the experts of a mixture are multiplied with, as it lies on the device.

The matrices of all experts of a layer lie one behind the other where they can, so that one launch
reads those of whichever experts have rows (`kernels.cuda.expert_tiles`):

    gate 0, up 0 │ gate 1, up 1 │ …      a stack of E matrices [2·F, hidden]; quantised: in turns
    down 0 │ down 1 │ …                  a stack of E matrices [hidden, F]

Where gate and up run in formats of their own, each is a stack; where there is no gate, up is one.
Where an expert's inputs have an order of their own, or a quantised matrix is no whole panels, there
is none, and rows are multiplied expert by expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from compute_plane.cuda.matrices import DenseMatrix, Matrix, Projection, QuantizedMatrix

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class StackedMatrix:
    """`values`: of all experts, [E, N, K], or packed, uint8 [E, bytes]; `matrices`: of each."""

    values: Tensor
    matrices: tuple[Matrix, ...]

    @classmethod
    def of(cls, matrix: Matrix, num_experts: int) -> StackedMatrix:
        """Return what is one matrix of all experts' outputs, those of an expert side by side."""
        num_outputs = matrix.num_outputs // num_experts
        if isinstance(matrix, DenseMatrix):
            values = matrix.values.view(num_experts, num_outputs, -1)
            return cls(values, tuple(DenseMatrix(own) for own in values))
        values = matrix.packed.view(num_experts, -1)
        shape = num_outputs, matrix.num_inputs
        return cls(
            values,
            tuple(
                QuantizedMatrix(matrix.format, own, *shape, in_turns=matrix.in_turns)
                for own in values
            ),
        )

    @property
    def format(self) -> str | None:
        """The label of a quantised one's format, None if it is dense."""
        matrix = self.matrices[0]
        return matrix.format if isinstance(matrix, QuantizedMatrix) else None

    @property
    def can_gate(self) -> bool:
        """Whether products with a gate and what it gates can be gated at once."""
        matrix = self.matrices[0]
        return not isinstance(matrix, QuantizedMatrix) or matrix.in_turns

    @property
    def num_outputs(self) -> int:
        """Outputs N of an expert."""
        return self.matrices[0].num_outputs

    @property
    def num_inputs(self) -> int:
        """Inputs K."""
        matrix = self.matrices[0]
        if isinstance(matrix, QuantizedMatrix):
            return matrix.num_inputs
        return int(matrix.values.shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class ExpertMatrices:
    """`of_experts`: what rows of each are multiplied with. `stacks`: the same, part by part.

    Without stacks an expert's matrices lie anywhere.
    """

    of_experts: tuple[Projection, ...]
    stacks: tuple[StackedMatrix, ...] = ()

    @classmethod
    def stacked(cls, stacks: Sequence[StackedMatrix]) -> ExpertMatrices:
        """Return those of stacks, whose outputs lie side by side."""
        parts = zip(*(stack.matrices for stack in stacks), strict=True)
        return cls(tuple(map(Projection, parts)), tuple(stacks))

    @property
    def num_outputs(self) -> int:
        """Outputs of an expert."""
        return self.of_experts[0].num_outputs

    @property
    def dense_stack(self) -> StackedMatrix | None:
        """The only stack, if it is dense."""
        if len(self.stacks) == 1 and self.stacks[0].format is None:
            return self.stacks[0]
        return None


@dataclass(frozen=True, slots=True, eq=False)
class ExpertBiases:
    """`router`: float32 [E]. `gate_up`, `down`: of each stack [E, N], as its outputs lie.

    Without stacks they are as if there were one.
    """

    router: Tensor
    gate_up: tuple[Tensor, ...]
    down: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SharedExperts:
    """What all tokens go through: `gate_up`, the gate first, and `down`, as of one MLP.

    `gate`: float32 [1, hidden], whose product's sigmoid that is multiplied by; None: it is not.
    """

    gate_up: Projection
    down: Projection
    gate: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ExpertNorms:
    """The norms that parts of a mixture have for themselves, [hidden] each.

    `router`, `experts`: of what these read. `shared_output`, `experts_output`: of what all tokens
    go through, and of what experts give.
    """

    router: Tensor
    experts: Tensor
    shared_output: Tensor
    experts_output: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DeviceExperts:
    """`router`: float32 [E, hidden]. `gate_up`, `down`: as of `DeviceMlp`.

    `biases`, `shared`, `norms`: None where the architecture has none. `correction`: float32 [E],
    added to scores where experts are chosen; None: nothing is. `factors`: float32 [E], what weights
    of each are multiplied by; None: nothing.
    """

    router: Tensor
    gate_up: ExpertMatrices
    down: ExpertMatrices
    biases: ExpertBiases | None = None
    correction: Tensor | None = None
    shared: SharedExperts | None = None
    norms: ExpertNorms | None = None
    factors: Tensor | None = None

    @property
    def stacks(self) -> tuple[StackedMatrix, ...]:
        """All stacks; none if any matrices are in none."""
        of_both = self.gate_up.stacks, self.down.stacks
        return of_both[0] + of_both[1] if all(of_both) else ()


@dataclass(frozen=True, slots=True)
class ExpertUses:
    """What stacks there are: what kernels for them must be ready.

    `quantised`: labels of formats; `gates`: of those with gates in turns. `has_dense`: whether any
    are dense.
    """

    quantised: frozenset[str] = frozenset()
    gates: frozenset[str] = frozenset()
    has_dense: bool = False
