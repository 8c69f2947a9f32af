"""A control plane process, in front of the fake compute plane or a real, simulated one."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tests.control_plane.api.services import Services

ROOT = Path(__file__).parents[3]


class Process:
    """`python -m control_plane`; `ready()` waits for its line, `stderr` is known once it ended."""

    def __init__(self, *flags: str, lifeline: int | None = None) -> None:
        self._ready, write = os.pipe()
        inherited = [write]
        if lifeline is not None:
            inherited.append(lifeline)
            flags = (*flags, f"--lifeline-fd={lifeline}")
        # A pipe that nobody reads would fill up.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self.process = subprocess.Popen(
            [sys.executable, "-m", "control_plane", *flags, f"--ready-fd={write}"],
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
            cwd=ROOT,
        )
        os.close(write)
        self.address = ""

    def ready(self, timeout_s: float = 30.0) -> str:
        """The address it serves on; empty if it ended instead."""
        readable, _, _ = select.select([self._ready], [], [], timeout_s)
        assert readable, "not ready in time"
        word, _, address = os.read(self._ready, 4096).decode().strip().partition(" ")
        self.address = address if word == "READY" else ""
        return self.address

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self) -> tuple[int, str]:
        code = self.process.wait(timeout=30)
        self._stderr.seek(0)
        return code, self._stderr.read().decode()

    def wait_for_log(self, text: str, timeout_s: float = 20.0) -> None:
        """Wait until the process, which still runs, has logged `text`."""
        deadline = time.monotonic() + timeout_s
        while text.encode() not in os.pread(self._stderr.fileno(), 1 << 20, 0):
            assert time.monotonic() < deadline, f"{text!r} was not logged in time"
            time.sleep(0.01)

    def close(self) -> None:
        os.close(self._ready)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(timeout=60)
        self._stderr.close()


class ComputeProcess:
    """`python -m compute_plane` with the simulated executor."""

    def __init__(self, address):
        self.address = address

    def start(self):
        ready, write = os.pipe()
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "compute_plane", f"--listen={self.address}",
                "--executor=simulated", "--block-size=4", "--max-num-blocks=96",
                f"--ready-fd={write}",
            ],
            pass_fds=[write],
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
        )  # fmt: skip
        os.close(write)
        readable, _, _ = select.select([ready], [], [], 30)
        assert readable
        assert os.read(ready, 100)
        os.close(ready)

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def compute(tmp_path_factory):
    """A compute plane that may be killed and started again."""
    compute = ComputeProcess(f"unix:{tmp_path_factory.mktemp('compute')}/compute.sock")
    compute.start()
    yield compute
    compute.kill()


@pytest.fixture(scope="session")
def start_control_plane():
    def start(plane, *flags: str, lifeline: int | None = None) -> Process:
        own = (f"--compute={plane.address}", "--grpc-port=0", "--no-http", "--log-format=json")
        return Process(*own, *flags, lifeline=lifeline)

    return start


@pytest.fixture
def launch(fake_plane, start_control_plane):
    processes = []

    def start(*flags: str, lifeline: int | None = None) -> Process:
        processes.append(start_control_plane(fake_plane, *flags, lifeline=lifeline))
        return processes[-1]

    yield start
    for process in processes:
        process.close()


@pytest.fixture
def control_plane(launch):
    process = launch()
    process.ready()
    return process


@pytest.fixture
def channel(control_plane):
    with grpc.insecure_channel(control_plane.address) as channel:
        yield channel


@pytest.fixture
def stub(channel):
    return Services(channel)


@pytest.fixture(scope="session")
def field_of():
    """The field that a refused call's details name."""

    def find(error):
        violation = error_details_pb2.BadRequest()
        for packed in rpc_status.from_call(error).details:
            if packed.Unpack(violation):
                return violation.field_violations[0].field
        return None

    return find
