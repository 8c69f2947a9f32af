"""`llama-server`, asked through its OpenAI API with streaming. `settings`: `directory`.

The clock of `decode` begins with the first piece of text; a piece that waits for the rest of a
character then hides a token, which favours the peer.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.peers.runners.runner import Job

HOST = "127.0.0.1"
CONTEXT_TOKENS = 2048
START_TIMEOUT_S = 120.0
READ_TIMEOUT_S = 300.0


class LlamaServer:
    def __init__(self, job: Job) -> None:
        directory = job.settings["directory"]
        self._kind = job.kind
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            self._port = probe.getsockname()[1]
        self._process = subprocess.Popen(
            [
                f"{directory}/llama-server", "-m", job.model, "-t", str(job.threads), "-fa", "on",
                "-c", str(CONTEXT_TOKENS), "-np", "1", "--host", HOST, "--port", str(self._port),
            ],
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            self._wait()
        except BaseException:  # Ctrl-C too: the server must not outlive this
            self.close()
            raise
        self.versions = {"llama.cpp": _version(directory)}

    def measure(self, prompts: list[list[int]], output_tokens: int) -> tuple[int, float]:
        if self._kind == "batch":
            raise ValueError("one stream at a time")
        began = time.perf_counter()
        arrivals = self._stream(prompts[0], output_tokens)
        if self._kind == "prefill":
            return len(prompts[0]), arrivals[0] - began
        return output_tokens - 1, arrivals[-1] - arrivals[0]

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _stream(self, prompt: list[int], output_tokens: int) -> list[float]:
        """Return when each piece of text came. Raises RuntimeError if tokens are missing."""
        body = {
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = http.client.HTTPConnection(HOST, self._port, timeout=READ_TIMEOUT_S)
        arrivals: list[float] = []
        num_tokens = 0
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise RuntimeError(f"status {response.status}: {response.read()!r}")
            for line in response:
                arrived = time.perf_counter()
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event: dict[str, Any] = json.loads(line[len(b"data: ") :])
                num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
                if any(choice["text"] for choice in event["choices"]):
                    arrivals.append(arrived)
        finally:
            connection.close()
        if num_tokens != output_tokens:
            raise RuntimeError(f"{num_tokens} of {output_tokens} tokens came")
        return arrivals

    def _wait(self) -> None:
        """Wait until it serves."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"llama-server ended with {self._process.returncode}")
            connection = http.client.HTTPConnection(HOST, self._port, timeout=5)
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == http.HTTPStatus.OK:
                    return
            except OSError:
                pass  # it does not listen yet
            finally:
                connection.close()
            time.sleep(0.1)
        raise RuntimeError(f"llama-server does not serve after {START_TIMEOUT_S} s")


def _version(directory: str) -> str:
    done = subprocess.run(
        [f"{directory}/llama-server", "--version"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()[0].strip()


def load(job: Job) -> LlamaServer:
    return LlamaServer(job)
