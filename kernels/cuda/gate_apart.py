"""A gate beside what it gates: out[t, p] = a(gates[t, p]) · ups[t · stride + first + p].

The halves of `gate_mul` are one product's. Here `ups` lie elsewhere, a piece of each token's longer
row: of Gemma 4's small models what a layer reads of a token besides its hidden state, P numbers for
each of L layers:

    gates, row t   │ 0 … P-1 │
    ups, row t     │ layer 0 │ layer 1 │ … │ layer L-1 │      first: l · P, stride: L · P

The grid is (T tokens, pieces of a row); a thread makes one vector of 16 bytes. Specification: the
gates of `kernels.reference.gate_mul`, of `gates` and pieces of `ups` side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from numba import cuda, float32, int64

from kernels.cuda.activation import GATES
from kernels.cuda.instructions.early_launch import let_next_begin, wait_for_previous
from kernels.cuda.instructions.elements import LOAD_FLOATS, STORE_FLOATS, VECTOR_LENGTHS
from kernels.cuda.plain_variants import VectorVariant
from kernels.cuda.variant import STORAGE_TYPES, Expectation, Pointer, Scalar, require_one_of


@dataclass(frozen=True, slots=True)
class GateApartVariant(VectorVariant):
    """The compile-time parameters: `dtype` of all tensors; `activation` of the gate.

    Raises UnsupportedVariantError for one that no kernel is written for.
    """

    activation: str

    def __post_init__(self) -> None:
        VectorVariant.__post_init__(self)
        require_one_of("activation", GATES, self.activation)

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        return f"{self.activation}_apart_{self.dtype}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        return (self.element, self.element, self.element, "int64", "int64", "int64")

    @property
    def expectation(self) -> Expectation:
        """Few registers: as many warps as fit hide the memory's latency."""
        return Expectation(40, ("LDG.128", "STG.128", "MUFU"), begins_early=True)

    def grid(self, num_tokens: int, num_features: int) -> tuple[int, int, int]:
        """Return the launch grid; `num_features` P must be a multiple of the vector's length.

        Raises UnsupportedVariantError.
        """
        return self.row_grid(num_tokens, "num_features", num_features)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        return make_gate_apart(self)


def variants(*, every: bool) -> list[GateApartVariant]:
    """Return one of the variants, or every one there is."""
    if not every:
        return [GateApartVariant("bfloat16", "gelu")]
    return [GateApartVariant(dtype, activation) for activation in GATES for dtype in STORAGE_TYPES]


def make_gate_apart(variant: GateApartVariant) -> Callable[..., None]:
    """Return the kernel with its compile-time parameters bound."""
    length, threads = VECTOR_LENGTHS[variant.dtype], variant.threads
    gated = GATES[variant.activation]
    load_floats, store_floats = LOAD_FLOATS[variant.dtype], STORE_FLOATS[variant.dtype]

    def gate_apart(
        out: Pointer,
        gates: Pointer,
        ups: Pointer,
        num_features: Scalar,
        up_first: Scalar,
        up_stride: Scalar,
    ) -> None:
        """Write one vector of row blockIdx.x.

        `out`, `gates`: [T, P]. `ups`: token t's begin at element t · `up_stride` + `up_first`, both
        multiples of a vector's length.
        """
        let_next_begin()
        wait_for_previous()
        token = int64(cuda.blockIdx.x)
        feature = (int64(cuda.blockIdx.y) * threads + cuda.threadIdx.x) * length
        if feature < num_features:
            values = cuda.local.array((2, length), float32)
            load_floats(values, 0, gates, token * num_features + feature)
            load_floats(values, 1, ups, token * up_stride + up_first + feature)
            for i in range(length):
                values[0, i] = gated(values[0, i], values[1, i])
            store_floats(out, token * num_features + feature, values, 0)

    return gate_apart
