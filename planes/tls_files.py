"""What settings say of TLS: which files, and where plaintext may be spoken.

A *server* shows a certificate (`cert`, `key`); with `client_ca` it also wants one from its clients
(mutual TLS). A *client* believes what `ca` has signed and may show a certificate of its own.
Plaintext is for loopback and unix sockets; elsewhere it has to be asked for. On unix sockets it is
always spoken: the file's permissions guard them.
"""

from __future__ import annotations

from dataclasses import dataclass

from planes.address import Address
from planes.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServerFiles:
    """Paths of a server's files. `client_ca`: clients must show a certificate it has signed."""

    cert: str
    key: str
    client_ca: str | None = None


@dataclass(frozen=True, slots=True)
class ClientFiles:
    """Paths of a client's files: whom it believes, and what it shows if it is asked."""

    ca: str
    cert: str | None = None
    key: str | None = None


def server_files(cert: str | None, key: str | None, client_ca: str | None) -> ServerFiles | None:
    """Return what `tls_cert`, `tls_key` and `tls_client_ca` say together; None: plaintext.

    Raises ConfigError for a part without the rest.
    """
    _check_pair("tls_cert", cert, "tls_key", key)
    if cert is None or key is None:
        if client_ca is not None:
            raise ConfigError(
                "tls_client_ca: certificates of clients need TLS; give tls_cert and tls_key too",
                field="tls_client_ca",
            )
        return None
    return ServerFiles(cert, key, client_ca)


def client_files(
    ca: str | None, cert: str | None, key: str | None, *, prefix: str = "tls_"
) -> ClientFiles | None:
    """Return what three settings say together; None: plaintext. `prefix`: of their names.

    Raises ConfigError for a part without the rest.
    """
    _check_pair(f"{prefix}cert", cert, f"{prefix}key", key)
    if ca is None:
        if cert is not None:
            raise ConfigError(
                f"{prefix}cert: a certificate of one's own needs TLS; give {prefix}ca too, the "
                "authority whose servers are believed",
                field=f"{prefix}cert",
            )
        return None
    return ClientFiles(ca, cert, key)


def check_plaintext(address: Address, *, key: str, is_tls: bool, allow_insecure: bool) -> None:
    """Raise ConfigError where what travels could be read on the way: `key` names the address."""
    if not address.is_local and not is_tls and not allow_insecure:
        raise ConfigError(
            f"{key}: {address} can be reached from other machines and the connection is "
            "plaintext; give TLS certificates, or --allow-insecure if that is meant",
            field=key,
        )


def uses_tls(address: Address) -> bool:
    """Whether TLS is spoken there if there are certificates: not on unix sockets."""
    return address.path is None


def _check_pair(cert_key: str, cert: str | None, key_key: str, key: str | None) -> None:
    """Refuse a certificate without its key, and the other way round."""
    if (cert is None) != (key is None):
        given, missing = (cert_key, key_key) if key is None else (key_key, cert_key)
        raise ConfigError(f"{missing} is required with {given}", field=missing)
