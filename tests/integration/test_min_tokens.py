"""An answer does not end before it has `min_tokens`, however much the model would end it."""

from __future__ import annotations

import httpx
import pytest

from control_plane.core.generation_params import GenerationParams
from control_plane.core.structured_outputs import StructuredOutputs
from hetero_infer import InferenceEngine
from hetero_infer.client import Client
from protos.hetero.inference.v1 import inference_pb2 as pb
from tests.integration.asking import PATIENCE_S, Server

pytestmark = pytest.mark.model

MODEL = "SmolLM2-135M-Instruct"
EOS = 2
ENDS_AT_ONCE = {EOS: 100.0}
PROMPT = "The sea at night is"


def params(**given: object) -> GenerationParams:
    known = {"max_tokens": 12, "temperature": 0.0, "seed": 4, "logit_bias": ENDS_AT_ONCE}
    return GenerationParams(**{**known, **given})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def client(deployment):
    with Client(str(deployment.control)) as connected:
        yield connected


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_model_that_wants_to_end_ends_behind_them(client, temperature):
    drawn = {"temperature": temperature}
    free = client.generate(PROMPT, params(logit_bias={EOS: -100.0}, **drawn)).token_ids
    assert client.generate(PROMPT, params(**drawn)).token_ids == ()
    for count in (1, 7, 12):
        answer = client.generate(PROMPT, params(min_tokens=count, **drawn))
        assert answer.token_ids == free[:count]
        assert answer.finish_reason == ("length" if count == 12 else "stop")
        assert answer.started.params.min_tokens == count


def test_every_sample_keeps_to_it_and_so_do_stop_tokens(client):
    free = client.generate(PROMPT, params(n=3, temperature=0.9, logit_bias={EOS: -100.0}))
    held = client.generate(PROMPT, params(n=3, temperature=0.9, min_tokens=5))
    for one, other in zip(held.samples, free.samples, strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids[:5], "stop")
    (stop,) = client.generate(PROMPT, params(min_tokens=1)).token_ids
    answer = client.generate(PROMPT, params(logit_bias={stop: 100.0}, stop_token_ids=(stop,)))
    assert (answer.token_ids, answer.samples[0].matched_stop) == ((), stop)
    answer = client.generate(
        PROMPT, params(logit_bias={stop: 100.0}, stop_token_ids=(stop,), min_tokens=4)
    )
    assert (len(answer.token_ids), answer.samples[0].matched_stop) == (4, stop)
    assert stop not in answer.token_ids


def test_a_stop_string_that_is_complete_before_ends_nothing(client):
    whole = client.generate(PROMPT, params(logit_bias={}, ignore_eos=True))
    text, stop = whole.text, whole.text.split()[0]
    before = client.generate(PROMPT, params(logit_bias={}, ignore_eos=True, stop=(stop,)))
    assert (before.samples[0].matched_stop, before.text) == (stop, text[: text.index(stop)])
    held = client.generate(
        PROMPT, params(logit_bias={}, ignore_eos=True, stop=(stop,), min_tokens=12)
    )
    assert (held.samples[0].matched_stop, held.text) == (None, text)


def test_a_form_behind_which_nothing_may_follow_ends_before_and_another_does_not(client):
    def ask(form: StructuredOutputs, **more: object):
        return client.generate(
            PROMPT, params(structured_outputs=form, min_tokens=9, temperature=0.7, **more)
        )

    for drawn in (ENDS_AT_ONCE, {}):
        closed = ask(StructuredOutputs(choice=("red", "green")), logit_bias=drawn)
        assert closed.text in ("red", "green")
        assert len(closed.token_ids) < 9
    opened = ask(StructuredOutputs(regex="[a-z ]*"))
    assert (len(opened.token_ids), opened.finish_reason) == (9, "stop")


def test_an_answer_that_is_continued_is_held_as_long(deployment, client):
    whole = client.generate(PROMPT, params(min_tokens=7)).token_ids
    sampling = pb.SamplingParams(
        max_tokens=12, temperature=0, seed=4, logit_bias=ENDS_AT_ONCE, min_tokens=7
    )
    with Server(deployment.control) as server:
        for num_tokens in (1, 6, 7):
            tokens = list(whole[:num_tokens])
            request = pb.ResumeRequest(
                generate=pb.GenerateRequest(text=PROMPT, sampling=sampling),
                received_token_ids=tokens,
            )
            for event in server.stub.Resume(request, timeout=PATIENCE_S):
                tokens += event.delta.token_ids
            assert tuple(tokens) == whole


def test_over_http_it_is_named_as_vllm_does(deployment):
    asked = {
        "model": MODEL, "prompt": PROMPT, "temperature": 0, "logit_bias": {str(EOS): 100},
    }  # fmt: skip
    url = f"http://{deployment.http}/v1/completions"

    def ask(**more: object) -> dict:
        return httpx.post(url, json={**asked, **more}, timeout=PATIENCE_S).json()

    assert ask()["usage"]["completion_tokens"] == 0
    assert ask(min_tokens=5)["usage"]["completion_tokens"] == 5
    beyond = ask(min_tokens=5, max_tokens=4)["error"]
    assert beyond["param"] == "min_tokens"
    assert beyond["message"] == "min_tokens must be at most max_tokens (4), got 5"


@pytest.mark.wide
def test_drafts_change_no_token_of_it(target):
    song = "la " * 40
    says_one_word = {28: 50}  # whatever an executor's numerics make of the others
    asked = [
        params(max_tokens=40, min_tokens=17, logit_bias=bias)
        for bias in (ENDS_AT_ONCE, {}, {2: 9}, says_one_word)
    ]
    found = []
    for tokens in (0, 7):
        with InferenceEngine(target.config(speculative_tokens=tokens)) as engine:
            answers = []
            for one in asked:
                engine.submit_request(song, one)
                answers += [result.output_tokens for result in engine.run()]
            found.append(answers)
            assert (engine.get_metrics().num_drafts > 0) == (tokens > 0)
    assert found[1] == found[0]
    assert [len(tokens) for tokens in found[0][:2]] == [17, 40]
