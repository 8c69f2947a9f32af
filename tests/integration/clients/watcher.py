"""What became of requests, as an operator sees it."""

from __future__ import annotations

import time
from collections.abc import Callable

import grpc

from protos.hetero.inference.v1 import inference_pb2 as pb
from protos.hetero.inference.v1 import inference_pb2_grpc

PATIENCE_S = 60.0


class Watcher:
    """Looks at the server's list of requests. `is_ours`: nobody else has any there."""

    def __init__(
        self, channel: grpc.Channel, metadata: tuple[tuple[str, str], ...], *, is_ours: bool
    ) -> None:
        self._admin = inference_pb2_grpc.AdminServiceStub(channel)
        self._metadata = metadata
        self._is_ours = is_ours

    def requests(self) -> dict[str, str]:
        """Return the states of requests under way, and of those that ended last."""
        request = pb.ListRequestsRequest(include_ended=True)
        answer = self._admin.ListRequests(request, metadata=self._metadata)
        return {
            info.request_id: pb.RequestState.Name(info.state).removeprefix("REQUEST_STATE_")
            for info in answer.requests
        }

    def wait_for(self, state: str, known: dict[str, str]) -> None:
        """Wait until a request that is not known yet is in that state, and nothing goes on."""
        self._wait_until(
            lambda: any(
                found == state for name, found in self.requests().items() if name not in known
            ),
            f"a request is {state}",
        )
        if self._is_ours:
            self._wait_until(lambda: self._used_blocks() == 0, "all blocks are free")

    def _used_blocks(self) -> int:
        request = pb.GetMemoryStatsRequest()
        return self._admin.GetMemoryStats(request, metadata=self._metadata).used_blocks

    def _wait_until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline, f"after {PATIENCE_S:g} s it is not so that {what}"
            time.sleep(0.01)
