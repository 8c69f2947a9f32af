"""The official client's `responses`, its helpers for streams and for parsing included."""

from __future__ import annotations

import json

import pytest
from pydantic import BaseModel

from tests.control_plane.http.conftest import MODEL
from tests.control_plane.http.own_server import Server
from tests.control_plane.text.known_templates import QWEN

SKY = {"type": "function", "name": "sky", "parameters": {"type": "object"}, "strict": False}
CALLS = (
    "<think>\nRain?\n</think>\n\nHm.\n"
    '<tool_call>\n{"name": "sky", "arguments": {"at": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "sky", "arguments": {"at": "Ulm"}}\n</tool_call>'
)
HI = {"role": "user", "content": "Hi"}


class City(BaseModel):
    name: str
    people: int


@pytest.fixture(scope="module")
def server():
    server = Server(template=QWEN)
    yield server
    server.close()


@pytest.fixture(scope="module")
def client(server, openai):
    client = openai.OpenAI(base_url=f"http://{server.address}/v1", api_key="-", max_retries=0)
    yield client
    client.close()


@pytest.mark.wide
def test_functions_are_called_and_answered_as_openai_does_it(server, client):
    server.engine.says = [CALLS]
    asked = {"model": MODEL, "tools": [SKY], "extra_body": {"seed": 1}}
    whole = client.responses.create(**asked, input=[HI], max_output_tokens=250)
    thought, said, *calls = whole.output
    assert [part.text for part in thought.content] == ["Rain?"]
    assert (said.content[0].text, whole.output_text) == ("Hm.", "Hm.")
    assert [json.loads(call.arguments)["at"] for call in calls] == ["Köln", "Ulm"]
    # The package puts the deltas together itself.
    with client.responses.stream(**asked, input=[HI], max_output_tokens=250) as stream:
        snapshots = [
            event.snapshot for event in stream
            if event.type == "response.function_call_arguments.delta"
        ]  # fmt: skip
        streamed = stream.get_final_response()
    assert snapshots[-1] == calls[-1].arguments
    assert [(one.type, one.status) for one in streamed.output] == [
        (one.type, "completed") for one in whole.output
    ]
    assert [(one.call_id, one.name, one.arguments) for one in streamed.output[2:]] == [
        (one.call_id, one.name, one.arguments) for one in calls
    ]
    server.engine.says = ["It rains."]
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        for call in calls
    ]
    dumped = [one.model_dump() for one in whole.output]
    prompts = set()
    for output in (whole.output, streamed.output, dumped):
        answer = client.responses.create(**asked, input=[HI, *output, *results])
        assert answer.output_text == "It rains."
        prompts.add(bytes(server.engine.submitted[-1].input_tokens).decode())
    (prompt,) = prompts
    assert prompt.count("<tool_call>\n{") == prompt.count("<tool_response>\nrain") == 2


def test_answers_are_parsed_into_a_model_of_pydantic(server, client):
    server.engine.says = ['{"name": "Köln", "people": 1087353}']
    parsed = client.responses.parse(model=MODEL, input="Hi", text_format=City)
    assert parsed.output_parsed == City(name="Köln", people=1087353)
    structure = server.engine.submitted[-1].params.structured_outputs
    assert json.loads(structure.json)["required"] == ["name", "people"]
    with client.responses.stream(model=MODEL, input="Hi", text_format=City) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response()
    assert streamed.output_parsed == parsed.output_parsed
    assert kinds[-1] == "response.completed"
    again = client.responses.parse(
        model=MODEL, input=[HI, *parsed.output, HI], text_format=City, max_output_tokens=60
    )
    assert again.output_parsed == parsed.output_parsed


def test_what_the_package_gets_has_the_types_that_it_declares(server, client):
    server.engine.says = [CALLS]
    answer = client.responses.create(
        model=MODEL, input="Hi", tools=[SKY], text={"format": {"type": "text"}},
        max_output_tokens=250,
    )  # fmt: skip
    kinds = {"reasoning": "ResponseReasoningItem", "message": "ResponseOutputMessage",
             "function_call": "ResponseFunctionToolCall"}  # fmt: skip
    assert [type(one).__name__ for one in answer.output] == [
        kinds[one.type] for one in answer.output
    ]
    type(answer).model_validate(answer.model_dump(by_alias=True), strict=True)
    stream = client.responses.create(
        model=MODEL, input="Hi", tools=[SKY], max_output_tokens=250, stream=True
    )
    for event in stream:
        type(event).model_validate(event.model_dump(by_alias=True), strict=True)
        assert type(event).__name__ != "BaseModel"
