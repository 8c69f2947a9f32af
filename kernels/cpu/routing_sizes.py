"""Memory that the operations of mixtures of experts need; without the compiler."""

from __future__ import annotations

from typing import Final

from kernels.cpu.operation import HEADER_WORDS, RECORD_WORDS

EXPERT_CALL_BYTES: Final = 8 * (RECORD_WORDS + HEADER_WORDS)
"""At the end of a worker's scratch memory: what an expert's product is called with, behind
whatever that product needs."""


def routing_scratch_bytes(num_experts: int, hidden_size: int) -> int:
    """Return the scratch memory a worker needs to route tokens and to add what experts give.

    Three numbers for each expert: its score, the same corrected, and what a group counts, of which
    there may be as many.
    """
    return 4 * max(3 * (num_experts + 15), hidden_size)


def run_words(num_experts: int) -> int:
    """Return the int32 words of `Routing.RUNS`."""
    return 1 + 3 * num_experts
