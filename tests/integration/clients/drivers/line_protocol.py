"""The line protocol of a driver written in Python: a request a line in, an answer a line out.

Started as `python DRIVER HOST GRPC_PORT HTTP_PORT`. README.md has the fields of both.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Server:
    """All that a driver is told about the deployment."""

    host: str
    grpc_port: int
    http_port: int

    @property
    def grpc(self) -> str:
        return f"{self.host}:{self.grpc_port}"

    @property
    def http(self) -> str:
        return f"http://{self.host}:{self.http_port}"


def answer_lines(
    make_answer: Callable[[Server], Callable[[dict[str, Any]], dict[str, Any]]],
) -> None:
    """Answer every line of stdin until it ends."""
    host, grpc_port, http_port = sys.argv[1:]
    answer = make_answer(Server(host, int(grpc_port), int(http_port)))
    for line in sys.stdin:
        try:
            found = answer(json.loads(line))
        # Whatever a client library throws at one case, the cases behind it are asked all the same.
        except Exception:  # noqa: BLE001
            found = {"fault": traceback.format_exc()}
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


def pieces_taken(taken: int, request: dict[str, Any]) -> bool:
    """Whether a client that leaves in mid-stream has had as many pieces of text as it wants."""
    return request.get("leave_after") is not None and taken >= request["leave_after"]
