"""A channel to a server, plaintext or TLS, and the token that is shown with every call."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from planes.address import Address
from planes.errors import ValidationError
from planes.tls import ClientTls, open_channel
from planes.tls_files import ClientFiles, uses_tls
from planes.transport import MAX_CLIENT_MESSAGE_BYTES, NO_RETRIES

Metadata = tuple[tuple[str, str], ...]
Options = Sequence[tuple[str, int | str]]

CLIENT_OPTIONS: Options = (
    ("grpc.max_send_message_length", MAX_CLIENT_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_CLIENT_MESSAGE_BYTES),
    NO_RETRIES,
    # A server that was started again is found soon.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 250),
    # What its name does not say: an attempt is given up after this. Far away, TLS takes a second.
    ("grpc.min_reconnect_backoff_ms", 3000),
)


class Route:
    """The way to a control plane: its address, TLS, and the token as metadata of every call.

    `tls`: None: plaintext. Raises ConfigError for TLS files that cannot be used, ValidationError
    for what is no token, and for a token that would travel in plaintext to another machine.
    """

    def __init__(
        self, address: Address, *, token: str | None = None, tls: ClientFiles | None = None
    ) -> None:
        self.address = address
        self.is_tls = tls is not None and uses_tls(address)
        self.metadata: Metadata = ()
        if token is not None:
            _check_token(token, address, is_tls=self.is_tls)
            self.metadata = (("authorization", f"Bearer {token}"),)
        self._tls = None if tls is None else ClientTls(tls)

    def open(self) -> grpc.Channel:
        """Return a channel for threads."""
        return open_channel(self.address, CLIENT_OPTIONS, self._tls)

    def open_async(self) -> grpc.aio.Channel:
        """Return a channel for the event loop that runs."""
        if self._tls is not None and self.is_tls:
            return grpc.aio.secure_channel(
                self.address.target, self._tls.grpc_credentials, options=CLIENT_OPTIONS
            )
        return grpc.aio.insecure_channel(self.address.target, options=CLIENT_OPTIONS)


def _check_token(token: str, address: Address, *, is_tls: bool) -> None:
    """Raise ValidationError for a token that cannot, or must not, be sent to an address."""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValidationError(
            "token must be printable ASCII without spaces, and not empty", field="token"
        )
    if not is_tls and not address.is_local:
        raise ValidationError(
            f"token: {address} is another machine and the connection is plaintext, everybody on "
            "the way could read it; give tls_ca",
            field="token",
        )
