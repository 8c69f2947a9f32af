"""Whether an address can be listened on, one line that says why not, and sockets bound to it.

To be asked before a server binds: gRPC says what is wrong in several lines of its own on stderr,
takes a unix socket away from under a living server, and calls every other failure the same.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path
from typing import Any

from planes.address import Address
from planes.errors import ConfigError
from planes.tls_files import check_plaintext

_REASONS = {errno.EADDRINUSE: "it is in use"}

_ATTEMPTS = 16
"""To find one free port at several addresses."""


class _RefusedError(Exception):
    """Why nobody can listen there."""


def check_can_listen(address: Address, *, key: str = "listen") -> None:
    """Raise ConfigError, its field `key`, if nobody can listen there now.

    The socket file of a dead process is removed.
    """
    if address.path is None:
        for one in bind_port(address, key=key):  # as gRPC will: the port is free again right after
            one.close()
        return
    try:
        _make_way(Path(address.path))
    except _RefusedError as refused:
        raise _refusal(key, address, refused) from None


def bind_port(address: Address, *, key: str = "listen") -> list[socket.socket]:
    """Bind one port at every address that a host's name has; nobody listens there yet.

    Addresses that this machine does not have are left out: `localhost` may be `::1`, too, where
    there is no IPv6. Raises ConfigError, its field `key`, if none is left, or if the port is in use
    at one of them: which server a client finds would be chance.
    """
    try:
        return _bind_all(address)
    except _RefusedError as refused:
        raise _refusal(key, address, refused) from None


def check_exposure(address: Address, *, key: str, is_tls: bool, allow_insecure: bool) -> None:
    """Refuse plaintext where others could read it; of a host that nobody knows say that instead.

    Raises ConfigError, its field `key`.
    """
    try:
        check_plaintext(address, key=key, is_tls=is_tls, allow_insecure=allow_insecure)
    except ConfigError:
        try:
            _places(address)
        except _RefusedError as refused:
            raise ConfigError(f"{key}: {refused}", field=key) from None
        raise


def _refusal(key: str, address: Address, refused: _RefusedError) -> ConfigError:
    return ConfigError(f"{key}: cannot listen on {address}: {refused}", field=key)


def _make_way(path: Path) -> None:
    """See to it that a socket file can be made; that of a dead process makes way for it."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        _check_directory(path.parent)
        return
    except OSError as error:
        raise _RefusedError(error.strerror) from None
    if not stat.S_ISSOCK(mode):
        raise _RefusedError("the file exists and is not a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # a stopped process takes no connection, and its queue may be full
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:
            raise _RefusedError("it is in use") from None
        except OSError as error:
            raise _RefusedError(error.strerror) from None
    raise _RefusedError("it is in use")


def _check_directory(directory: Path) -> None:
    if not directory.is_dir():
        raise _RefusedError(f"there is no directory {directory}")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise _RefusedError(f"the directory {directory} may not be written")


def _bind_all(address: Address) -> list[socket.socket]:
    places = _places(address)
    for _ in range(_ATTEMPTS):
        bound: list[socket.socket] = []
        try:
            for family, where in places:
                port = bound[0].getsockname()[1] if bound else address.port
                bound += _bind(family, (where[0], port, *where[2:]), is_alone=len(places) == 1)
        except OSError as error:
            for one in bound:
                one.close()
            if address.port == 0 and bound and error.errno == errno.EADDRINUSE:
                continue  # the port was free at the address before only
            reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
            raise _RefusedError(reason) from None
        if not bound:
            raise _RefusedError(f"{address.host} is not an address of this machine")
        return bound
    raise _RefusedError("no port is free at all addresses of the host")


def _places(address: Address) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    """Return family and address of all that a host's name means, each once."""
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:  # UnicodeError: no host name of any network
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise _RefusedError(f"the host {address.host} is not known: {reason}") from None
    return list(dict.fromkeys((family, where) for family, _, _, _, where in found))


def _bind(
    family: socket.AddressFamily, where: tuple[Any, ...], *, is_alone: bool
) -> list[socket.socket]:
    """Return a socket bound to an address, or none if this machine does not have it."""
    try:
        one = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        if error.errno == errno.EAFNOSUPPORT:
            return []
        raise
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and not is_alone:  # alone, `::` is 0.0.0.0, too
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.bind(where)
    except OSError as error:
        one.close()
        if error.errno == errno.EADDRNOTAVAIL:
            return []
        raise
    return [one]
