"""With drafts and without: every token, text, log-probability, end and count is the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from control_plane.core.tool_calls import CallableTool, ToolCalls
from hetero_infer import EngineConfig, GenerationParams, InferenceEngine, StructuredOutputs

pytestmark = pytest.mark.wide

CODE = """def load(path):
    users = []
    with open(path) as file:
        for line in file:
            name, age = line.split(",")
            users.append({"name": name, "age": int(age)})
    return users
"""
ASKED = f"Here is a file:\n{CODE}\nHere is the same file once more:\ndef load(path):\n    users ="
SONG = "Row, row, row your boat gently down the stream. " * 4

GREEDY = GenerationParams(max_tokens=60, temperature=0.0)
DRAWN = GenerationParams(max_tokens=40, temperature=0.7, top_p=0.9, seed=5)
REQUESTS = [
    (ASKED, GREEDY),
    (SONG, GREEDY),
    ("The capital of France is", GREEDY),
    (ASKED, DRAWN),
    (SONG, replace(DRAWN, seed=7, top_k=20, min_p=0.05, n=2)),
    (ASKED, replace(GREEDY, num_logprobs=2)),
    (ASKED, replace(DRAWN, seed=8, num_logprobs=0)),
    (ASKED, replace(GREEDY, repetition_penalty=1.1, frequency_penalty=0.2, num_logprobs=1)),
    (SONG, replace(GREEDY, logit_bias={30: -5.0, 28: 2.0})),
    (SONG, replace(GREEDY, stop=("stream", "nothing"), include_stop=True)),
    (SONG, replace(GREEDY, stop_token_ids=(30,))),
    (SONG, replace(GREEDY, max_tokens=5, ignore_eos=True)),
    (ASKED, replace(GREEDY, max_tokens=12, temperature=1.0, seed=1, beam_width=2)),
    (ASKED, replace(GREEDY, num_prompt_logprobs=0, max_tokens=20)),
    (ASKED, replace(DRAWN, n=2, structured_outputs=StructuredOutputs(json_object=True))),
]

USER = StructuredOutputs(
    json={
        "type": "object",
        "properties": {
            "user_name": {"type": "string", "maxLength": 9},
            "years_of_age": {"type": "integer", "minimum": 0, "maximum": 150},
            "kind_of_user": {"enum": ["administrator", "advisor", "guest"]},
            "more_users": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
        },
        "required": ["user_name", "years_of_age", "kind_of_user", "more_users"],
        "additionalProperties": False,
    }
)
CALL = ToolCalls("hermes", (CallableTool("add_new_user", str(USER.json), "tools[0]"),))
IN_FORM = [
    (ASKED, replace(GREEDY, structured_outputs=USER, num_logprobs=2)),
    (SONG, replace(DRAWN, n=2, structured_outputs=USER, max_tokens=70)),
    (ASKED, replace(DRAWN, structured_outputs=CALL, repetition_penalty=1.2, max_tokens=70)),
    (SONG, replace(GREEDY, structured_outputs=CALL, stop=("years",), include_stop=True)),
    (SONG, replace(GREEDY, structured_outputs=CALL, stop_token_ids=(1133, 284), num_logprobs=0)),
    (ASKED, replace(DRAWN, structured_outputs=StructuredOutputs(regex=r"(never mind, ){1,9}"))),
    (ASKED, replace(GREEDY, max_tokens=20)),
]

EMBEDDED = EngineConfig(max_batch_size=4, max_num_blocks=200, grammar_drafts=False)


def answers(
    config: EngineConfig, requests: Sequence[tuple[str, GenerationParams]], *, together: bool
) -> tuple[list[Any], int]:
    """What clients see of each request, and how many drafts were kept."""
    with InferenceEngine(config) as engine:
        results: dict[int, Any] = {}
        ids = []
        for prompt, params in requests:
            ids.append(engine.submit_request(prompt, params))
            if not together:
                results |= {result.request_id: result for result in engine.run()}
        results |= {result.request_id: result for result in engine.run()}
        seen = [
            (
                results[request_id].samples,
                results[request_id].finish_reason,
                results[request_id].generated_tokens,
                results[request_id].prompt_logprobs,
                results[request_id].error,
            )
            for request_id in ids
        ]
        metrics = engine.get_metrics()
        assert engine.get_memory_stats().used_blocks == 0
        assert metrics.num_kept_drafts <= metrics.num_drafts
        return seen, metrics.num_kept_drafts


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    """The answers without drafts. No row's bits depend on the others of its batch."""
    seen, none_kept = answers(EMBEDDED, REQUESTS, together=True)
    assert none_kept == 0
    return seen


@pytest.mark.model
@pytest.mark.parametrize(
    ("num_tokens", "least", "together"),
    [
        (7, 2, True),
        pytest.param(2, 1, True, marks=pytest.mark.slow),
        pytest.param(2, 1, False, marks=pytest.mark.slow),
        pytest.param(7, 3, False, marks=pytest.mark.slow),
    ],
)
def test_the_embedded_model_answers_the_same_bits_with_drafts(
    plain: list[Any], num_tokens: int, least: int, together: bool
) -> None:
    drafting = replace(EMBEDDED, speculative_tokens=num_tokens, prompt_lookup_min=least)
    drafted, num_kept = answers(drafting, REQUESTS, together=together)
    assert drafted == plain
    assert num_kept > (5 if together else 50)


@pytest.mark.model
@pytest.mark.parametrize(
    ("num_tokens", "together"),
    [
        (7, True),
        pytest.param(7, False, marks=pytest.mark.slow),
        pytest.param(0, False, marks=pytest.mark.slow),
    ],
)
def test_answers_in_a_form_are_the_same_bits_with_the_drafts_of_the_form(
    num_tokens: int, together: bool
) -> None:
    plain, none_kept = answers(EMBEDDED, IN_FORM, together=True)
    assert none_kept == 0
    drafting = replace(EMBEDDED, grammar_drafts=True, speculative_tokens=num_tokens)
    drafted, num_kept = answers(drafting, IN_FORM, together=together)
    assert drafted == plain
    assert num_kept > (10 if together else 100)


def test_wrong_drafts_leave_nothing_behind_under_memory_pressure() -> None:
    config = EngineConfig(
        executor="simulated", block_size=4, max_num_blocks=24, max_batch_size=6, max_model_len=80
    )
    requests = [
        (f"{i} " + "abcab" * (i % 4), GenerationParams(20, i % 3 * 0.8, 0.9, seed=i, n=1 + i % 2))
        for i in range(12)
    ]
    plain, _ = answers(config, requests, together=True)
    drafting = replace(config, speculative_tokens=3, prompt_lookup_min=1)
    assert answers(drafting, requests, together=True)[0] == plain


@pytest.mark.slow
@pytest.mark.model
def test_a_plane_that_launches_steps_ahead_takes_drafts_too() -> None:
    """The CUDA executor on torch's CPU device: of greedy answers the tokens are the same."""
    stand_in = replace(EMBEDDED, executor="cuda", device="cpu")
    requests = [
        ("a rose is a rose is a rose is", replace(GREEDY, max_tokens=10)),
        ("Who?", replace(GREEDY, max_tokens=20, structured_outputs=CALL)),
    ]
    plain, none_kept = answers(stand_in, requests, together=True)
    assert none_kept == 0
    drafting = replace(stand_in, speculative_tokens=7, grammar_drafts=True)
    drafted, num_kept = answers(drafting, requests, together=True)
    texts = [[sample.output_tokens for sample in samples] for samples, *_ in drafted]
    assert texts == [[sample.output_tokens for sample in samples] for samples, *_ in plain]
    assert num_kept > 8
