"""Whatever is wrong with a request: the client is told in full, the log in the server's words."""

from __future__ import annotations

import pytest
import structlog.testing

SECRET = "hunter2"
TEXT = f"my password is {SECRET}"
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES = "/v1/messages"
REFUSING = "{{ raise_exception('no: ' + messages[0].content) }}"


USER = {"messages": [{"role": "user", "content": "x"}]}


def calling(arguments) -> dict:
    function = {"name": "f", "arguments": arguments}
    call = {"id": "1", "type": "function", "function": function}
    return {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}


REFUSED = [
    (COMPLETIONS, {"prompt": "x", "stream": TEXT}, "stream"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {TEXT: 1}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"1": TEXT}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "x", TEXT: 1}, None),
    (COMPLETIONS, {"prompt": [1, TEXT]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": TEXT * 100}, "prompt"),
    (COMPLETIONS, {"prompt": "x", "model": TEXT}, "model"),
    (COMPLETIONS, {"prompt": "x", "metadata": {TEXT: 1}}, "metadata"),
    (COMPLETIONS, {"prompt": "x", "service_tier": TEXT}, "service_tier"),
    (CHAT, {"messages": TEXT}, "messages"),
    (CHAT, {"messages": [TEXT]}, None),
    (CHAT, {"messages": [{"role": TEXT, "content": TEXT}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": TEXT, TEXT: 1}]}, "messages[0]"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": TEXT}]}]}, None),
    (CHAT, calling(f'"{TEXT}"'), None),
    (CHAT, calling(f'{{"x": {TEXT}}}'), None),
    (CHAT, calling({"x": TEXT}), None),
    (CHAT, {**USER, "chat_template_kwargs": {TEXT: TEXT}}, "chat_template_kwargs"),
    (CHAT, {**USER, "chat_template_kwargs": {"tools": TEXT}}, "chat_template_kwargs"),
    (CHAT, {**USER, "chat_template_kwargs": TEXT}, "chat_template_kwargs"),
    (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]},
        None,
    ),
    (RESPONSES, {"input": "x", "instructions": [TEXT]}, "instructions"),
    (RESPONSES, {"input": [TEXT]}, None),
    (MESSAGES, {"max_tokens": 1, "messages": [{"role": TEXT}]}, "messages[0].role"),
    (MESSAGES, {"max_tokens": 1, **USER, TEXT: 1}, None),
    (MESSAGES, {"max_tokens": 1, **USER, "system": [{"type": TEXT}]}, "system[0].type"),
    (MESSAGES, {"max_tokens": 1, **USER, "metadata": {TEXT: 1}}, "metadata"),
    ("/tokenize", {"prompt": TEXT, "messages": TEXT}, "messages"),
    ("/detokenize", {"tokens": [TEXT]}, "tokens[0]"),
]


def logged(on_loop, path, body, status=400, **options) -> list[dict]:
    """What the log has of a refused request; the client is told more."""

    async def test(served):
        response = await served.post(path, {"model": "tiny/bytes", **body})
        assert response.status_code == status, response.text

    with structlog.testing.capture_logs(
        processors=[structlog.contextvars.merge_contextvars]
    ) as logs:
        on_loop(test, **options)
    assert SECRET not in str(logs)
    return [line for line in logs if line["event"] == "http request refused"]


@pytest.mark.parametrize(("path", "body", "param"), REFUSED)
def test_no_refused_request_is_quoted(on_loop, path, body, param):
    status = 404 if body.get("model") == TEXT else 400
    (line,) = logged(on_loop, path, body, status)
    assert line["code"]
    assert line["log_level"] == "info"
    if param is not None:
        assert line["param"] == param


def test_a_template_that_quotes_what_it_refuses_is_not_repeated(on_loop):
    body = {"messages": [{"role": "user", "content": TEXT}]}
    (line,) = logged(on_loop, CHAT, body, template=REFUSING)
    assert (line["code"], line["param"]) == ("invalid_value", "messages")


def test_what_is_no_json_is_not_quoted(on_loop):
    async def test(served):
        headers = {"content-type": "application/json"}
        body = f'{{"prompt": "{TEXT}" {TEXT}'
        response = await served.client.post(COMPLETIONS, content=body, headers=headers)
        assert response.status_code == 400
        await served.client.get(f"/v1/models/{SECRET}")
        await served.client.get(f"/{SECRET}")

    with structlog.testing.capture_logs(
        processors=[structlog.contextvars.merge_contextvars]
    ) as logs:
        on_loop(test)
    assert SECRET not in str(logs)
    assert logs[0]["method"] == "POST /v1/completions"


def test_a_method_of_a_clients_own_invention_is_not_in_the_log(on_loop):
    async def test(served):
        response = await served.client.request(SECRET.upper(), COMPLETIONS)
        assert response.status_code == 405

    with structlog.testing.capture_logs(
        processors=[structlog.contextvars.merge_contextvars]
    ) as logs:
        on_loop(test)
    assert logs
    assert SECRET.upper() not in str(logs)
