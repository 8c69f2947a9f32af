"""What one engine thread measures about its compute plane and itself."""

from __future__ import annotations

from control_plane.metrics import buckets
from control_plane.metrics.histogram import Histogram


class PlaneMeter:
    """Written by one engine thread, a few numbers a step; read by any.

    `rtt`: from sending a batch to the arrival of its result, what it waits behind the one before it
    included. `step`: that the device computed. `turn`: that the engine thread needed from a result
    to the next batch on its way. `iteration_tokens`: tokens a step computed. `num_prefix_queries`:
    tokens of prompts that were looked up in the prefix cache, `num_prefix_hits` of them found.
    `num_losses`: how often the plane was lost.
    """

    __slots__ = (
        "iteration_tokens",
        "num_losses",
        "num_prefix_hits",
        "num_prefix_queries",
        "rtt",
        "step",
        "turn",
    )

    def __init__(self) -> None:
        self.rtt = Histogram(buckets.STEP_S)
        self.step = Histogram(buckets.STEP_S)
        self.turn = Histogram(buckets.STEP_S)
        self.iteration_tokens = Histogram(buckets.ITERATION_TOKENS)
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self.num_losses = 0

    def note_step(self, *, rtt_s: float, execute_s: float, num_tokens: int) -> None:
        """Take in a step that came back."""
        self.rtt.observe(rtt_s)
        self.step.observe(execute_s)
        self.iteration_tokens.observe(num_tokens)

    def note_prefix(self, num_tokens: int, num_cached: int) -> None:
        """Take in a prompt that was looked up in the prefix cache."""
        self.num_prefix_queries += num_tokens
        self.num_prefix_hits += num_cached
