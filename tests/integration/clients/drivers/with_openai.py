"""OpenAI's own Python package, without retries."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import openai
from line_protocol import Server, answer_lines, pieces_taken
from openai.resources import Completions
from openai.resources.chat import Completions as ChatCompletions
from openai.resources.responses import Responses
from openai_shapes import (
    PATHS,
    Chunks,
    answer_of,
    body_of,
    refusal_of,
    response_stream_answer,
)

PATIENCE_S = 120


class Driver:
    def __init__(self, server: Server) -> None:
        self._server = server
        self._clients: dict[str, openai.OpenAI] = {}

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        token = request.get("token") or "none"
        if token not in self._clients:
            self._clients[token] = openai.OpenAI(
                base_url=f"{self._server.http}/v1", api_key=token, max_retries=0
            )
        client = self._clients[token].with_options(timeout=request.get("timeout_s", PATIENCE_S))
        try:
            return self._ask(client, request)
        except openai.APITimeoutError:
            return {"error": {"timed_out": True}}
        except openai.APIStatusError as error:
            told = {"type": error.type, "code": error.code, "param": error.param}
            return refusal_of(error.status_code, told)

    def _ask(self, client: openai.OpenAI, request: dict[str, Any]) -> dict[str, Any]:
        op = request["op"]
        if op == "models":
            return {"models": [model.id for model in client.models.list()]}
        if op == "model":
            return {"models": [client.models.retrieve(request["model"]).id]}
        if op == "ready":  # no part of OpenAI's API: by the package's way to other paths
            return answer_of(request, client.get(f"{self._server.http}/readyz", cast_to=dict))
        if op == "respond":
            return _respond(client, request)
        if op not in ("complete", "chat"):
            url, body = self._server.http + PATHS[op], body_of(request)
            return answer_of(request, client.post(url, body=body, cast_to=dict))
        create = client.completions.create if op == "complete" else client.chat.completions.create
        known = KNOWN[op]
        body = body_of(request)
        given = {name: body.pop(name) for name in list(body) if name in known}
        answer = create(**given, extra_body=body)
        if not request.get("stream"):
            return answer_of(request, answer.model_dump())
        chunks = Chunks(request)
        with answer as stream:
            for chunk in stream:
                chunks.take(chunk.model_dump())
                if pieces_taken(chunks.num_pieces, request):
                    return {"left": True}
        return chunks.answer()


def _parameters(create: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(create).parameters)


KNOWN = {
    "complete": _parameters(Completions.create),
    "chat": _parameters(ChatCompletions.create),
    "respond": _parameters(Responses.create),
}
"""What the package has parameters for; the rest goes through `extra_body`."""


def _respond(client: openai.OpenAI, request: dict[str, Any]) -> dict[str, Any]:
    body = body_of(request)
    given = {name: body.pop(name) for name in list(body) if name in KNOWN["respond"]}
    answer = client.responses.create(**given, extra_body=body)
    if not request.get("stream"):
        return answer_of(request, answer.model_dump())
    with answer as stream:
        return response_stream_answer(event.model_dump() for event in stream)


if __name__ == "__main__":
    answer_lines(Driver)
