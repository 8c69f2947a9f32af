"""curl: one process a request, nothing but HTTP and JSON."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from line_protocol import Server, answer_lines, pieces_taken
from openai_shapes import (
    PATHS,
    Chunks,
    answer_of,
    body_of,
    refusal_of,
    response_stream_answer,
)

PATIENCE_S = 120
TIMED_OUT = 28
"""What curl exits with."""


class Driver:
    def __init__(self, server: Server) -> None:
        curl = shutil.which("curl")
        if curl is None:
            sys.exit("curl is not installed")
        self._curl = curl
        self._base_url = server.http

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        patience_s = request.get("timeout_s", PATIENCE_S)
        command = [
            self._curl, "--silent", "--show-error", "--no-buffer", "--noproxy", "*",
            "--max-time", str(patience_s), "--write-out", "%{stderr}%{http_code}",
        ]  # fmt: skip
        if request.get("token"):
            command += ["--header", f"Authorization: Bearer {request['token']}"]
        body = None
        if request["op"] in ("models", "model", "ready"):
            command.append(self._base_url + _path_to_get(request))
        else:
            body = json.dumps(body_of(request)).encode()
            command += ["--header", "Content-Type: application/json", "--data-binary", "@-"]
            command.append(self._base_url + PATHS[request["op"]])
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as curl:
            try:
                return _read(curl, request, body)
            finally:
                curl.kill()


def _path_to_get(request: dict[str, Any]) -> str:
    if request["op"] == "ready":
        return PATHS["ready"]
    return "/v1/models" if request["op"] == "models" else f"/v1/models/{request['model']}"


def _read(
    curl: subprocess.Popen[bytes], request: dict[str, Any], body: bytes | None
) -> dict[str, Any]:
    assert curl.stdin is not None
    assert curl.stdout is not None
    assert curl.stderr is not None
    curl.stdin.write(body or b"")
    curl.stdin.close()
    received: list[bytes] = []
    lines = _kept(curl.stdout, received)
    answer = None
    if request.get("stream"):
        read = _response_stream if request["op"] == "respond" else _chunks
        answer = read(lines, request)
        if answer == {"left": True}:
            return answer
    for _ in lines:
        pass
    said = curl.stderr.read().decode()
    if curl.wait() == TIMED_OUT:
        return {"error": {"timed_out": True}}
    if curl.returncode != 0:
        raise RuntimeError(f"curl exited with {curl.returncode}: {said}")
    status, text = int(said), b"".join(received)
    if status != 200:
        return refusal_of(status, json.loads(text)["error"])
    return answer_of(request, json.loads(text)) if answer is None else answer


def _kept(lines: Iterator[bytes], received: list[bytes]) -> Iterator[bytes]:
    for line in lines:
        received.append(line)
        yield line


def _events(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the data of server-sent events, until the one that says that it is done."""
    for line in lines:
        if line.startswith(b"data: "):
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)


def _chunks(lines: Iterator[bytes], request: dict[str, Any]) -> dict[str, Any]:
    chunks = Chunks(request)
    for chunk in _events(lines):
        chunks.take(chunk)
        if pieces_taken(chunks.num_pieces, request):
            return {"left": True}
    return chunks.answer()


def _response_stream(lines: Iterator[bytes], _: dict[str, Any]) -> dict[str, Any]:
    return response_stream_answer(_events(lines))


if __name__ == "__main__":
    answer_lines(Driver)
