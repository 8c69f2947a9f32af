"""TLS of every port and channel, made of the files that `planes.tls_files` names.

Files are read and checked before anything listens, so that a wrong one is one line that names its
setting, not a handshake that fails later for reasons no one sees. Servers take changed files at the
next connection: the ports look before each handshake. Clients read theirs once.
"""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import grpc

from planes.address import Address
from planes.errors import ConfigError
from planes.pem import Pem, no_password, read_certificates, read_pair, stamp
from planes.tls_files import ClientFiles, ServerFiles, uses_tls


class ServerTls:
    """A server's certificate, kept fresh. Raises ConfigError for files that cannot be used.

    May be asked from any thread: gRPC asks from its own.
    """

    def __init__(self, files: ServerFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._stamp = self._look()
        self._complained_of: object = None
        self._pems = self._read()
        self._version = 0
        self._credentials: list[grpc.ServerCredentials] = []

    @property
    def wants_client_certificates(self) -> bool:
        """Whether clients must show a certificate."""
        return self._files.client_ca is not None

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Return what `add_secure_port` takes; changed files count from the next connection on."""
        known = self._version

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal known
            version = self._refresh()
            if version == known:
                return None
            known = version
            return self._grpc_configuration()

        credentials = grpc.dynamic_ssl_server_credentials(
            self._grpc_configuration(),
            fetch,  # type: ignore[arg-type] # None means no change; the stub does not know
            self.wants_client_certificates,
        )
        # gRPC keeps a bare pointer to it: it must live as long as the port.
        self._credentials.append(credentials)
        return credentials

    def uvicorn_arguments(self) -> dict[str, Any]:
        """Return uvicorn's `ssl_…` arguments; `keep_fresh` takes the context it makes of them."""
        arguments: dict[str, Any] = {
            "ssl_certfile": self._files.cert,
            "ssl_keyfile": self._files.key,
        }
        if self._files.client_ca is not None:
            arguments["ssl_ca_certs"] = self._files.client_ca
            arguments["ssl_cert_reqs"] = ssl.CERT_REQUIRED
        return arguments

    def keep_fresh(self, context: ssl.SSLContext) -> None:
        """Let connections that are accepted with a context see changed files from now on."""
        current, known = context, self._version

        def take_fresh(
            connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _context: ssl.SSLContext
        ) -> None:
            nonlocal current, known
            version = self._refresh()
            if version != known:
                # Between the two they may have changed once more; then the next connection sees it.
                with contextlib.suppress(ssl.SSLError, OSError):
                    current = self._ssl_context()
                known = version
            connection.context = current

        context.sni_callback = take_fresh  # it is called for clients that name no host, too

    def _ssl_context(self) -> ssl.SSLContext:
        """Return a context of the files as they were read last."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._files.cert, self._files.key, password=no_password)
        ca = self._pems[2]
        if ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(cadata=ca.data.decode())
        return context

    def _grpc_configuration(self) -> grpc.ServerCertificateConfiguration:
        cert, key, ca = self._pems
        return grpc.ssl_server_certificate_configuration(
            [(key.data, cert.data)], root_certificates=None if ca is None else ca.data
        )

    def _refresh(self) -> int:
        """Read the files again if they have changed; return a number that grows when they are used.

        Files that cannot be used (or not yet: certificate and key change one after the other) leave
        everything as it was, and are named in the log once.
        """
        import structlog  # servers only, and clients import this module too

        _log = structlog.get_logger(__name__)
        with self._lock:
            found = self._look()
            if found == self._stamp:
                return self._version
            try:
                self._pems = self._read()
            except ConfigError as error:
                if found != self._complained_of:
                    self._complained_of = found
                    _log.error("changed TLS files are not used", error=error.message)
                return self._version
            self._stamp = found
            self._version += 1
            _log.info("TLS files read again", certificate=self._files.cert)
            return self._version

    def _look(self) -> Sequence[object]:
        files = self._files
        return [stamp(path) for path in (files.cert, files.key, files.client_ca)]

    def _read(self) -> tuple[Pem, Pem, Pem | None]:
        files = self._files
        cert, key = read_pair("tls_cert", files.cert, "tls_key", files.key)
        ca = files.client_ca
        return cert, key, None if ca is None else read_certificates("tls_client_ca", ca)


class ClientTls:
    """Whom a client believes and what it shows, read once.

    `prefix`: of the settings' names. Raises ConfigError for files that cannot be used.
    """

    def __init__(self, files: ClientFiles, *, prefix: str = "tls_") -> None:
        ca = read_certificates(f"{prefix}ca", files.ca)
        cert = key = None
        if files.cert is not None and files.key is not None:
            cert, key = read_pair(f"{prefix}cert", files.cert, f"{prefix}key", files.key)
        self.grpc_credentials: grpc.ChannelCredentials = grpc.ssl_channel_credentials(
            ca.data,
            None if key is None else key.data,
            None if cert is None else cert.data,
        )


def open_channel(
    address: Address, options: Sequence[tuple[str, int | str]], tls: ClientTls | None
) -> grpc.Channel:
    """Return a channel to an address: TLS if there is one and the address is no unix socket."""
    if tls is not None and uses_tls(address):
        return grpc.secure_channel(address.target, tls.grpc_credentials, options=options)
    return grpc.insecure_channel(address.target, options=options)


class Listener(Protocol):
    """A server of `grpc` or of `grpc.aio`."""

    def add_insecure_port(self, address: str, /) -> int:
        """Listen in plaintext."""

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials, /) -> int:
        """Listen with TLS."""


def add_port(server: Listener, address: Address, tls: ServerTls | None) -> int:
    """Let a server listen; return the port it was given. TLS as in `open_channel`.

    Raises RuntimeError as gRPC does.
    """
    if tls is not None and uses_tls(address):
        return server.add_secure_port(address.target, tls.grpc_credentials())
    return server.add_insecure_port(address.target)
