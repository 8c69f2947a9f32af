"""The embedded model answers in the form that is asked for, on every surface."""

from __future__ import annotations

import json
import re

import grpc
import httpx
import pytest
from pydantic import BaseModel, Field

from control_plane.core.generation_params import GenerationParams
from control_plane.core.structured_outputs import StructuredOutputs
from hetero_infer import InferenceEngine
from hetero_infer.client import Client
from planes.errors import ValidationError
from protos.hetero.inference.v1 import inference_pb2 as pb
from tests.integration.asking import PATIENCE_S, Server

pytestmark = pytest.mark.model

MODEL = "SmolLM2-135M-Instruct"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["old", "new"]},
        "people": {"type": "integer", "minimum": 0, "maximum": 9_999_999},
        "names": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2},
    },
    "required": ["city", "kind", "people", "names"],
    "additionalProperties": False,
}
NUMBER = r"[0-9]{3}-[0-9]{4}"
PROMPT = "Tell me of a city, as JSON."


class City(BaseModel):
    name: str = Field(max_length=15)
    people: int = Field(ge=0, le=99_999_999)


def body(**more: object) -> dict:
    schema = {"name": "city", "schema": SCHEMA, "strict": True}
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 200,
        "response_format": {"type": "json_schema", "json_schema": schema},
        **more,
    }


def test_answers_over_http_keep_to_their_schema(deployment):
    is_valid = pytest.importorskip("jsonschema_rs").validator_for(SCHEMA).is_valid
    url = f"http://{deployment.http}/v1/chat/completions"
    answer = httpx.post(url, json=body(n=4, temperature=1.2, seed=3), timeout=PATIENCE_S).json()
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop"
        assert is_valid(json.loads(choice["message"]["content"]))
    broken = body(max_tokens=5)
    (choice,) = httpx.post(url, json=broken, timeout=PATIENCE_S).json()["choices"]
    assert choice["finish_reason"] == "length"


TOO_MUCH = "([a-z]{1,100}){1,100}"
"""Each letter may be in any of a hundred words: what is left open grows with every one."""


def test_a_form_that_becomes_too_much_to_follow_is_its_callers_to_change(deployment):
    field = "structured_outputs.regex"
    asked = {"model": MODEL, "prompt": "Data:", "max_tokens": 300, "seed": 3}
    asked |= {"structured_outputs": {"regex": TOO_MUCH}}
    url = f"http://{deployment.http}/v1/completions"
    answer = httpx.post(url, json=asked, timeout=PATIENCE_S)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert error["message"].startswith(f"{field} can no longer be satisfied: ")
    streamed = httpx.post(url, json={**asked, "stream": True}, timeout=PATIENCE_S)
    *_, text, last = [line for line in streamed.text.split("\n\n") if line]
    assert json.loads(text.removeprefix("data: "))["choices"][0]["text"]
    assert json.loads(last.partition("data: ")[2])["error"] == error
    form = StructuredOutputs(regex=TOO_MUCH)
    params = GenerationParams(max_tokens=300, seed=3, structured_outputs=form)
    with Client(str(deployment.control)) as client, pytest.raises(ValidationError) as caught:
        client.generate("Data:", params)
    assert caught.value.field == field


@pytest.mark.wide
def test_the_openai_package_parses_what_comes(deployment):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"http://{deployment.http}/v1", api_key="-") as client:
        answer = client.chat.completions.parse(
            model=MODEL,
            messages=[{"role": "user", "content": PROMPT}],
            response_format=City,
            temperature=0,
            max_tokens=100,
        )
    assert isinstance(answer.choices[0].message.parsed, City)


def test_log_probabilities_do_not_see_the_constraint(deployment):
    """The first token is far from likely, and the likeliest are those of the free model."""
    wanted = {"logprobs": True, "top_logprobs": 2, "max_tokens": 1, "temperature": 0}
    url = f"http://{deployment.http}/v1/chat/completions"
    # The second prompt is computed as the first one was: where that matters, bits are the same.
    answers = [
        httpx.post(url, json=body(**wanted, **more), timeout=PATIENCE_S).json()
        for more in ({"cache_salt": "1"}, {"cache_salt": "2", "response_format": None})
    ]
    forced, free = [a["choices"][0]["logprobs"]["content"][0] for a in answers]
    assert forced["token"].startswith("{")
    assert not free["token"].startswith("{")
    assert forced["top_logprobs"] == free["top_logprobs"]
    assert forced["logprob"] < free["logprob"]


def test_the_client_asks_for_every_kind(deployment):
    def ask(structure: StructuredOutputs, **more) -> str:
        params = GenerationParams(
            max_tokens=60, temperature=1.0, seed=7, structured_outputs=structure, **more
        )
        answer = client.generate("Once more:", params)
        assert answer.finish_reason == "stop"
        assert answer.started.params.structured_outputs == structure
        return answer.text

    with Client(str(deployment.control)) as client:
        assert ask(StructuredOutputs(choice=("red", "green"))) in ("red", "green")
        assert re.fullmatch(NUMBER, ask(StructuredOutputs(regex=NUMBER)))
        balanced = ask(StructuredOutputs(grammar='start: "x" | "(" start ")"'), ignore_eos=True)
        assert balanced.count("(") == balanced.count(")")
        with pytest.raises(ValidationError, match="not supported") as caught:
            ask(StructuredOutputs(json={"type": "nothing"}))
        assert caught.value.field == "structured_outputs.json"


@pytest.mark.wide
def test_answers_over_grpc_are_those_of_one_token_a_step(deployment, target):
    form = StructuredOutputs(json=SCHEMA)
    params = [
        GenerationParams(max_tokens=100, temperature=t, seed=9, structured_outputs=form)
        for t in (0.0, 1.0)
    ]
    with Client(str(deployment.control)) as client:
        before = client.get_metrics().num_kept_drafts
        found = [client.generate(PROMPT, asked).text for asked in params]
        num_kept = client.get_metrics().num_kept_drafts - before
    with InferenceEngine(target.config(grammar_drafts=False)) as engine:
        wanted = []
        for asked in params:
            engine.submit_request(PROMPT, asked)
            wanted += [result.output_text for result in engine.run()]
        assert engine.get_metrics().num_drafts == 0
    assert num_kept > 10
    assert found == wanted or not target.keeps_bits


def test_what_is_no_structure_is_the_callers_fault_over_grpc(deployment):
    sampling = pb.SamplingParams(structured_outputs=pb.StructuredOutputs(regex="("))
    request = pb.GenerateRequest(text="Hi", sampling=sampling)
    with Server(deployment.control) as server, pytest.raises(grpc.RpcError) as caught:
        server.stub.Generate(request, timeout=PATIENCE_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "structured_outputs.regex is not supported" in caught.value.details()


@pytest.mark.wide
def test_a_broken_stream_goes_on_behind_the_tokens_that_came(deployment):
    structure = StructuredOutputs(json=SCHEMA)
    params = GenerationParams(max_tokens=150, temperature=0.8, seed=5, structured_outputs=structure)
    with Client(str(deployment.control)) as client:
        whole = client.generate(PROMPT, params)
        for num_tokens in (1, len(whole.token_ids) // 2, len(whole.token_ids)):
            request = pb.ResumeRequest(
                generate=pb.GenerateRequest(
                    text=PROMPT,
                    sampling=pb.SamplingParams(
                        max_tokens=150,
                        temperature=0.8,
                        seed=5,
                        structured_outputs=pb.StructuredOutputs(json=json.dumps(SCHEMA)),
                    ),
                ),
                received_token_ids=whole.token_ids[:num_tokens],
            )
            with Server(deployment.control) as server:
                tokens = list(whole.token_ids[:num_tokens])
                for event in server.stub.Resume(request, timeout=PATIENCE_S):
                    tokens += event.delta.token_ids
            assert tokens == list(whole.token_ids)
