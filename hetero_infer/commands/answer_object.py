"""An answer as a JSON object, the same wherever the command line prints one."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetero_infer.client import Answer, AnswerParts, SampleAnswer


def answer_object(answer: Answer, **timings: float) -> dict[str, Any]:
    """Return the object. `timings`: what else is known of times, in seconds.

    `samples`, `logprobs`, `prompt_logprobs`, `matched_stop` and `message`, which the text comes
    apart into and which may be handed back, are there if there are any.
    """
    finished = answer.finished
    found: dict[str, Any] = _sample(answer.samples[0])
    if len(answer.samples) > 1:
        found["samples"] = [_sample(sample) for sample in answer.samples]
    if answer.prompt_logprobs is not None:
        found["prompt_logprobs"] = [dataclasses.asdict(entry) for entry in answer.prompt_logprobs]
    found["usage"] = {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": finished.completion_tokens,
        "total_tokens": finished.prompt_tokens + finished.completion_tokens,
        "cached_tokens": finished.cached_tokens,
    }
    if answer.samples[0].parts is not None:
        found["usage"]["reasoning_tokens"] = finished.reasoning_tokens
    found["timings"] = {
        **timings,
        "queue_s": finished.queue_s,
        "time_to_first_token_s": finished.time_to_first_token_s,
        "total_s": finished.total_s,
        "tokens_per_second": answer.tokens_per_second,
    }
    found["model"] = answer.started.model
    found["seed"] = answer.started.params.seed
    return found


def _sample(sample: SampleAnswer) -> dict[str, Any]:
    found: dict[str, Any] = {
        "text": sample.text,
        "token_ids": list(sample.token_ids),
        "finish_reason": sample.finish_reason,
    }
    if sample.parts is not None:
        found["message"] = _message(sample.parts)
    if sample.matched_stop is not None:
        found["matched_stop"] = sample.matched_stop
    if sample.logprobs:
        found["logprobs"] = [dataclasses.asdict(entry) for entry in sample.logprobs]
    return found


def _message(parts: AnswerParts) -> dict[str, Any]:
    """Return an answer as a message of OpenAI's, which conversations take."""
    content = parts.content or None if parts.tool_calls else parts.content
    found: dict[str, Any] = {"role": "assistant", "content": content}
    if parts.reasoning_content:
        found["reasoning_content"] = parts.reasoning_content
    if parts.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in parts.tool_calls
        ]
    return found
