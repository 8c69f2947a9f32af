"""The services of `hetero.inference.v1` on one channel, and where a server is by default."""

from __future__ import annotations

from typing import Any, Final

import grpc

from planes.address import Address, parse_address
from protos.hetero.inference.v1 import inference_pb2_grpc

DEFAULT_TARGET: Final = "127.0.0.1:50051"
"""Where `hetero-infer serve` listens unless told otherwise."""

RPC_TIMEOUT_S: Final = 10.0
"""Of calls that generate nothing."""


CLIENT_CLOSED: Final = "the client is closed"


class Services:
    """The methods of all services, by their names; of a channel for threads or for asyncio."""

    def __init__(self, channel: grpc.Channel | grpc.aio.Channel) -> None:
        # A stub is made the same of both; its type says which of the two its methods are.
        anyway: Any = channel
        self._stubs = {
            "Inference": inference_pb2_grpc.InferenceServiceStub(anyway),
            "Model": inference_pb2_grpc.ModelServiceStub(anyway),
            "Tokenizer": inference_pb2_grpc.TokenizerServiceStub(anyway),
            "Admin": inference_pb2_grpc.AdminServiceStub(anyway),
        }

    def method(self, service: str, name: str) -> Any:  # noqa: ANN401 - a callable of gRPC's
        """Return a method; calling it makes the call."""
        return getattr(self._stubs[service], name)


def parse_target(target: str | Address) -> Address:
    """Return where a server is. Raises ConfigError for what is no address."""
    return target if isinstance(target, Address) else parse_address(target, key="target")
