"""What stands between the products of an MLP without a gate: x = relu(x)² (So et al. 2021).

`values` is [T, F], and is written where it is read. The grid is (T tokens, pieces of a row); a
thread takes one vector of 16 bytes. Blocks behind the pieces of rows fetch what the next launch
reads, if it is a library's product (`fetched_weights`), as those of `gate_mul` do.

The square is float32, rounded once. Specification: `kernels.reference.relu2`.

By count, not measured: 2 · 2 bytes a value in a 16-bit type. The product before could do it on the
way out, which is a launch less; what that saves is not known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from numba import cuda, float32, int64

from kernels.cuda.fetched_weights import ARGUMENTS, NOTHING, FetchPlan, fetch_chunks
from kernels.cuda.instructions.early_launch import let_next_begin, wait_for_previous
from kernels.cuda.instructions.elements import LOAD_FLOATS, STORE_FLOATS, VECTOR_LENGTHS
from kernels.cuda.instructions.exact_float32 import multiply_float32
from kernels.cuda.plain_variants import VectorVariant
from kernels.cuda.variant import STORAGE_TYPES, Expectation, Pointer, Scalar


@dataclass(frozen=True, slots=True)
class Relu2Variant(VectorVariant):
    """The compile-time parameter is the `dtype` of `values`."""

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        return f"relu2_{self.dtype}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        return (self.element, "int64", self.element, *ARGUMENTS)

    @property
    def expectation(self) -> Expectation:
        """Few registers: as many warps as fit hide the memory's latency."""
        return Expectation(40, ("LDG.128", "STG.128"), begins_early=True)

    def grid(
        self, num_tokens: int, num_features: int, fetched: FetchPlan = NOTHING
    ) -> tuple[int, int, int]:
        """Return the launch grid; `num_features` F must be a multiple of the vector's length.

        `fetched`: of the next product's weights. Raises UnsupportedVariantError.
        """
        rows, pieces, _ = self.row_grid(num_tokens, "num_features", num_features)
        return (rows, pieces + fetched.num_columns(num_tokens), 1)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        return make_relu2(self)


def variants(*, every: bool) -> list[Relu2Variant]:
    """Return one variant, or every one there is."""
    return [Relu2Variant(dtype) for dtype in (STORAGE_TYPES if every else ("bfloat16",))]


def make_relu2(variant: Relu2Variant) -> Callable[..., None]:
    """Return the kernel with its compile-time parameter bound."""
    length, threads = VECTOR_LENGTHS[variant.dtype], variant.threads
    load_floats, store_floats = LOAD_FLOATS[variant.dtype], STORE_FLOATS[variant.dtype]

    def relu2(
        values: Pointer,
        num_features: Scalar,
        next_weights: Pointer,
        num_chunks: Scalar,
        chunk_pitch: Scalar,
        chunk_bytes: Scalar,
    ) -> None:
        """Write one vector of row blockIdx.x of `values` [T, F].

        `next_weights` and what follows: as in `FetchPlan`.
        """
        let_next_begin()
        first_feature = int64(cuda.blockIdx.y) * threads * length
        if first_feature >= num_features:
            pieces = (num_features + threads * length - 1) // (threads * length)
            block = (cuda.blockIdx.y - pieces) * cuda.gridDim.x + cuda.blockIdx.x
            num_blocks = (cuda.gridDim.y - pieces) * cuda.gridDim.x
            fetch_chunks(next_weights, num_chunks, chunk_pitch, chunk_bytes, block, num_blocks)
        wait_for_previous()
        feature = first_feature + cuda.threadIdx.x * length
        if feature < num_features:
            own = cuda.local.array((1, length), float32)
            place = int64(cuda.blockIdx.x) * num_features + feature
            load_floats(own, 0, values, place)
            for i in range(length):
                value = own[0, i]
                if value < float32(0):  # a NaN stays one
                    value = float32(0)
                own[0, i] = multiply_float32(value, value)
            store_floats(values, place, own, 0)

    return relu2
