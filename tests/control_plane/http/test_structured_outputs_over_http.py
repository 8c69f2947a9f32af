"""What callers over HTTP say of the form of an answer reaches the engine."""

from __future__ import annotations

import json

import pytest
from huggingface_hub import InferenceClient

from control_plane.core.structured_outputs import StructuredOutputs
from tests.control_plane.http.conftest import error_of
from tests.control_plane.http.own_server import Server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES = "/v1/responses"
MODEL = "simulated"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "x": None}


def json_schema(**more: object) -> dict:
    wanted = {"name": "answer", "schema": SCHEMA, **more}
    return {"response_format": {"type": "json_schema", "json_schema": wanted}}


def tgi(kind: str, value: object) -> dict:
    return {"response_format": {"type": kind, "value": value}}


def text_format(kind: str = "json_schema", **more: object) -> dict:
    if kind == "json_schema":
        more = {"name": "answer", "schema": SCHEMA, **more}
    return {"text": {"format": {"type": kind, **more}}}


@pytest.mark.parametrize("given", [5, [], [{}], 1.5])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_what_is_no_schema_is_named_as_its_caller_wrote_it(on_loop, path, given):
    async def test(served):
        text = {
            CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
            COMPLETIONS: {"prompt": "Hi"},
        }
        fields = text.get(path, {"input": "Hi"}) | {"structured_outputs": {"json": given}}
        response = await served.client.post(path, json={"model": MODEL, **fields})
        error = error_of(response, 400)
        assert error["param"] == "structured_outputs.json"
        assert error["message"].startswith(
            "Invalid 'structured_outputs.json': Input should be a JSON Schema: an object, its text"
        )

    on_loop(test)


@pytest.mark.parametrize(
    ("path", "fields", "wanted"),
    [
        (CHAT, {"response_format": {"type": "json_object"}}, {"json_object": True}),
        (CHAT, json_schema(strict=True), {"json": json.dumps(SCHEMA)}),
        (CHAT, json_schema(strict=False, description="d"), {"json": json.dumps(SCHEMA)}),
        (CHAT, {"response_format": {"type": "text"}}, None),
        # As `huggingface_hub`, and callers of TGI, spell it.
        (CHAT, tgi("json_object", SCHEMA), {"json": json.dumps(SCHEMA)}),
        (CHAT, tgi("json_object", None), {"json_object": True}),
        (CHAT, tgi("json", SCHEMA), {"json": json.dumps(SCHEMA)}),
        (CHAT, tgi("regex", "a+"), {"regex": "a+"}),
        (CHAT, {"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        (RESPONSES, text_format("json_object"), {"json_object": True}),
        (RESPONSES, text_format(strict=True), {"json": json.dumps(SCHEMA)}),
        (RESPONSES, text_format(strict=False, description="d"), {"json": json.dumps(SCHEMA)}),
        (RESPONSES, text_format("text"), None),
        (RESPONSES, {"text": {}}, None),
        (RESPONSES, {"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        (COMPLETIONS, {"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        (COMPLETIONS, {"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ("a", "b")}),
        (COMPLETIONS, {"structured_outputs": {"json_object": True}}, {"json_object": True}),
        (COMPLETIONS, {"structured_outputs": {"json": SCHEMA}}, {"json": json.dumps(SCHEMA)}),
        (COMPLETIONS, {"structured_outputs": {"json": "{}"}}, {"json": "{}"}),
        (
            COMPLETIONS,
            {"structured_outputs": {"grammar": 'start: "a"'}},
            {"grammar": 'start: "a"'},
        ),
    ],
)
def test_a_form_reaches_the_engine_with_what_keeps_to_it(on_loop, path, fields, wanted):
    async def test(served):
        if path == CHAT:
            await served.chat("Hi", **fields)
        elif path == RESPONSES:
            await served.respond("Hi", **fields)
        else:
            await served.complete("Hi", **fields)
        (request,) = served.engine.submitted
        structure = request.params.structured_outputs
        assert structure == (None if wanted is None else StructuredOutputs(**wanted))
        assert len(request.constraints) == (wanted is not None)

    on_loop(test)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, {"type": "text"}),
        (text_format("json_object"), {"type": "json_object"}),
        (
            text_format(strict=True),
            {
                "type": "json_schema",
                "name": "answer",
                "description": None,
                "schema": SCHEMA,
                "strict": True,
            },
        ),
    ],
)
def test_a_response_repeats_its_format(on_loop, fields, said):
    async def test(served):
        whole = await served.respond("Hi", **fields)
        events = await served.events(RESPONSES, {"input": "Hi", **fields})
        for response in (whole, events[0][1]["response"], events[-1][1]["response"]):
            assert response["text"] == {"format": said}

    on_loop(test)


def test_the_schema_that_huggingface_hub_is_given_reaches_the_engine():
    """It spells `response_format` in Hugging Face's way, whatever it is given."""
    server = Server()
    try:
        server.engine.says = ['{"a": 1}']
        with InferenceClient(base_url=f"http://{server.address}/v1", api_key="-") as client:
            answer = client.chat_completion(
                [{"role": "user", "content": "Hi"}], model="tiny/bytes", **json_schema()
            )
        assert answer.choices[0].message.content == '{"a": 1}'
        (request,) = server.engine.submitted
        assert request.params.structured_outputs == StructuredOutputs(json=SCHEMA)
    finally:
        server.close()
