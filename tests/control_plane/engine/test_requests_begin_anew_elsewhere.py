"""Requests that nobody has seen, on a plane whose numbers are other ones."""

from __future__ import annotations

from control_plane.core.batch import PromptLogprobs, StepResult, TokenLogprobs
from control_plane.core.generation_params import GenerationParams
from control_plane.core.kv_cache import KVCacheManager
from control_plane.core.request import Request
from control_plane.core.scheduler import Scheduler, SchedulerConfig
from control_plane.engine.moving import begin_anew, is_started

PROMPT = list(range(1, 13))


def scheduler() -> Scheduler:
    return Scheduler(SchedulerConfig(max_total_tokens=4), KVCacheManager(64, 4))


def step(scheduler: Scheduler, logprob: float) -> None:
    """Compute a step on a plane that says `logprob` of every token."""
    output = scheduler.schedule()
    assert output is not None
    batch, found = output.batch, []
    for row, _ in batch.prompt_logprobs:
        first = batch.positions[row] + 1
        end = min(first + batch.query_lens[row], len(PROMPT))
        found.append(PromptLogprobs(row, first, (TokenLogprobs(logprob),) * (end - first)))
    scheduler.commit(
        StepResult(batch.step_id, [7] * len(batch.sampled_rows), prompt_logprobs=tuple(found))
    )


def test_log_probabilities_of_a_prompt_are_of_one_plane() -> None:
    lost, other = scheduler(), scheduler()
    params = GenerationParams(max_tokens=2, seed=1, num_prompt_logprobs=0)
    lost.add_request(Request(1, PROMPT, params, uses_cache=False))
    step(lost, -1.0)  # of the first tokens
    lost.lose_epoch()
    [request] = lost.withdraw()
    assert request.prompt_logprobs
    assert not is_started(request)
    begin_anew(request)
    other.adopt(request)
    while not request.state.is_final:
        step(other, -2.0)
    assert [entry.logprob for entry in request.prompt_logprobs] == [-2.0] * (len(PROMPT) - 1)
