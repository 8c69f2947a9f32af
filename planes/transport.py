"""What both ends of a wire must agree on: the protocol version and gRPC options.

Facts behind the numbers (grpcio 1.85): `keepalive_timeout_ms` does not bound the detection of a
stopped peer, `grpc.http2.ping_timeout_ms` does; server ping policing must allow what the client
sends; `SO_REUSEPORT` is on by default, so a second server would share the port silently.
"""

from __future__ import annotations

import socket
from typing import Final

from planes.address import Address

PROTOCOL_VERSION: Final = 1
"""Of `hetero.compute.v1`; both planes must have the same."""

MAX_PLANE_MESSAGE_BYTES = 64 << 20
"""Between the planes: tokenizer data and the largest batch fit many times."""

MAX_CLIENT_MESSAGE_BYTES = 16 << 20
"""From clients: a prompt of the longest context fits; anything larger is a mistake."""

CLIENT_HANDSHAKE_MS = 20_000
"""For a new connection of a client to say who it is; gRPC itself waits two minutes."""

CLIENT_IDLE_MS = 300_000
"""A connection without a call is closed then. Clients open another when they need one, unseen."""

CLIENT_PING_MS = 5000
"""How often a client may ping while no data passes; Go's and Java's do every 10 s at most. gRPC
itself allows one ping in 5 minutes: a client that pings, as is advised behind load balancers, would
lose what it waits for, as UNAVAILABLE, "Too many pings"."""

PING_INTERVAL_MS = 1000
PING_TIMEOUT_MS = 1000

PROBE_TIMEOUT_S = 0.2

Options = list[tuple[str, int | str]]

NO_RETRIES: Final = ("grpc.enable_retries", 0)
"""For every channel. gRPC makes a call that no server has seen again by itself. If that fails too,
who reads the call may wait for good, although its status has come: so it was with two streams of a
thousand whose server ended as they began. And the server it finds may be another one."""

_PINGS: Final[Options] = [
    ("grpc.keepalive_time_ms", PING_INTERVAL_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


def plane_server_options() -> Options:
    """Options of the compute plane's server."""
    return [
        *_server_options(MAX_PLANE_MESSAGE_BYTES),
        ("grpc.http2.min_ping_interval_without_data_ms", PING_INTERVAL_MS // 2),
        # Both ends ask: a stopped control plane, or one behind a cable that was pulled, must not
        # hold the session against the next one.
        *_PINGS,
    ]


def plane_channel_options() -> Options:
    """Options of the control plane's channel to a compute plane."""
    return [
        ("grpc.max_send_message_length", MAX_PLANE_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_PLANE_MESSAGE_BYTES),
        NO_RETRIES,
        *_PINGS,
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.min_reconnect_backoff_ms", 50),
        ("grpc.max_reconnect_backoff_ms", 250),
    ]


def client_server_options(
    max_receive_bytes: int = MAX_CLIENT_MESSAGE_BYTES, *, max_connections: int | None = None
) -> Options:
    """Options of the control plane's server.

    `max_receive_bytes`: of one message of a client. `max_connections`: more are closed at once;
    None: as many as there are descriptors.
    """
    options: Options = [
        *_server_options(MAX_CLIENT_MESSAGE_BYTES, max_receive_bytes),
        # Otherwise every stream may hold 4 MiB that nobody asked for, instead of 64 KiB; for a
        # message that is waited for the window grows to its size either way.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.server_handshake_timeout_ms", CLIENT_HANDSHAKE_MS),
        ("grpc.max_connection_idle_ms", CLIENT_IDLE_MS),
        ("grpc.http2.min_ping_interval_without_data_ms", CLIENT_PING_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        # Admission is ours: gRPC's own queue bound would end a burst of streams as bare CANCELLED.
        ("grpc.server.max_pending_requests", 1 << 20),
        ("grpc.server.max_pending_requests_hard_limit", 1 << 20),
    ]
    if max_connections is not None:
        options.append(("grpc.max_allowed_incoming_connections", max_connections))
    return options


def _server_options(max_message_bytes: int, max_receive_bytes: int | None = None) -> Options:
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_receive_bytes or max_message_bytes),
        ("grpc.max_metadata_size", 16 << 10),
    ]


def is_deserted(address: Address) -> bool:
    """Whether the machine says that nobody listens there; False also if it says nothing.

    The socket of a process that was killed refuses, that of one that is stopped does not.
    """
    try:
        if address.path is not None:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(PROBE_TIMEOUT_S)
                probe.connect(address.path)
        else:
            socket.create_connection((address.host, address.port), PROBE_TIMEOUT_S).close()
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except OSError:
        return False
    return False
