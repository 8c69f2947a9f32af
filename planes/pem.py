"""PEM files: certificates and private keys, read whole and checked before anybody relies on them.

Every fault is one ConfigError that names the setting and the file.
"""

from __future__ import annotations

import os
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from planes.errors import ConfigError

MAX_PEM_BYTES: Final = 1 << 20
"""A bundle of all public authorities has a fifth of it."""


@dataclass(frozen=True, slots=True)
class Pem:
    """A PEM file as it was read. `key`: the setting that names it."""

    key: str
    path: str
    data: bytes

    def wrong(self, what: str) -> ConfigError:
        """Return the error that says what is wrong with the file."""
        return ConfigError(f"{self.key}: {self.path} {what}", field=self.key)


def stamp(path: str | None) -> object:
    """Return what changes when a file does."""
    if path is None:
        return None
    try:
        found = os.stat(path)
    except OSError as error:
        return error.errno
    # st_ctime_ns: who may read it changes nothing else, and a time can be set back.
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


def read_pair(cert_key: str, cert: str, key_key: str, key: str) -> tuple[Pem, Pem]:
    """Read a certificate (with its chain) and its key, and see that they belong together."""
    certificate, private = read_certificates(cert_key, cert), _read_pem(key_key, key)
    if b"PRIVATE KEY-----" not in private.data:
        raise private.wrong("has no private key (PEM)")
    if b"ENCRYPTED" in private.data:
        raise private.wrong("is encrypted; a key without a password is needed")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, password=no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise private.wrong(f"does not belong to the certificate {cert}") from None
        raise private.wrong("has no private key that can be read") from None
    except OSError as error:
        raise private.wrong(f"cannot be read: {error.strerror}") from None
    if os.stat(key).st_mode & stat.S_IROTH:
        import structlog  # seldom needed, and slow to import

        structlog.get_logger(__name__).warning(
            "everybody on this machine may read the private key", key=key_key, file=key
        )
    return certificate, private


def read_certificates(key: str, path: str) -> Pem:
    """Read a file of one or more certificates."""
    pem = _read_pem(key, path)
    if b"-----BEGIN CERTIFICATE-----" not in pem.data:
        raise pem.wrong("has no certificate (PEM)")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.data.decode())
    except (ssl.SSLError, UnicodeDecodeError):
        raise pem.wrong("has a certificate that cannot be read") from None
    return pem


def _read_pem(key: str, path: str) -> Pem:
    """Read a file that is not too long."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_PEM_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error.strerror}", field=key) from None
    if len(data) > MAX_PEM_BYTES:
        raise ConfigError(
            f"{key}: {path} has more than {MAX_PEM_BYTES} bytes; no certificate has", field=key
        )
    return Pem(key, path, data)


def no_password() -> str:
    """Answer OpenSSL instead of the terminal, where it would ask."""
    return ""
