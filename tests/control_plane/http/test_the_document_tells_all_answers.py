"""`/openapi.json` names every answer there is, with its headers, and none that there is not."""

from __future__ import annotations

from control_plane.access.keyring import Keyring

OPEN = {"/healthz", "/readyz", "/openapi.json"}


def operations(document: dict):
    for path, methods in document["paths"].items():
        for operation in methods.values():
            yield path, operation


def document_of(on_loop, **options) -> dict:
    async def test(served):
        return (await served.client.get("/openapi.json")).json()

    return on_loop(test, **options)


def test_every_answer_has_the_headers_that_are_sent(on_loop):
    for _, operation in operations(document_of(on_loop)):
        for status, response in operation["responses"].items():
            assert "X-Request-Id" in response["headers"]
            assert ("Retry-After" in response["headers"]) == (status in ("429", "503"))
            assert ("WWW-Authenticate" in response["headers"]) == (status == "401")
            assert response["content"], status


def test_no_operation_has_answers_that_it_never_gives(on_loop):
    for path, operation in operations(document_of(on_loop)):
        statuses = set(operation["responses"])
        assert "422" not in statuses
        assert ("requestBody" in operation) == ({"413", "415"} <= statuses)
        assert ("401" in statuses) == (path not in OPEN)
        assert ("429" in statuses) == (path not in OPEN | {"/metrics"})


def test_metrics_are_text(on_loop):
    answers = document_of(on_loop)["paths"]["/metrics"]["get"]["responses"]
    assert set(answers["200"]["content"]) == {"text/plain"}
    assert set(answers["404"]["content"]) == {"application/json"}


class NoOne(Keyring):
    """A keyring without a file."""

    def __init__(self) -> None:
        pass


def test_who_needs_a_token_is_told_so(on_loop):
    free = document_of(on_loop)
    assert "securitySchemes" not in free["components"]
    assert not any("security" in operation for _, operation in operations(free))
    kept = document_of(on_loop, keyring=NoOne())
    schemes = kept["components"]["securitySchemes"]
    assert list(schemes.values()) == [
        {"type": "http", "scheme": "bearer"},
        {"type": "apiKey", "in": "header", "name": "x-api-key"},
    ]
    bearer, key = ([{name: []}] for name in schemes)
    for path, operation in operations(kept):
        takes_key = path.startswith(("/v1/messages", "/v1/models"))
        wanted = bearer + key if takes_key else bearer
        assert operation.get("security") == (None if path in OPEN else wanted)
