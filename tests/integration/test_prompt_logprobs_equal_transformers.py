"""Log-probabilities of a long prompt through both planes, in chunks, against transformers'."""

from __future__ import annotations

import json

import numpy as np
import pytest

from protos.hetero.inference.v1 import inference_pb2 as pb
from tests.golden.prompts import DATA
from tests.integration.asking import Server

pytestmark = pytest.mark.model

PERPLEXITY = json.loads((DATA / "perplexity.json").read_text(encoding="utf-8"))
SEVERAL_CHUNKS = 600
"""Tokens of the text, of all that there are."""


def ask(server, token_ids, num_likeliest, max_tokens=1, **sampling):
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=token_ids),
        sampling=pb.SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            num_prompt_logprobs=num_likeliest,
            **sampling,
        ),
    )
    return server.stub.Generate(request, timeout=120)


@pytest.mark.parametrize("length", [SEVERAL_CHUNKS, pytest.param(2017, marks=pytest.mark.slow)])
def test_a_long_prompt_has_the_recorded_log_probabilities(exact_deployment, length):
    token_ids = PERPLEXITY["token_ids"][:length]
    with Server(exact_deployment.control) as server:
        steps_before = server.metrics.num_steps
        answer = ask(server, token_ids, 0)
        assert server.metrics.num_steps - steps_before >= 2
    logprobs = [entry.logprob for entry in answer.prompt_logprobs.logprobs]
    assert len(logprobs) == len(token_ids) - 1 == length - 1
    np.testing.assert_allclose(logprobs, PERPLEXITY["logprobs"][: length - 1], atol=1e-3)


def test_the_likeliest_tokens_are_those_that_would_be_generated(exact_deployment):
    with Server(exact_deployment.control) as server:
        token_ids = PERPLEXITY["token_ids"][:40]
        answer = ask(server, token_ids, 0, 8, num_logprobs=3)
        again = ask(server, [*token_ids, *answer.token_ids], 3)
    known = answer.logprobs
    echoed = again.prompt_logprobs.logprobs[len(token_ids) - 1 :]
    for ours, theirs, token_id in zip(known, echoed, answer.token_ids, strict=True):
        assert ours.top_token_ids[0] == theirs.top_token_ids[0] == token_id
        assert list(ours.top_token_ids) == list(theirs.top_token_ids)
        np.testing.assert_allclose(ours.top_logprobs, theirs.top_logprobs, atol=1e-3)
        assert theirs.logprob == theirs.top_logprobs[0]
    assert answer.usage.cached_tokens == again.usage.cached_tokens == 0


def test_a_chat_is_answered(exact_deployment):
    request = pb.ChatRequest(
        messages=[pb.ChatMessage(role="user", content="What is the capital of France?")],
        sampling=pb.SamplingParams(max_tokens=24, temperature=0.0),
    )
    with Server(exact_deployment.control) as server:
        answer = server.stub.Chat(request, timeout=120)
        stream = list(server.stub.ChatStream(request, timeout=120))
    assert "Paris" in answer.text
    assert "".join(event.delta.text for event in stream if event.HasField("delta")) == answer.text
