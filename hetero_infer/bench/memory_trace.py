"""A trace of requests, and what a way of giving them memory made of it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hetero_infer.bench.figures import ratio

SPREAD = 0.8
"""Sigma of the lengths' logarithms: one in six is more than 2.2 times the median."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """Lengths of one request, in tokens; all requests of a trace wait from the start.

    `num_samples`: outputs of that length to the same prompt.
    """

    prompt_tokens: int
    output_tokens: int
    num_samples: int = 1

    @property
    def max_held_tokens(self) -> int:
        """Tokens whose keys and values it holds at its end: the last one is never computed."""
        return self.prompt_tokens + self.output_tokens - 1


def draw_uniform(
    num_requests: int, shortest: int, longest: int, pair_share: float, seed: int
) -> list[TraceRequest]:
    """Draw requests whose lengths, prompt and output together, are uniform between these.

    The prompt's part of a length is uniform too. `pair_share` of them, 0 to 1, have two samples.
    """
    drawn = random.Random(seed)
    trace = []
    for _ in range(num_requests):
        length = drawn.randint(shortest, longest)
        prompt = drawn.randint(1, length - 1)
        trace.append(TraceRequest(prompt, length - prompt, 1 + (drawn.random() < pair_share)))
    return trace


def draw_trace(
    num_requests: int, prompt_tokens: int, output_tokens: int, max_model_len: int, seed: int
) -> list[TraceRequest]:
    """Draw requests whose lengths are log-normal around these medians, within the model's."""
    drawn = random.Random(seed)
    trace = []
    for _ in range(num_requests):
        prompt, output = (
            max(1, round(drawn.lognormvariate(math.log(median), SPREAD)))
            for median in (prompt_tokens, output_tokens)
        )
        prompt = min(prompt, max_model_len - 1)
        trace.append(TraceRequest(prompt, min(output, max_model_len - prompt)))
    return trace


@dataclass(frozen=True, slots=True)
class StepUse:
    """Memory while one step runs, in tokens.

    `reserved`: given to running requests. `used`: of that, written by this step or before.
    `stranded`: free, but not in the largest free run, so that nothing of that run's length or more
    can have it.
    """

    num_running: int
    num_waiting: int
    reserved: int
    used: int
    stranded: int = 0


@dataclass(frozen=True, slots=True)
class MemoryRun:
    """A whole trace under one way of giving out memory.

    `moved_tokens`: copied to grow, or because two samples shared them and one went on to write.
    """

    method: str
    pool_tokens: int
    steps: Sequence[StepUse]
    num_preemptions: int = 0
    moved_tokens: int = 0

    @property
    def _busy(self) -> Sequence[StepUse]:
        """The steps in which somebody still waits; all of them if nobody ever did."""
        return [step for step in self.steps if step.num_waiting] or self.steps

    @property
    def waste(self) -> float:
        """Share of the reserved memory that is not used, over all steps with requests waiting."""
        reserved = sum(step.reserved for step in self._busy)
        return 1.0 - ratio(sum(step.used for step in self._busy), reserved)

    @property
    def stranded(self) -> float:
        """Share of the pool that is free and stranded, on average."""
        busy = self._busy
        return ratio(sum(step.stranded for step in busy), len(busy) * self.pool_tokens)

    @property
    def sustained_concurrency(self) -> float:
        """Requests that run at once, on average, while others wait."""
        busy = self._busy
        return ratio(sum(step.num_running for step in busy), len(busy))

    def to_object(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "method": self.method,
            "waste": self.waste,
            "stranded": self.stranded,
            "sustained_concurrency": self.sustained_concurrency,
            "num_steps": len(self.steps),
            "num_preemptions": self.num_preemptions,
            "moved_tokens": self.moved_tokens,
            "running": [step.num_running for step in self.steps],
            "reserved": [step.reserved for step in self.steps],
            "used": [step.used for step in self.steps],
        }
