"""What the engine counts about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Counts since the start, and a few numbers of this moment.

    `total_requests`: those taken in, hence completed, failed, cancelled and still under way
    together; what was refused is in no count.
    `active_sequences`: those that hold blocks, one for each sample or beam; `waiting_requests`:
    requests of which one waits for that. `num_preemptions`: how often a sequence had to give way;
    `num_swaps` of these times its blocks were saved in the host pool. `prompt_tokens`: of all
    prompts; `cached_tokens` of them were found computed. `num_drafts`: tokens of answers that were
    guessed; `num_kept_drafts` of them were right, and are in `generated_tokens`. Of models with
    states: `num_kept_states` can be found again now, `num_state_hits` times one was.
    `memory_utilization`: used blocks over all blocks, 0 to 1.
    `average_latency_s`: from receipt to the end, mean over completed requests.
    `tokens_per_second`: generated tokens over the time in which the engine had work to do.
    `num_plane_losses`: sessions with the compute plane that were lost; what it held was computed
    anew. `num_stalls`: steps that took longer than their cost allows; `last_step_age_s`: since the
    compute plane last got on with the steps under way, 0 without any.
    Of the last 1024 steps, 0 before any: `plane_step_s`, mean time on the device;
    `plane_idle_share`, of the device's time, that in which it waited for a batch although there was
    work, 0 to 1; `plane_queue_s`, mean time that a batch waited at the plane, for the device or to
    be launched; `scheduling_delay_p99_s`, how long a result waited for the engine thread, 99th
    percentile.
    """

    total_requests: int = 0
    completed_requests: int = 0
    failed_requests: int = 0
    cancelled_requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    active_sequences: int = 0
    waiting_requests: int = 0
    num_preemptions: int = 0
    memory_utilization: float = 0.0
    average_latency_s: float = 0.0
    tokens_per_second: float = 0.0
    num_steps: int = 0
    num_swaps: int = 0
    cached_tokens: int = 0
    num_plane_losses: int = 0
    num_stalls: int = 0
    last_step_age_s: float = 0.0
    plane_step_s: float = 0.0
    plane_idle_share: float = 0.0
    scheduling_delay_p99_s: float = 0.0
    num_drafts: int = 0
    num_kept_drafts: int = 0
    plane_queue_s: float = 0.0
    num_kept_states: int = 0
    num_state_hits: int = 0


class Tally:
    """The running sums behind `EngineMetrics`; written by the engine thread only."""

    __slots__ = (
        "busy_s",
        "cached_tokens",
        "cancelled_requests",
        "completed_requests",
        "failed_requests",
        "generated_tokens",
        "latency_sum_s",
        "prompt_tokens",
        "total_requests",
    )

    def __init__(self) -> None:
        self.total_requests = 0
        self.completed_requests = 0
        self.failed_requests = 0
        self.cancelled_requests = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.latency_sum_s = 0.0
        self.busy_s = 0.0

    @property
    def average_latency_s(self) -> float:
        """Mean over completed requests, 0 before the first."""
        return self.latency_sum_s / self.completed_requests if self.completed_requests else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over busy time, 0 before any."""
        return self.generated_tokens / self.busy_s if self.busy_s > 0.0 else 0.0
