"""Telling systemd how a plane is: the protocol of `Type=notify` services, sd_notify(3).

A datagram of lines `NAME=value` goes to the socket that the manager names in `NOTIFY_SOCKET`. With
`WatchdogSec=` it also wants to hear `WATCHDOG=1` regularly, and ends a service that falls silent.
Where there is no manager, nothing is sent.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

FEEDS_AN_INTERVAL: Final = 3
"""The manual asks for two at least."""
MICROSECONDS: Final = 1e-6


@dataclass(frozen=True, slots=True)
class ServiceManager:
    """The manager of this process. `address`: of its socket, empty for none.

    `watchdog_s`: seconds after which it ends a silent service; None if it does not watch.
    """

    address: str = ""
    watchdog_s: float | None = None

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> ServiceManager:
        """Read what a manager left in the environment; what was meant for a parent counts not."""
        watchdog_s = None
        microseconds, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
        if microseconds.isdigit() and int(microseconds) > 0 and pid in ("", str(os.getpid())):
            watchdog_s = int(microseconds) * MICROSECONDS
        return cls(environ.get("NOTIFY_SOCKET", ""), watchdog_s)

    @property
    def feed_pause_s(self) -> float | None:
        """Seconds between two signs of life; None if nobody waits for them."""
        if self.watchdog_s is None or not self.address:
            return None
        return self.watchdog_s / FEEDS_AN_INTERVAL

    def ready(self, status: str) -> None:
        """Say that the service has started."""
        self.notify("READY=1", f"STATUS={status}", f"MAINPID={os.getpid()}")

    def stopping(self) -> None:
        """Say that the service is on its way out."""
        self.notify("STOPPING=1", "STATUS=finishing what is under way")

    def notify(self, *lines: str) -> None:
        """Send lines; without a manager, or if it does not listen any more, do nothing."""
        if not self.address:
            return
        # "@" stands for the zero byte of an address that is no file.
        address = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.connect(address)
                sender.sendall("\n".join(lines).encode())
        except OSError:
            # A service is no worse for a manager that has gone.
            return

    def feed_watchdog(self, is_well: Callable[[], bool], stop: threading.Event) -> None:
        """Say WATCHDOG=1, on a thread of its own, as long as `is_well` and until `stop`."""
        pause_s = self.feed_pause_s
        if pause_s is None:
            return

        def feed() -> None:
            while not stop.wait(pause_s):
                if is_well():
                    self.notify("WATCHDOG=1")

        threading.Thread(target=feed, name="watchdog", daemon=True).start()
