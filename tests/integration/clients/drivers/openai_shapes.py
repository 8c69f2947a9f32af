"""Between the neutral names and OpenAI's HTTP API: bodies to send, answers and chunks to read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

PATHS = {
    "complete": "/v1/completions",
    "chat": "/v1/chat/completions",
    "respond": "/v1/responses",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
    "chat_template": "/tokenize",
    "ready": "/readyz",
}
NOT_OF_THE_BODY = {"op", "token", "timeout_s", "leave_after", "include_usage", "extra"}
SPELLED = {"include_stop": "include_stop_str_in_output"}


def body_of(request: dict[str, Any]) -> dict[str, Any]:
    """Spell a request as OpenAI does."""
    op = request["op"]
    body = {
        SPELLED.get(name, name): value
        for name, value in request.items()
        if name not in NOT_OF_THE_BODY
    }
    if op == "chat" and "logprobs" in body:
        body["top_logprobs"] = body["logprobs"]
        body["logprobs"] = True
    if "prompt_logprobs" in body:
        body["logprobs"] = body.pop("prompt_logprobs")
        body["echo"] = True
    if op == "respond":
        body["input"] = body.pop("prompt" if "prompt" in body else "messages")
        body["max_output_tokens"] = body.pop("max_tokens")
        if "logprobs" in body:
            body["top_logprobs"] = body.pop("logprobs")
            body["include"] = ["message.output_text.logprobs"]
    elif body.get("stream") and request.get("include_usage", True):
        body["stream_options"] = {"include_usage": True}
    return {**body, **request.get("extra", {})}


def answer_of(request: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """Read a whole answer of any operation."""
    op = request["op"]
    if op == "respond":
        return response_answer(whole)
    if op in ("tokenize", "chat_template"):
        return {"token_ids": whole["tokens"]}
    if op == "detokenize":
        return {"text": whole["prompt"]}
    if op == "ready":
        return {"ready": whole["status"] == "ok"}
    if op == "models":
        return {"models": [model["id"] for model in whole["data"]]}
    if op == "model":
        return {"models": [whole["id"]]}
    choices = []
    for choice in whole["choices"]:
        text = choice["message"]["content"] if op == "chat" else choice["text"]
        found = {"text": text, "finish_reason": choice["finish_reason"]}
        choices.append({**found, **_logprobs(choice.get("logprobs"))})
    answer = {"choices": choices, "usage": _usage(whole["usage"])}
    return _without_echo(request, answer)


class Chunks:
    """A streamed answer, chunk by chunk."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._request = request
        self._choices: dict[int, dict[str, Any]] = {}
        self._usage: dict[str, int] | None = None
        self.num_pieces = 0

    def take(self, chunk: dict[str, Any]) -> None:
        if chunk.get("usage"):
            self._usage = _usage(chunk["usage"])
        for choice in chunk["choices"]:
            known = self._choices.setdefault(
                choice["index"], {"text": "", "finish_reason": None, "pieces": []}
            )
            text = choice["delta"].get("content") if "delta" in choice else choice["text"]
            if text:
                known["text"] += text
                known["pieces"].append(text)
                self.num_pieces += 1
            known["finish_reason"] = choice.get("finish_reason") or known["finish_reason"]
            for name, values in _logprobs(choice.get("logprobs")).items():
                known.setdefault(name, []).extend(values)

    def answer(self) -> dict[str, Any]:
        choices = [choice for _, choice in sorted(self._choices.items())]
        return _without_echo(self._request, {"choices": choices, "usage": self._usage})


def response_answer(response: dict[str, Any]) -> dict[str, Any]:
    """Read an answer of `/v1/responses`."""
    parts = [
        part for item in response["output"] if item["type"] == "message" for part in item["content"]
    ]
    usage = response["usage"]
    return {
        "choices": [
            {
                "text": "".join(part["text"] for part in parts),
                "finish_reason": "stop" if response["status"] == "completed" else "length",
                **_logprobs({"content": [one for part in parts for one in part["logprobs"] or ()]}),
            }
        ],
        "usage": {
            "prompt_tokens": usage["input_tokens"],
            "completion_tokens": usage["output_tokens"],
        },
    }


def response_stream_answer(events: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """Read a streamed one: its pieces of text, and the response that its last event holds."""
    pieces, kinds, last = [], [], {}
    for last in events:
        if last["type"] == "response.output_text.delta":
            pieces.append(last["delta"])
        if kinds[-1:] != [last["type"]]:
            kinds.append(last["type"])
    if not kinds:  # it was refused, and is no stream
        return {"choices": [], "usage": None}
    answer = response_answer(last["response"])
    answer["choices"][0] |= {"text": "".join(pieces), "pieces": pieces, "events": kinds}
    return answer


def refusal_of(status: int, error: dict[str, Any]) -> dict[str, Any]:
    """Read an answer that is no success; `error`: the object under that name."""
    return {
        "error": {
            "status": status,
            "type": error.get("type"),
            "code": error.get("code"),
            "field": error.get("param"),
        }
    }


def _usage(usage: dict[str, Any]) -> dict[str, int]:
    return {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}


def _logprobs(logprobs: dict[str, Any] | None) -> dict[str, list[Any]]:
    """Read both shapes: columns of a completion, entries of a chat."""
    if logprobs is None:
        return {}
    if "content" in logprobs:
        entries = logprobs["content"] or []
        return {
            "logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [
                [top["logprob"] for top in entry["top_logprobs"]] for entry in entries
            ],
        }
    return {
        "logprobs": list(logprobs["token_logprobs"]),
        "top_logprobs": [
            sorted((top or {}).values(), reverse=True) for top in logprobs["top_logprobs"]
        ],
    }


def _without_echo(request: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """Tell prompt and answer apart where only the prompt's log-probabilities were wanted."""
    if "prompt_logprobs" not in request:
        return answer
    count = answer["usage"]["prompt_tokens"]
    for choice in answer["choices"]:
        choice["text"] = choice["text"].removeprefix(request["prompt"])
        choice["prompt_logprobs"] = choice["logprobs"][:count]
        choice["logprobs"] = choice["logprobs"][count:]
        choice["top_logprobs"] = choice["top_logprobs"][count:]
        choice.pop("pieces", None)
    return answer
