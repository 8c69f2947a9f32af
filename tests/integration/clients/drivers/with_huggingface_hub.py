"""`huggingface_hub.InferenceClient`, which asks OpenAI's chat endpoint."""

from __future__ import annotations

import inspect
import json
from typing import Any

from huggingface_hub import InferenceClient, InferenceTimeoutError
from huggingface_hub.errors import HfHubHTTPError
from line_protocol import Server, answer_lines, pieces_taken
from openai_shapes import Chunks, answer_of, body_of, refusal_of

PATIENCE_S = 120
KNOWN = set(inspect.signature(InferenceClient.chat_completion).parameters) - {
    "logit_bias"  # a list of numbers by its type, which is nothing to name tokens with
}
"""What the client has parameters for; the rest goes through `extra_body`."""


class Driver:
    def __init__(self, server: Server) -> None:
        self._base_url = server.http

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["op"] != "chat":
            # Asked for a chat instead, one without `max_tokens` would go on for half a minute.
            raise LookupError(f"the client has no call for {request['op']}")
        with InferenceClient(
            base_url=self._base_url,
            api_key=request.get("token") or "none",
            timeout=request.get("timeout_s", PATIENCE_S),
        ) as client:
            try:
                return _chat(client, request)
            except InferenceTimeoutError:
                return {"error": {"timed_out": True}}
            except HfHubHTTPError as error:
                return refusal_of(error.response.status_code, error.response.json()["error"])


def _chat(client: InferenceClient, request: dict[str, Any]) -> dict[str, Any]:
    body = body_of(request)
    given = {name: body.pop(name) for name in list(body) if name in KNOWN}
    answer = client.chat_completion(**given, extra_body=body)
    if not request.get("stream"):
        return answer_of(request, _plain(answer))
    chunks = Chunks(request)
    for chunk in answer:
        chunks.take(_plain(chunk))
        if pieces_taken(chunks.num_pieces, request):
            return {"left": True}  # leaving the client's context closes the connection
    return chunks.answer()


def _plain(typed: Any) -> dict[str, Any]:
    """Return a typed answer, which is a dict of such ones, without what is unset."""
    found: dict[str, Any] = json.loads(json.dumps(typed))
    return found


if __name__ == "__main__":
    answer_lines(Driver)
