"""Every metric by name: its kind, what it means, and whether vLLM has one of that name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

PREFIX = "hetero_"
VLLM_PREFIX = "vllm:"

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Family:
    """A metric; `name` without its prefix, and as samples have it (a counter's ends in `_total`).

    `labels`: besides those that say which model or plane it is about. `is_vllms`: vLLM has it, with
    the same meaning, as `vllm:NAME`.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    is_vllms: bool = False


def _by_name(*families: Family) -> dict[str, Family]:
    return {family.name: family for family in families}


SERVICE = _by_name(
    Family(
        "requests_total",
        "counter",
        "Requests to the public API, by protocol and method; not health checks or this page.",
        ("protocol", "method"),
    ),
    Family(
        "errors_total",
        "counter",
        "Requests to the public API that failed, by the reason the client was told.",
        ("protocol", "reason"),
    ),
    Family("inflight_requests", "gauge", "Requests to the public API under way.", ("protocol",)),
    Family(
        "streaming_requests_total",
        "counter",
        "Answers of the public API that ended after they had begun as a stream.",
        ("protocol",),
    ),
)
"""About the process, whatever is behind it."""

MODEL = _by_name(
    Family("prompt_tokens_total", "counter", "Tokens of admitted prompts.", is_vllms=True),
    Family(
        "generation_tokens_total",
        "counter",
        "Generated tokens that were given to their requests.",
        is_vllms=True,
    ),
    Family(
        "request_success_total",
        "counter",
        "Completed requests, by the finish reason of their first sample.",
        ("finished_reason",),
        is_vllms=True,
    ),
    Family(
        "requests_cancelled_total",
        "counter",
        "Requests that their clients left before the end, or that the server cancelled.",
    ),
    Family(
        "time_to_first_token_seconds",
        "histogram",
        "From receipt of a request to its first token.",
        is_vllms=True,
    ),
    Family(
        "inter_token_latency_seconds",
        "histogram",
        "Between two arrivals of tokens of one sample, as the engine sees them.",
        is_vllms=True,
    ),
    Family(
        "e2e_request_latency_seconds",
        "histogram",
        "From receipt of a completed request to its end.",
        is_vllms=True,
    ),
    Family(
        "request_queue_time_seconds",
        "histogram",
        "From receipt of a completed request to the first step with a row of it.",
        is_vllms=True,
    ),
    Family(
        "request_prefill_time_seconds",
        "histogram",
        "From the first step with a row of a completed request to its first token.",
        is_vllms=True,
    ),
    Family(
        "request_decode_time_seconds",
        "histogram",
        "From the first token of a completed request to its end.",
        is_vllms=True,
    ),
)
"""About the requests for the model, whichever planes compute them."""

PLANE = _by_name(
    Family(
        "num_requests_running",
        "gauge",
        "Requests that are computed: under way, and none of their samples waits.",
        is_vllms=True,
    ),
    Family(
        "num_requests_waiting",
        "gauge",
        "Requests of which a sample waits for a slot or blocks.",
        is_vllms=True,
    ),
    Family("kv_cache_usage_perc", "gauge", "Used blocks over all blocks, 0 to 1.", is_vllms=True),
    Family(
        "prefix_cache_queries_total",
        "counter",
        "Tokens of prompts that were looked up in the prefix cache.",
        is_vllms=True,
    ),
    Family(
        "prefix_cache_hits_total",
        "counter",
        "Tokens of prompts that were found in the prefix cache.",
        is_vllms=True,
    ),
    Family(
        "num_preemptions_total",
        "counter",
        "How often a sequence had to give its blocks to another.",
        is_vllms=True,
    ),
    Family(
        "num_swaps_total",
        "counter",
        "How many of these times its blocks were saved in the host pool.",
    ),
    Family(
        "states_kept",
        "gauge",
        "States of sequences that can be found again (models with states).",
    ),
    Family("state_hits_total", "counter", "How often one was found."),
    Family(
        "spec_decode_num_draft_tokens_total",
        "counter",
        "Tokens of answers that were guessed (speculative_tokens, grammar_drafts).",
        is_vllms=True,
    ),
    Family(
        "spec_decode_num_accepted_tokens_total",
        "counter",
        "How many of these were right.",
        is_vllms=True,
    ),
    Family("iteration_tokens_total", "histogram", "Tokens that one step computed.", is_vllms=True),
    Family(
        "plane_step_seconds", "histogram", "Time that one step took on the compute plane's device."
    ),
    Family(
        "plane_rtt_seconds",
        "histogram",
        "From sending a batch to its result, the wait behind the batch before it included.",
    ),
    Family(
        "scheduler_step_seconds",
        "histogram",
        "Time the engine thread needs from a result to the next batch on its way.",
    ),
    Family("plane_up", "gauge", "1 while the compute plane is linked."),
    Family(
        "plane_epoch",
        "gauge",
        "Random number of the compute plane's process: a change is a restart.",
    ),
    Family("plane_losses_total", "counter", "How often the link to the compute plane was lost."),
    Family("plane_stalls_total", "counter", "Steps that took longer than their cost allows."),
    Family(
        "plane_last_step_age_seconds",
        "gauge",
        "Since the compute plane last got on with its steps under way; 0 without any.",
    ),
)
"""About one compute plane and the engine thread that drives it."""


def sample_names(families: Iterable[Family], prefix: str = PREFIX) -> set[str]:
    """Return the names that their samples have on the page."""
    names: set[str] = set()
    for family in families:
        name = prefix + family.name
        if family.kind == "histogram":
            names.update(f"{name}_{part}" for part in ("bucket", "sum", "count"))
        else:
            names.add(name)
    return names
