"""Calls over one channel, for programs with threads, or with none."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any, TypeVar

import grpc

from hetero_infer.channel import Route
from hetero_infer.client import calls
from hetero_infer.client.aside import AsideCall, do_aside
from hetero_infer.client.attempts import Attempts, Deadline, OnWait
from hetero_infer.client.progress import StreamProgress
from hetero_infer.client.services import CLIENT_CLOSED, Services
from hetero_infer.client.unreached import error_of
from hetero_infer.wire_errors import ServerLostError
from planes.errors import EngineError

T = TypeVar("T")


class BlockingCalls:
    """The channel of one client; any thread may use it. Methods raise EngineError."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self._channel = route.open()
        self._services = Services(self._channel)
        self._closed = threading.Event()

    def run(
        self, call: calls.Call[T], timeout_s: float | None, retries: int, on_wait: OnWait | None
    ) -> T:
        """Make a call, and again as often as `retries` if nothing has begun to answer it."""
        attempts = Attempts(retries if call.is_repeatable else 0, Deadline(timeout_s), on_wait)
        while True:
            self.check_open()
            method = self._services.method(call.service, call.method)
            make = partial(
                method.future,
                call.message,
                timeout=attempts.deadline.left_s(),
                metadata=self._route.metadata,
            )
            aside = AsideCall(make)
            try:
                answer = aside.read(self._result_of, is_last=True)
            except EngineError as error:
                pause_s = attempts.pause_after(error)
            except BaseException:  # of a signal handler, most likely: the server need not go on
                aside.cancel()
                raise
            else:
                return call.read(answer)
            self._closed.wait(pause_s)

    def next_call(self, progress: StreamProgress) -> AsideCall:
        """Return the next call of a stream, not begun yet."""
        self.check_open()
        call = progress.next_call()
        method = self._services.method("Inference", call.method)
        return AsideCall(
            partial(method, call.message, timeout=call.timeout_s, metadata=self._route.metadata)
        )

    def error_of(self, error: grpc.RpcError) -> EngineError:
        """Return what an error of a call means."""
        return error_of(error, self._route)

    def check_open(self) -> None:
        """Raise ServerLostError once the channel is closed."""
        if self._closed.is_set():
            raise ServerLostError(CLIENT_CLOSED)

    def close(self) -> None:
        """Close the channel; calls under way are cancelled."""
        self._closed.set()
        do_aside(self._channel.close)

    def _result_of(self, call: Any) -> Any:  # noqa: ANN401 - gRPC's future and the message
        try:
            return call.result()
        except grpc.RpcError as error:
            raise self.error_of(error) from None
