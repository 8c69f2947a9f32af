"""Why a server was not reached, in words that say what to do; gRPC's own name its inner parts."""

from __future__ import annotations

from typing import Final

import grpc

from hetero_infer.channel import Route
from hetero_infer.wire_errors import DeadlineExceededError, ServerLostError, error_from_rpc
from planes.errors import EngineError

NOT_CONNECTED: Final = "failed to connect to all addresses"
"""Begins what gRPC says where no connection could be made, and no call was sent."""

HTTP: Final = "{address} speaks HTTP, not gRPC: is its gRPC port another one?"

REASONS: Final = (
    ("Connection refused", "nothing answers at {address}"),
    ("No such file or directory", "nothing answers at {address}: there is no such socket"),
    ("Permission denied", "{address} may not be used by this user"),
    ("errors resolving", "the host of {address} is not known"),
    # The fourth byte of an answer is taken for the type of a frame: of "HTTP", of "<!DOCTYPE".
    ("http1.x server", HTTP),
    ("got frame type 80", HTTP),
    ("got frame type 79", HTTP),
    ("SETTINGS frame", "{address} takes connections, but does not speak gRPC"),
    ("WRONG_VERSION_NUMBER", "{address} does not speak TLS, which was asked for"),
    ("Hostname Verification", "the certificate of {address} is for another name"),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "the certificate of {address} is not signed by the authority that was given, or not valid",
    ),
)
"""What is looked for in gRPC's words, and what is said instead."""


def error_of(error: grpc.RpcError, route: Route) -> EngineError:
    """Return the exception that the server meant, or why it was not reached."""
    found = error_from_rpc(error)
    if type(found) is ServerLostError:
        return ServerLostError(_reason(found.message, route))
    if type(found) is DeadlineExceededError:
        return DeadlineExceededError(f"{route.address} did not answer within the time given")
    return found


def _reason(words: str, route: Route) -> str:
    for part, reason in REASONS:
        if part in words:
            return reason.format(address=route.address)
    if NOT_CONNECTED in words and "Socket closed" in words:
        wish = "a certificate of this client" if route.is_tls else "TLS"
        return f"{route.address} closes every connection: does it want {wish}?"
    if NOT_CONNECTED in words:
        return f"{route.address} cannot be reached: {words.rpartition('last error: ')[2]}"
    return f"the connection to {route.address} broke: {words}"
