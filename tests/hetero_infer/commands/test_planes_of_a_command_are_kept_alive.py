from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import pytest

from hetero_infer import Client, GenerationParams, restarts
from hetero_infer.client import Delta
from hetero_infer.commands.server import Server, own_server
from hetero_infer.config import EngineConfig
from hetero_infer.restarts import MAX_FAILED_STARTS
from planes.errors import EngineError
from tests.waiting import wait_until

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


BREAKABLE = """
import pathlib
from compute_plane.executor.simulated import SimulatedExecutor

def make(context):
    if pathlib.Path(__file__).with_name("broken").exists():
        raise RuntimeError("it is broken")
    return SimulatedExecutor(num_blocks=context.num_blocks, block_size=context.block_size)
"""


@pytest.mark.slow
def test_a_plane_that_dies_often_is_kept_alive_and_one_that_cannot_start_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "breakable.py").write_text(BREAKABLE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", 0.0)
    config = EngineConfig(executor="breakable:make")
    lines: SimpleQueue[str] = SimpleQueue()
    with own_server(config, lines.put) as server, Client(server.address, retries=0) as client:
        for _ in range(MAX_FAILED_STARTS + 1):
            assert client.generate("x", GenerationParams(max_tokens=2)).text
            os.kill(pid_of("compute_plane", server) or 0, signal.SIGKILL)
            await_line(lines, "was ended by SIGKILL; starting another one")
            await_line(lines, "compute plane: pid")
        assert client.generate("x", GenerationParams(max_tokens=2)).text
        (tmp_path / "broken").touch()
        os.kill(pid_of("compute_plane", server) or 0, signal.SIGKILL)
        line = await_line(lines, "starts in a row failed")
        assert line.startswith("hetero-infer: 5 starts in a row failed: the compute plane ended")
        assert line.endswith("it is broken")
        wait_until(lambda: pid_of("control_plane", server) is None, "the control plane has ended")
        with pytest.raises(EngineError):
            client.generate("x", PARAMS)
