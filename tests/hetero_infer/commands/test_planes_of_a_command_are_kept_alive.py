from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import pytest

from hetero_infer import Client, GenerationParams
from hetero_infer.client import Delta
from hetero_infer.commands.server import Server, own_server
from hetero_infer.config import EngineConfig
from hetero_infer.supervision import MAX_RESTARTS
from planes.errors import EngineError

CONFIG = EngineConfig(executor="simulated")
PARAMS = GenerationParams(max_tokens=600, temperature=0.0, ignore_eos=True)


def pid_of(module: str, server: Server) -> int | None:
    """Return the process id of a plane of this server, whose socket is in the server's folder."""
    assert server.address.path is not None
    folder = os.path.dirname(server.address.path).encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes()
        except OSError:  # it has ended meanwhile
            continue
        if b"\0" + module.encode() + b"\0" in words and folder in words:
            return int(entry.name)
    return None


def await_line(lines: SimpleQueue[str], words: str) -> str:
    """Return the next line with these words."""
    while words not in (line := lines.get(timeout=30)):
        pass
    return line


@dataclass(frozen=True, slots=True)
class Served:
    """The server of a command, what it tells, a client of it, and what it says undisturbed."""

    server: Server
    lines: SimpleQueue[str]
    client: Client
    expected: str


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    lines: SimpleQueue[str] = SimpleQueue()
    with own_server(CONFIG, lines.put) as server, Client(server.address) as client:
        yield Served(server, lines, client, client.generate("x", PARAMS).text)
    assert pid_of("compute_plane", server) is pid_of("control_plane", server) is None


@pytest.mark.spread(1)
@pytest.mark.parametrize("module", ["compute_plane", "control_plane"])
def test_a_stream_goes_on_over_the_death_of_either_plane(served: Served, module: str) -> None:
    killed = pid_of(module, served.server)
    assert killed is not None
    with served.client.stream("x", PARAMS, resume=True) as stream:
        while not isinstance(next(stream), Delta):
            pass
        os.kill(killed, signal.SIGKILL)
        assert stream.answer().text == served.expected
    name = module.replace("_", " ")
    await_line(served.lines, f"hetero-infer: the {name} was ended by SIGKILL; starting another one")
    await_line(served.lines, f"hetero-infer: {name}: pid {pid_of(module, served.server)}")


@pytest.mark.slow
def test_a_plane_that_keeps_dying_is_given_up_and_the_command_is_told() -> None:
    lines: SimpleQueue[str] = SimpleQueue()
    with own_server(CONFIG, lines.put) as server, Client(server.address, retries=0) as client:
        for _ in range(MAX_RESTARTS + 1):
            os.kill(pid_of("compute_plane", server) or 0, signal.SIGKILL)
            line = await_line(lines, "was ended by SIGKILL")
            if "starting another one" in line:
                await_line(lines, "compute plane: pid")
        assert f"{MAX_RESTARTS} restarts did not help" in line
        ended = threading.Event()
        while not ended.wait(0.01):
            if pid_of("control_plane", server) is None:
                ended.set()
        with pytest.raises(EngineError):
            client.generate("x", PARAMS)
