from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from planes.service_manager import ServiceManager


@pytest.fixture
def manager_socket(tmp_path: Path):
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(path))
        receiver.settimeout(10)
        yield receiver, str(path)


def test_a_service_says_ready_and_stopping_to_the_socket_in_its_environment(manager_socket):
    receiver, path = manager_socket
    manager = ServiceManager.of({"NOTIFY_SOCKET": path})
    manager.ready("serving on here")
    lines = receiver.recv(1000).decode().splitlines()
    assert lines == ["READY=1", "STATUS=serving on here", f"MAINPID={os.getpid()}"]
    manager.stopping()
    assert receiver.recv(1000).startswith(b"STOPPING=1")


def test_an_address_that_begins_with_an_at_sign_is_no_file():
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("")  # the system chooses
        receiver.settimeout(10)
        ServiceManager("@" + receiver.getsockname()[1:].decode()).ready("here")
        assert receiver.recv(1000).startswith(b"READY=1")


def test_the_watchdog_is_fed_only_while_all_is_well(manager_socket):
    receiver, path = manager_socket
    manager = ServiceManager.of({"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "30000"})
    asked, stop, answers = threading.Semaphore(0), threading.Event(), [True, False, False, True]

    def is_well() -> bool:
        asked.release()
        return answers.pop(0) if answers else False

    manager.feed_watchdog(is_well, stop)
    for _ in range(6):
        assert asked.acquire(timeout=60)
    stop.set()
    receiver.setblocking(False)
    assert [receiver.recv(100) for _ in range(2)] == [b"WATCHDOG=1"] * 2
    with pytest.raises(BlockingIOError):
        receiver.recv(100)


@pytest.mark.parametrize(
    ("environ", "watchdog_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "2000000"}, 2.0),
        ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": str(os.getpid())}, 0.5),
    ],
)
def test_a_watchdog_is_one_that_watches_this_process(environ, watchdog_s):
    assert ServiceManager.of(environ).watchdog_s == watchdog_s


def test_without_a_manager_or_after_its_end_nothing_happens(tmp_path: Path):
    ServiceManager().ready("alone")
    ServiceManager(str(tmp_path / "gone")).ready("alone")
    ServiceManager("", 1.0).feed_watchdog(lambda: True, threading.Event())
