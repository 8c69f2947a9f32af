"""Logit bias and penalties: what is done to a sample's logits before a token is chosen.

The specification is `kernels.reference.logit_adjustments`, and this gives its very bits: every
operation is rounded by itself. The samples' rows have been copied, and as many counts cleared, by
all multiprocessors together; here one block of threads a sample touches only the tokens that have a
bias or occurred, with a barrier between, since they are in no order:

    1. add the biases, no token twice, and count the history: prompt tokens in the upper half of a
       count, output tokens in the lower
    2. go through the history again and take each token's count away: the thread that finds it there
       changes the logit

Only samples that have a bias or a penalty are launched; the others' rows stay where they are, and
without any there is no launch at all. What is not finite stays so, for the sampler to see.

What limits it (an argument; `make gpu` measures): waiting for memory. A history of 8 K tokens is
four rounds of reads for 512 threads, each some 600 cycles to the second cache and back, and again
with a count and a logit behind. The copy and the counts are 2 MB of writes and reads for a row of
128 K logits, of which one multiprocessor alone would take 30 K cycles.

The ladder:
  v1  copied, cleared and looked through by one block of threads, four reads of a thread under way.
  v2  this: copied and cleared by torch, and no pass over what has not occurred.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from numba import cuda, float32, int32, int64

from kernels.cuda.block_reductions import LARGEST_FINITE
from kernels.cuda.instructions.atomics import add_int64, exchange_int64
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
            "float32*", "int64*", "int32*", "int32*", "float32*", "float32*", "float32*",
            "float32*", "int64*", "int32*", "int32*", "int32*", "int32",
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
        vocab: Scalar,
    ) -> None:
        """Adjust the logits of sample blockIdx.x.

        `adjusted`: [K, V], the samples' logits. `counts`: [K, V], zero before. `bias_starts`:
        [K + 1], where each sample's biases begin in `bias_tokens` and `bias_values`. Penalties:
        [K]. A sample's history is history[history_starts[k] … + history_lengths[k] - 1],
        `num_prompts[k]` of the prompt first; its length is 0 where no penalty is on.
        """
        sample = int64(cuda.blockIdx.x)
        thread = cuda.threadIdx.x
        own = sample * vocab
        for i in range(bias_starts[sample] + thread, bias_starts[sample + 1], threads):
            place = own + bias_tokens[i]
            logit = adjusted[place]
            if abs(logit) <= LARGEST_FINITE:
                logit = add_float32(logit, bias_values[i])
                adjusted[place] = max(-LARGEST_FINITE, min(logit, LARGEST_FINITE))

        first, length = history_starts[sample], history_lengths[sample]
        num_prompt = num_prompts[sample]
        tokens = cuda.local.array(READS, int32)
        taken = cuda.local.array(READS, int64)
        for begin in range(thread, length, READS * threads):
            read_ahead(tokens, history, first, begin, threads, length)
            for i in range(READS):
                if begin + i * threads < length:
                    unit = PROMPT_UNIT if begin + i * threads < num_prompt else int64(1)
                    add_int64(counts, own + tokens[i], unit)
        cuda.syncthreads()

        repetition = repetition_penalties[sample]
        presence, frequency = presence_penalties[sample], frequency_penalties[sample]
        for begin in range(thread, length, READS * threads):
            read_ahead(tokens, history, first, begin, threads, length)
            for i in range(READS):
                taken[i] = int64(0)
                if begin + i * threads < length:
                    taken[i] = exchange_int64(counts, own + tokens[i], 0)
            for i in range(READS):
                logit = float32(math.inf)
                if taken[i] > 0:
                    logit = adjusted[own + tokens[i]]
                if abs(logit) <= LARGEST_FINITE:
                    if logit < 0:
                        logit = multiply_float32(logit, repetition)
                    else:
                        logit = divide_float32(logit, repetition)
                    num_output = taken[i] & OUTPUT_MASK
                    if num_output > 0:
                        penalty = multiply_float32(frequency, float32(num_output))
                        logit = add_float32(add_float32(logit, -penalty), -presence)
                    logit = max(-LARGEST_FINITE, min(logit, LARGEST_FINITE))
                    adjusted[own + tokens[i]] = logit

    return adjust_logits
