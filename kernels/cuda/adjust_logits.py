"""Logit bias and penalties: what is done to a sample's logits before a token is chosen.

The specification is `kernels.reference.logit_adjustments`, and this gives its very bits: every
operation is rounded by itself. One block of threads a sample, in three steps with a
barrier between, since a step's tokens are in no order:

    1. copy the row to the sample's own, and clear its counts
    2. add the biases, no token twice, and count the history: prompt tokens in the upper half of a
       count, output tokens in the lower
    3. change the logits of all tokens that were counted

Only samples that have a bias or a penalty are launched; the others' rows stay where they are. What
is not finite stays so, for the sampler to see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from numba import cuda, float32, int64

from kernels.cuda.block_reductions import LARGEST_FINITE
from kernels.cuda.instructions.atomics import add_int64
from kernels.cuda.instructions.exact_float32 import (
    add_float32,
    divide_float32,
    multiply_float32,
)
from kernels.cuda.long_rows import READS, read_ahead
from kernels.cuda.plain_variants import SampleVariant
from kernels.cuda.variant import Expectation, Pointer, Scalar

PROMPT_UNIT = int64(1 << 32)  # of a count; output tokens count 1
OUTPUT_MASK = int64((1 << 32) - 1)


@dataclass(frozen=True, slots=True)
class AdjustLogitsVariant(SampleVariant):
    """The compile-time parameter: threads of a block, whole warps."""

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        return f"adjust_logits_t{self.threads}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        return (
            "float32*", "int64*", "float32*", "int32*", "int32*", "int32*", "float32*", "float32*",
            "float32*", "float32*", "int64*", "int32*", "int32*", "int32*", "int64", "int32",
        )  # fmt: skip

    @property
    def expectation(self) -> Expectation:
        """Two blocks of threads to a multiprocessor."""
        return Expectation(64)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        return make_adjust_logits(self)


def variants(*, every: bool) -> list[AdjustLogitsVariant]:  # noqa: ARG001 - there are no more
    """Return the one that is used."""
    return [AdjustLogitsVariant()]


def make_adjust_logits(variant: AdjustLogitsVariant) -> Callable[..., None]:
    """Return the kernel with its compile-time parameters bound."""
    threads = variant.threads

    def adjust_logits(
        adjusted: Pointer,
        counts: Pointer,
        logits: Pointer,
        logits_rows: Pointer,
        bias_starts: Pointer,
        bias_tokens: Pointer,
        bias_values: Pointer,
        repetition_penalties: Pointer,
        presence_penalties: Pointer,
        frequency_penalties: Pointer,
        history_starts: Pointer,
        history_lengths: Pointer,
        num_prompts: Pointer,
        history: Pointer,
        logits_stride: Scalar,
        vocab: Scalar,
    ) -> None:
        """Write the adjusted logits of sample blockIdx.x.

        `adjusted`: [K, V]. `counts`: [K, V], scratch. `logits`: [R, V], rows `logits_stride`
        elements apart. `bias_starts`: [K + 1], where each sample's biases begin in `bias_tokens`
        and `bias_values`. Penalties: [K]. A sample's history is
        history[history_starts[k] … + history_lengths[k] - 1], `num_prompts[k]` of the prompt first;
        its length is 0 where no penalty is on.
        """
        sample = int64(cuda.blockIdx.x)
        thread = cuda.threadIdx.x
        row = int64(logits_rows[sample]) * logits_stride
        own = sample * vocab
        read_logits = cuda.local.array(READS, float32)
        read_counts = cuda.local.array(READS, int64)
        for begin in range(thread, vocab, READS * threads):
            read_ahead(read_logits, logits, row, begin, threads, vocab)
            for i in range(READS):
                v = begin + i * threads
                if v < vocab:
                    adjusted[own + v] = read_logits[i]
                    counts[own + v] = int64(0)
        cuda.syncthreads()

        for i in range(bias_starts[sample] + thread, bias_starts[sample + 1], threads):
            place = own + bias_tokens[i]
            logit = adjusted[place]
            if abs(logit) <= LARGEST_FINITE:
                logit = add_float32(logit, bias_values[i])
                adjusted[place] = max(-LARGEST_FINITE, min(logit, LARGEST_FINITE))

        first = history_starts[sample]
        num_prompt = num_prompts[sample]
        for i in range(thread, history_lengths[sample], threads):
            unit = PROMPT_UNIT if i < num_prompt else int64(1)
            add_int64(counts, own + history[first + i], unit)
        cuda.syncthreads()

        repetition = repetition_penalties[sample]
        presence, frequency = presence_penalties[sample], frequency_penalties[sample]
        for begin in range(thread, vocab, READS * threads):
            read_ahead(read_counts, counts, own, begin, threads, vocab)
            for i in range(READS):
                v = begin + i * threads
                count = read_counts[i] if v < vocab else int64(0)
                logit = float32(0)
                if count > 0:
                    logit = adjusted[own + v]
                if count > 0 and abs(logit) <= LARGEST_FINITE:
                    if logit < 0:
                        logit = multiply_float32(logit, repetition)
                    else:
                        logit = divide_float32(logit, repetition)
                    num_output = count & OUTPUT_MASK
                    if num_output > 0:
                        penalty = multiply_float32(frequency, float32(num_output))
                        logit = add_float32(add_float32(logit, -penalty), -presence)
                    adjusted[own + v] = max(-LARGEST_FINITE, min(logit, LARGEST_FINITE))

    return adjust_logits
