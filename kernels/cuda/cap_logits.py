"""Logits that stay below a cap, in place: x becomes cap · tanh(x / cap) (Gemma 4).

Below 1 tanh is the beginning of Lambert's continued fraction, above it what it is short of 1:

    u = x / cap   |u| < 1   x · (945 + 105·u² + u⁴) / (945 + 420·u² + 15·u⁴)
                  else      ± (cap − 2 · cap / (1 + e^(2·|u|)))

So nothing cancels: the error is some units in the last place however small a logit is. Far out
e^(2·|u|) is ∞ and the logit the cap. What is not finite becomes NaN, so that the sampler notices it
as without a cap. Specification: `kernels.reference.capped_logits`.

All rows are one run of numbers, a thread takes 16 bytes of it; what is left behind the last 16
bytes of an odd vocabulary, one of them takes one by one. By count, not measured: 8 bytes of the
memory's time a logit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from numba import cuda, float32, int64

from kernels.cuda.instructions.conversions import exp2, reciprocal
from kernels.cuda.instructions.early_launch import let_next_begin, wait_for_previous
from kernels.cuda.instructions.elements import LOAD_FLOATS, STORE_FLOATS, VECTOR_LENGTHS
from kernels.cuda.instructions.exact_float32 import divide_float32
from kernels.cuda.variant import Expectation, Pointer, Scalar

LENGTH = VECTOR_LENGTHS["float32"]
ONE, TWO = float32(1), float32(2)
TWICE_LOG2_E = float32(2 * math.log2(math.e))
NEAR = float32(1)
"""Below it, the continued fraction is right to 10⁻⁷."""

load_floats, store_floats = LOAD_FLOATS["float32"], STORE_FLOATS["float32"]


@dataclass(frozen=True, slots=True)
class CapLogitsVariant:
    """There is nothing to choose: logits are float32, and the cap is the launch's."""

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        return "cap_logits"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        return ("float32*", "int64", "float32")

    @property
    def expectation(self) -> Expectation:
        """Few registers: as many warps as fit hide the memory's latency."""
        return Expectation(32, ("LDG.128", "STG.128", "MUFU"), begins_early=True)

    def grid(self, num_elements: int) -> tuple[int, int, int]:
        """Return the launch grid."""
        return (-(-num_elements // (LENGTH * self.threads)), 1, 1)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        return make_cap_logits(self)


def variants(*, every: bool) -> list[CapLogitsVariant]:  # noqa: ARG001 - there are no more
    """Return the one there is."""
    return [CapLogitsVariant()]


@cuda.jit(device=True, inline="always")
def capped(x: Scalar, cap: Scalar, inverse: Scalar) -> Scalar:
    """Return cap · tanh(x / cap), or NaN. `inverse`: 1 / cap."""
    size = abs(x * inverse)
    square = size * size
    above = (square + float32(105)) * square + float32(945)
    below = (float32(15) * square + float32(420)) * square + float32(945)
    is_near = size < NEAR
    share = reciprocal(below if is_near else ONE + exp2(size * TWICE_LOG2_E))
    far = cap - TWO * cap * share
    value = x * above * share if is_near else (far if x > 0 else -far)
    return value + (x - x)


def make_cap_logits(variant: CapLogitsVariant) -> Callable[..., None]:
    """Return the kernel."""
    threads = variant.threads

    def cap_logits(logits: Pointer, num_elements: Scalar, cap: Scalar) -> None:
        """Cap four numbers, or what is left. `logits`: [O · V], at a multiple of 16 bytes."""
        let_next_begin()
        wait_for_previous()
        first = (int64(cuda.blockIdx.x) * threads + cuda.threadIdx.x) * LENGTH
        inverse = divide_float32(ONE, cap)
        if first + LENGTH <= num_elements:
            values = cuda.local.array((1, LENGTH), float32)
            load_floats(values, 0, logits, first)
            for i in range(LENGTH):
                values[0, i] = capped(values[0, i], cap, inverse)
            store_floats(logits, first, values, 0)
        else:
            for element in range(first, num_elements):
                logits[element] = capped(logits[element], cap, inverse)

    return cap_logits
