"""The deployment that clients are pointed at, and a process for each client."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from control_plane.access.limits import Limits
from control_plane.access.token_file import add_token
from protos.hetero.inference.v1 import inference_pb2, inference_pb2_grpc
from tests.integration.clients.asked import Clients, Row
from tests.integration.clients.case_table import HERE, Client, Table
from tests.integration.clients.driver_process import Driver
from tests.integration.clients.watcher import Watcher

ROOT = HERE.parents[2]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Known only where this directory is named on the command line: pytest asks no other ones."""
    group = parser.getgroup("deployment")
    group.addoption("--deployment", metavar="HOST:GRPC_PORT:HTTP_PORT", help="test this one")
    group.addoption("--deployment-token", metavar="TOKEN", help="a token of it, an operator's")


@dataclass(frozen=True, slots=True)
class Served:
    """Where a deployment is. `token`: None if it asks for none. `is_ours`: nobody else uses it."""

    host: str
    grpc_port: int
    http_port: int
    token: str | None
    is_ours: bool

    @property
    def address(self) -> tuple[str, int, int]:
        return self.host, self.grpc_port, self.http_port

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)


@pytest.fixture(scope="session")
def served(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """The deployment that the command line names, or one of our own."""
    named = pytestconfig.getoption("--deployment", None)
    if named is not None:
        host, grpc_port, http_port = named.rsplit(":", 2)
        token = pytestconfig.getoption("--deployment-token")
        yield Served(host, int(grpc_port), int(http_port), token, is_ours=False)
        return
    directory = tmp_path_factory.mktemp("served")
    tokens = directory / "tokens.json"
    token = add_token(tokens, "clients", Limits(), admin=True, shares_cache=True)
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "hetero_infer", "serve",
                "--grpc-port=0", "--http-port=0", f"--api-tokens={tokens}",
                "--num-threads=1",  # of two cores the clients, and other tests, need one
            ],
            cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
    try:
        grpc_port, http_port = _ports(process, directory / "log")
        yield Served("127.0.0.1", grpc_port, http_port, token, is_ours=True)
    finally:
        process.terminate()
        # Reading to the end, too, closes what `serve` writes to.
        process.communicate(timeout=60)
        assert process.returncode == 0


def _ports(process: subprocess.Popen[str], log: Path) -> tuple[int, int]:
    """Read the two lines that `serve` prints once it serves."""
    assert process.stdout is not None
    found = [re.search(r"127\.0\.0\.1:(\d+)", process.stdout.readline()) for _ in range(2)]
    ports = [int(match[1]) for match in found if match is not None]
    assert len(ports) == 2, f"the deployment did not start: {log.read_text(encoding='utf-8')}"
    return ports[0], ports[1]


@pytest.fixture(scope="session")
def channel(served: Served) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"{served.host}:{served.grpc_port}") as channel:
        yield channel


@pytest.fixture(scope="session")
def model(served: Served, channel: grpc.Channel) -> str:
    """The name of the model that is served."""
    stub = inference_pb2_grpc.ModelServiceStub(channel)
    request = inference_pb2.GetModelInfoRequest()
    return stub.GetModelInfo(request, metadata=served.metadata).model


@pytest.fixture(scope="session")
def watcher(served: Served, channel: grpc.Channel) -> Watcher:
    return Watcher(channel, served.metadata, is_ours=served.is_ours)


@pytest.fixture(scope="session")
def table() -> Table:
    return Table()


@pytest.fixture(scope="session")
def clients(
    request: pytest.FixtureRequest,
    table: Table,
    served: Served,
    model: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Clients]:
    logs = tmp_path_factory.mktemp("drivers")
    with ExitStack() as stack:

        def start(client: Client) -> Driver:
            return stack.enter_context(Driver(client, served.address, logs / client.name))

        clients = Clients(table, start, {"model": model, "token": served.token})
        rows = _rows(request.session.items)
        if any(table.clients[client].command[0] == "node" for client, _, _ in rows):
            _install_node_packages()
        clients.ask_ahead(rows)
        yield clients


def _rows(items: list[pytest.Item]) -> list[Row]:
    """Return the rows of the table that were not deselected."""
    found = [item.callspec.params for item in items if hasattr(item, "callspec")]
    keys = ("client", "case_id", "way")
    return [tuple(row[key] for key in keys) for row in found if row.keys() == set(keys)]


def _install_node_packages() -> None:
    """Install what package-lock.json names, unless it is there already."""
    npm = shutil.which("npm")
    assert npm is not None, "npm is not installed: its clients cannot be driven"
    wanted = hashlib.sha256((HERE / "package-lock.json").read_bytes()).hexdigest()
    stamp = HERE / "node_modules" / ".installed"
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        flags = ["--silent", "--prefer-offline", "--no-audit", "--no-fund", "--ignore-scripts"]
        subprocess.run([npm, "ci", *flags], cwd=HERE, check=True, timeout=240)
        stamp.write_text(wanted, encoding="utf-8")
