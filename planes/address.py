"""Where a plane listens: `unix:PATH` or `HOST:PORT`."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass

from planes.errors import ConfigError

MAX_UNIX_PATH_BYTES = 107
"""Linux: `sockaddr_un.sun_path` holds 108 bytes with the final NUL."""

MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed listen or dial address.

    Exactly one of `path` (unix socket) and `host` is set; `port` 0 asks for a free port.
    """

    path: str | None = None
    host: str | None = None
    port: int = 0

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it: a unix socket or a loopback host."""
        if self.path is not None:
            return True
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host or "").is_loopback
        except ValueError:
            return False

    @property
    def may_be_served(self) -> bool:
        """Whether somebody may listen there: False for a unix socket that does not exist."""
        return self.path is None or os.path.exists(self.path)

    @property
    def target(self) -> str:
        """The spelling gRPC understands, for dialling and for binding."""
        if self.path is not None:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in (self.host or "") else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return self.target


def parse_address(text: str, *, key: str = "address") -> Address:
    """Parse `unix:PATH` or `HOST:PORT` (`[V6]:PORT` for IPv6).

    Raises ConfigError, naming `key`, for anything else.
    """
    if text.startswith("unix:"):
        path = text.removeprefix("unix:").removeprefix("//")
        if not path:
            raise ConfigError(f"{key}: unix:PATH needs a path, got {text!r}", field=key)
        if len(path.encode()) > MAX_UNIX_PATH_BYTES:
            raise ConfigError(
                f"{key}: a unix socket path has at most {MAX_UNIX_PATH_BYTES} bytes, "
                f"got {len(path.encode())} ({path!r})",
                field=key,
            )
        return Address(path=path)
    host, colon, port_text = text.rpartition(":")
    host = _bare(host)
    if not colon or "/" in port_text or not _is_host(host):
        raise ConfigError(f"{key}: expected unix:PATH or HOST:PORT, got {text!r}", field=key)
    if not port_text.isascii() or not port_text.isdigit() or int(port_text) > MAX_PORT:
        raise ConfigError(f"{key}: port must be 0 to {MAX_PORT}, got {port_text!r}", field=key)
    return Address(host=host, port=int(port_text))


def host_address(host: str, port: int, *, key: str) -> Address:
    """Return the address of a name or an IP address, IPv6 with brackets or without.

    Raises ConfigError, naming `key`, for anything else.
    """
    bare = _bare(host)
    if not _is_host(bare):
        raise ConfigError(f"{key} must be a name or an IP address, got {host!r}", field=key)
    return Address(host=bare, port=port)


def _bare(host: str) -> str:
    """Return an IPv6 address without its brackets, anything else as it is."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") and ":" in host else host


def _is_host(text: str) -> bool:
    """Whether it may be a name or an IP address: a URL, or gRPC's `dns:NAME`, is none."""
    if ":" not in text:
        return bool(text) and re.search(r"[\s/\[\]@]", text) is None
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True
