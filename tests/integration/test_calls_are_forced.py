"""The embedded model calls tools where it must, and as strict as it must, through both planes.

Its own chat template knows no tools, and it would hardly call any: it has another one here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace

import httpx
import pytest

from control_plane.core.generation_params import GenerationParams
from hetero_infer.client import Client, Delta
from hetero_infer.local_planes import (
    compute_socket,
    private_directory,
    start_compute_plane,
    start_control_plane,
)
from hetero_infer.plane_process import wait_all_ready
from tests.control_plane.text.known_templates import QWEN
from tests.integration.asking import PATIENCE_S

pytestmark = [pytest.mark.model, pytest.mark.wide]

MODEL = "SmolLM2-135M-Instruct"
SCHEMA = {
    "type": "object",
    "properties": {
        "town": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
    },
    "required": ["town", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "weather"}}
HI = [{"role": "user", "content": "How will the weather be in Ulm?"}]


@pytest.fixture(scope="module")
def calling(target, tmp_path_factory) -> Iterator[SimpleNamespace]:
    """Where the control plane listens."""
    template = tmp_path_factory.mktemp("templates") / "qwen.jinja"
    template.write_text(QWEN)
    config = target.config()
    flags = ("--grpc-port=0", "--http", "--http-port=0", f"--chat-template={template}")
    with private_directory() as directory:
        compute = compute_socket(directory)
        with (
            start_compute_plane(config, compute) as compute_plane,
            start_control_plane(config, compute, *flags) as control_plane,
        ):
            wait_all_ready([compute_plane, control_plane])
            http = f"http://{control_plane.http_address}"
            yield SimpleNamespace(grpc=str(control_plane.address), http=http)


def check(name: str, arguments: str) -> None:
    is_valid = pytest.importorskip("jsonschema_rs").validator_for(SCHEMA).is_valid
    assert name in ("weather", "now")
    assert json.loads(arguments) == {} if name == "now" else is_valid(json.loads(arguments))


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_it_calls_over_http(calling, choice):
    body = {
        "model": MODEL, "messages": HI, "tools": [WEATHER, NOW], "tool_choice": choice, "n": 4,
        "seed": 1, "max_tokens": 400, "parallel_tool_calls": False,
    }  # fmt: skip
    url = f"{calling.http}/v1/chat/completions"
    answer = httpx.post(url, json=body, timeout=PATIENCE_S).json()
    for one in answer["choices"]:
        assert one["finish_reason"] == ("stop" if choice is NAMED else "tool_calls")
        (call,) = one["message"]["tool_calls"]
        check(call["function"]["name"], call["function"]["arguments"])
        assert one["message"]["content"] is None


def test_the_openai_package_streams_the_same_calls(calling):
    openai = pytest.importorskip("openai")
    fields = {
        "model": MODEL, "messages": HI, "tools": [WEATHER, NOW], "tool_choice": "required",
        "seed": 2, "max_tokens": 400, "parallel_tool_calls": False,
    }  # fmt: skip
    with openai.OpenAI(base_url=f"{calling.http}/v1", api_key="-") as client:
        whole = client.chat.completions.create(**fields).choices[0].message.tool_calls[0]
        with client.chat.completions.stream(**fields) as stream:
            last = stream.get_final_completion().choices[0]
    assert last.finish_reason == "tool_calls"
    (call,) = last.message.tool_calls
    assert (call.id, call.function.name) == (whole.id, whole.function.name)
    assert call.function.arguments == whole.function.arguments
    check(call.function.name, call.function.arguments)


def test_it_calls_for_the_client_whole_and_streamed(calling):
    params = GenerationParams(max_tokens=400, seed=3, temperature=1.2)
    fields = {"tools": [WEATHER, NOW], "tool_choice": NAMED}
    with Client(calling.grpc) as client:
        answer = client.chat(HI, params, **fields)
        (call,) = answer.message.tool_calls
        check(call.name, call.arguments)
        assert answer.finish_reason == "stop"
        with client.chat_stream(HI, params, **fields) as stream:
            deltas = [event for event in stream if isinstance(event, Delta)]
        tokens = [token for delta in deltas for token in delta.token_ids]
        assert tokens == list(answer.token_ids)


def test_a_strict_tool_may_be_left_alone(calling):
    """It has never learnt to call: what it says is text, as before, token for token."""
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    said = []
    for tool in (WEATHER, strict):
        body = {
            "model": MODEL, "messages": HI, "tools": [tool], "temperature": 0, "max_tokens": 24,
        }  # fmt: skip
        url = f"{calling.http}/v1/chat/completions"
        said.append(httpx.post(url, json=body, timeout=PATIENCE_S).json()["choices"][0])
    assert said[0]["message"] == said[1]["message"]
    assert said[0]["message"]["content"]
