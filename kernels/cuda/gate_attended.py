"""What attention gave, gated: attended[t, f] *= sigmoid(gates[t, f]) (Qwen3-Next, Qwen3.5).

The grid is (T tokens, pieces of a row); a thread takes one vector of 16 bytes of both. In place, in
the step's dtype, rounded once. Specification: `kernels.reference.delta_net.gate_attended`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from numba import cuda, float32, int64

from kernels.cuda.instructions.early_launch import let_next_begin, wait_for_previous
from kernels.cuda.instructions.elements import LOAD_FLOATS, STORE_FLOATS, VECTOR_LENGTHS
from kernels.cuda.plain_variants import VectorVariant
from kernels.cuda.step_sizes import sigmoid
from kernels.cuda.variant import STORAGE_TYPES, Expectation, Pointer, Scalar


@dataclass(frozen=True, slots=True)
class GateAttendedVariant(VectorVariant):
    """The compile-time parameter: `dtype` of both tensors."""

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        return f"gate_attended_{self.dtype}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        return (self.element, self.element, "int64", "int64")

    @property
    def expectation(self) -> Expectation:
        """Few registers: as many warps as fit hide the memory's latency."""
        return Expectation(40, ("LDG.128", "STG.128", "MUFU"), begins_early=True)

    def grid(self, num_tokens: int, num_features: int) -> tuple[int, int, int]:
        """Return the launch grid; `num_features` F must be a multiple of the vector's length."""
        return self.row_grid(num_tokens, "num_features", num_features)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        return make_gate_attended(self)


def variants(*, every: bool) -> list[GateAttendedVariant]:
    """Return one of the variants, or every one there is."""
    return [GateAttendedVariant(dtype) for dtype in (STORAGE_TYPES if every else ("bfloat16",))]


def make_gate_attended(variant: GateAttendedVariant) -> Callable[..., None]:
    """Return the kernel with its compile-time parameters bound."""
    length, threads = VECTOR_LENGTHS[variant.dtype], variant.threads
    load_floats, store_floats = LOAD_FLOATS[variant.dtype], STORE_FLOATS[variant.dtype]

    def gate_attended(
        attended: Pointer, gates: Pointer, num_features: Scalar, gates_stride: Scalar
    ) -> None:
        """Gate one vector of token blockIdx.x.

        `attended`: [T, F]. `gates`: tokens `gates_stride` elements apart, a multiple of 16 bytes.
        """
        let_next_begin()
        wait_for_previous()
        token = int64(cuda.blockIdx.x)
        feature = (int64(cuda.blockIdx.y) * threads + cuda.threadIdx.x) * length
        if feature < num_features:
            values = cuda.local.array((2, length), float32)
            load_floats(values, 0, attended, token * num_features + feature)
            load_floats(values, 1, gates, token * gates_stride + feature)
            for i in range(length):
                values[0, i] *= sigmoid(values[1, i])
            store_floats(attended, token * num_features + feature, values, 0)

    return gate_attended
