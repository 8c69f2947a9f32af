"""Whether an address can be listened on, and one line that says why not.

To be asked before a server binds: gRPC says what is wrong in several lines of its own on stderr,
takes a unix socket away from under a living server, and calls every other failure the same.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

from planes.address import Address
from planes.errors import ConfigError

_REASONS = {
    errno.EADDRINUSE: "it is in use",
    errno.EADDRNOTAVAIL: "{host} is not an address of this machine",
}


class _RefusedError(Exception):
    """Why nobody can listen there."""


def check_can_listen(address: Address, *, key: str = "listen") -> None:
    """Raise ConfigError, its field `key`, if nobody can listen there now.

    The socket file of a dead process is removed.
    """
    try:
        if address.path is not None:
            _make_way(Path(address.path))
        else:
            _check_port(address)
    except _RefusedError as refused:
        raise ConfigError(f"{key}: cannot listen on {address}: {refused}", field=key) from None


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
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise _RefusedError(error.strerror) from None
    raise _RefusedError("it is in use")


def _check_directory(directory: Path) -> None:
    if not directory.is_dir():
        raise _RefusedError(f"there is no directory {directory}")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise _RefusedError(f"the directory {directory} may not be written")


def _check_port(address: Address) -> None:
    """Bind for a moment, as gRPC will: with the address free again right after."""
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:  # UnicodeError: no host name of any network
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise _RefusedError(f"the host {address.host} is not known: {reason}") from None
    family, kind, protocol, _, where = found[0]
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
        raise _RefusedError(reason.format(host=address.host)) from None
