"""`/openapi.json` says what there is, and what it allows is never answered with a 5xx."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from control_plane.http.chat_schema import ChatRequest
from control_plane.http.completion_schema import CompletionRequest
from control_plane.http.embedding_schema import EmbeddingsRequest
from control_plane.http.fields import HarmlessFields
from control_plane.http.responses_schema import ResponseRequest

DOCUMENTATION = Path(__file__).parents[3] / "docs/openai-http.md"

STREAMING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
ANTHROPIC = ("/v1/messages", "/v1/messages/count_tokens")
POSTS = (*STREAMING, ANTHROPIC[1], "/v1/embeddings", "/tokenize", "/detokenize")

ODD = [
    None, True, False, 0, -1, 1, 3, 2**31, 2**64, -(2**63), 0.5, 1e308, -0.0, "", "x", "漢\u0000",
    "\U0001f600" * 50, [], ["a"], [1, 2], [[1], [2]], [[]], [None], {}, {"a": 1}, {"role": "user"},
    [{"role": "user", "content": "x"}], [{"role": "user", "content": [{"type": "text"}]}],
    {"type": "text"}, [{"type": "function", "function": {"name": "f"}}], "auto", "none",
]  # fmt: skip


def references(schema: object):
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield schema["$ref"]
        for value in schema.values():
            yield from references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from references(value)


def document_of(on_loop) -> dict:
    async def test(served):
        return (await served.client.get("/openapi.json")).json()

    return on_loop(test)


def test_it_says_how_long_texts_of_forms_may_be(on_loop):
    schemas = document_of(on_loop)["components"]["schemas"]
    lengths = {
        ("StructuredFields", "regex"): (1, 4096),
        ("StructuredFields", "grammar"): (1, 8192),
        ("RegexFormat", "value"): (1, 4096),
    }
    for (schema, field), bounds in lengths.items():
        told = schemas[schema]["properties"][field]
        assert (told["minLength"], told["maxLength"]) == bounds


def test_it_lists_every_route_with_its_body_answers_and_errors(on_loop):
    document = document_of(on_loop)
    assert set(document["paths"]) == {
        *POSTS, "/v1/models", "/v1/models/{model}", "/healthz", "/readyz", "/metrics",
        "/tokenizer_info",
    }  # fmt: skip
    for path in POSTS:
        operation = document["paths"][path]["post"]
        body = operation["requestBody"]["content"]["application/json"]["schema"]
        model = document["components"]["schemas"][body["$ref"].rpartition("/")[2]]
        assert model["additionalProperties"] == {"type": "null"}  # clients send what they skip
        assert operation["requestBody"]["required"]
        answer = operation["responses"]["200"]["content"]
        assert "$ref" in answer["application/json"]["schema"]
        assert ("text/event-stream" in answer) == (path in STREAMING)
        for status in ("400", "404", "413", "415", "429", "503"):
            error = operation["responses"][status]["content"]["application/json"]["schema"]
            name = "/MessageErrorResponse" if path in ANTHROPIC else "/ErrorResponse"
            assert error["$ref"].endswith(name)
        assert "422" not in operation["responses"]


def test_the_list_of_harmless_fields_is_what_the_documentation_says():
    text = DOCUMENTATION.read_text()
    said = text.partition("**Harmless.**")[2].partition("\n\n")[0]
    names = set(re.findall(r"`([a-z_]+)`", said)) - {"false", "auto", "default"}
    assert names == set(HarmlessFields.model_fields)
    said = text.partition("**With effect.**")[2].partition("**Harmless.**")[0]
    names = set(re.findall(r"`([a-z_]+)`", said)) - {"none", "auto"}
    models = (CompletionRequest, ChatRequest, ResponseRequest, EmbeddingsRequest)
    fields = {name for model in models for name in model.model_fields}
    # Fields with one legal value, the one that changes nothing.
    fields -= {"modalities", "truncation", "background"}
    assert names == fields - set(HarmlessFields.model_fields)


def test_every_reference_in_it_leads_somewhere(on_loop):
    document = document_of(on_loop)
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert set(references(document)) <= known
    assert not any("ValidationError" in name for name in known)


@pytest.mark.spread(1)
@pytest.mark.parametrize("path", POSTS)
def test_odd_values_in_any_field_are_answered_or_refused(on_loop, path):
    document = document_of(on_loop)
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    model = document["components"]["schemas"][body["schema"]["$ref"].rpartition("/")[2]]
    fields = sorted(model["properties"])
    base = {
        "/v1/completions": {"prompt": "Hi"},
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": "Hi"}],
            "max_completion_tokens": 4,
        },
        "/v1/responses": {"input": "Hi", "max_output_tokens": 4},
        "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
        "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hi"}]},
        "/v1/embeddings": {"input": "Hi"},
        "/tokenize": {"prompt": "Hi"},
        "/detokenize": {"tokens": [72]},
    }[path]
    draw = random.Random(7)
    bodies = [{field: value} for field in fields for value in ODD]
    for _ in range(60):
        chosen = draw.sample(fields, draw.randint(2, min(5, len(fields))))
        bodies.append({field: draw.choice(ODD) for field in chosen})

    async def test(served):
        answered = 0
        for fields in bodies:
            response = await served.post(path, {"model": "tiny/bytes", **base, **fields})
            assert response.status_code in (200, 400, 404), (fields, response.text)
            answered += response.status_code == 200
        assert answered >= 3
        assert len(served.hub) == 0

    on_loop(test)
