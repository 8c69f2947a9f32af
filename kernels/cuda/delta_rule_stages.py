"""What `delta_rule`, or `selective_scan`, copies to shared memory ahead of its tokens.

    of a token   │ q [Dk] │ k [Dk] │ v of the block's columns │ β, α, _, _ │

q, k and v are copied vector by vector, by threads that are neighbours; β and α by a thread each.
Where what comes out is normalised and gated, z of the head as well, in the step's dtype, and once
the norm's weights. Tokens behind a row's end are not touched, nor is their place in the stage.

What `selective_scan` has in these places: c, b, x of the block's columns, and Δ, α.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from numba import cuda, int32, int64

from kernels.cuda.instructions.addresses import anew, multiply_add_wide
from kernels.cuda.instructions.async_copies import commit_copies, copy_async, copy_word_async
from kernels.cuda.instructions.elements import VECTOR_LENGTHS
from kernels.cuda.variant import DeviceFunction, Pointer, Scalar

if TYPE_CHECKING:
    from kernels.cuda.delta_rule import DeltaRuleVariant

VECTOR: Final = 4
"""Floats that are copied at once."""


class Staged(Protocol):
    """What a variant says of a block's stages."""

    @property
    def key_size(self) -> int:
        """Elements of a key."""
        ...

    @property
    def value_size(self) -> int:
        """Elements of a head."""
        ...

    @property
    def columns(self) -> int:
        """Columns of a head that a block has."""
        ...

    @property
    def threads(self) -> int:
        """Threads of a block."""
        ...

    @property
    def stage_tokens(self) -> int:
        """Tokens that are copied together."""
        ...


def token_floats(key_size: int, columns: int) -> int:
    """Return what a token takes in a stage, in floats."""
    return 2 * key_size + columns + VECTOR


def make_start_copies(variant: Staged) -> DeviceFunction:
    """Return start_copies, for all threads of a block."""
    key_size, value_size, columns = variant.key_size, variant.value_size, variant.columns
    threads, stage_tokens = variant.threads, variant.stage_tokens
    floats = token_floats(key_size, columns)
    token_vectors, key_vectors = floats // VECTOR - 1, key_size // VECTOR
    copies = -(-stage_tokens * token_vectors // threads)  # of a thread

    @cuda.jit(device=True, inline="always")
    def start_copies(
        staged: Pointer,
        stage: Scalar,
        convolved: Pointer,
        step_sizes: Pointer,
        token: Scalar,
        left: Scalar,
        num_key_heads: Scalar,
        num_value_heads: Scalar,
        key_head: Scalar,
        head: Scalar,
        part: Scalar,
    ) -> None:
        """Start copying the next `left` tokens from `token` on, as far as a stage has room."""
        thread = anew(cuda.threadIdx.x)  # what is made of it would be kept through the loop
        channels = int32(2 * num_key_heads * key_size + num_value_heads * value_size)
        for i in range(copies):
            number = int32(i * threads + thread)
            which, vector = int32(number // token_vectors), int32(number % token_vectors)
            if which < stage_tokens and which < left:
                channel = int32(key_head * key_size + VECTOR * vector)
                if vector >= 2 * key_vectors:
                    first_value = int32(2 * num_key_heads * key_size + head * value_size)
                    channel = int32(
                        first_value + part * columns + VECTOR * (vector - 2 * key_vectors)
                    )
                elif vector >= key_vectors:
                    channel += int32(num_key_heads * key_size - key_size)
                element = int32(stage + which * floats + VECTOR * vector)
                source = multiply_add_wide(int32(token + which), channels, int64(channel))
                copy_async(staged, element, convolved, source, True)
        which, number = int32(thread >> 1), int32(thread & 1)
        if which < stage_tokens and which < left:
            element = int32(stage + which * floats + VECTOR * token_vectors + number)
            row = int32(2 * (token + which) + number)
            source = multiply_add_wide(row, num_value_heads, int64(head))
            copy_word_async(staged, element, step_sizes, source, True)
        commit_copies()

    return start_copies


def make_start_gate_copies(variant: DeltaRuleVariant) -> DeviceFunction:
    """Return start_gate_copies, for all threads of a block; `start_copies` closes the group."""
    threads, stage_tokens, value_size = variant.threads, variant.stage_tokens, variant.value_size
    length = VECTOR_LENGTHS[variant.dtype]
    token_vectors = value_size // length
    copies = -(-stage_tokens * token_vectors // threads)  # of a thread

    @cuda.jit(device=True, inline="always")
    def start_gate_copies(
        gates: Pointer,
        stage: Scalar,
        projections: Pointer,
        stride: Scalar,
        first: Scalar,
        token: Scalar,
        left: Scalar,
    ) -> None:
        """Start copying z of the next tokens; `first`: where it begins among a token's numbers."""
        thread = anew(cuda.threadIdx.x)
        for i in range(copies):
            number = int32(i * threads + thread)
            which, vector = int32(number // token_vectors), int32(number % token_vectors)
            if which < stage_tokens and which < left:
                element = int32(stage + which * value_size + length * vector)
                source = int64(token + which) * stride + int32(first + length * vector)
                copy_async(gates, element, projections, source, True)

    return start_gate_copies
