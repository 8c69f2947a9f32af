"""The plane as a real process: what it loads, what it tells, and all the ways it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from planes.address import parse_address
from protos.hetero.compute.v1 import compute_pb2, compute_pb2_grpc
from tests.compute_plane.plane_process import COMPILE_TIMEOUT_S, SIMULATED, TIMEOUT_S, process
from tests.compute_plane.rpc.plane_harness import start


def first_batch(opened: compute_pb2.OpenResponse) -> compute_pb2.ExecutionBatch:
    """Return a session's first step: a prompt of two bytes."""
    return compute_pb2.ExecutionBatch(
        session=opened.session,
        epoch=opened.epoch,
        step_id=1,
        starts=[start(0, b"hi", [0])],
        slots=[0],
        query_lens=[2],
        positions=[0],
        sampled_rows=[0],
    )


@pytest.mark.parametrize(
    ("number", "umask", "mode"),
    [
        (signal.SIGTERM, 0o022, 0o600),
        (signal.SIGINT, 0o007, 0o660),
        pytest.param(signal.SIGINT, 0, 0o660, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_the_plane_with_status_zero_and_removes_its_socket(
    tmp_path: Path, number: signal.Signals, umask: int, mode: int
):
    """Who may use the socket: its owner, and its group where the umask lets the group write."""
    path = tmp_path / "plane.sock"
    with process(f"--listen=unix:{path}", *SIMULATED, umask=umask) as plane:
        address = plane.ready()
        assert address == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == mode
        with grpc.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            stub = compute_pb2_grpc.ComputeServiceStub(channel)
            opened = stub.Open(compute_pb2.OpenRequest(protocol_version=1))
            output = stub.ExecuteOne(first_batch(opened))
            assert len(output.sampled_token_ids) == 1
            plane.popen.send_signal(number)
            assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert plane.end() == (0, "")
    assert not path.exists()


@pytest.mark.wide
def test_a_step_that_never_ends_does_not_keep_the_plane_whoever_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "stuck_executor.py").write_text(
        "import os, threading\n"
        "from compute_plane.executor.simulated import SimulatedExecutor\n"
        "class Stuck(SimulatedExecutor):\n"
        "    def execute(self, batch):\n"
        "        os.write(2, b'stuck\\n')\n"
        "        threading.Event().wait()\n"
        "def build(context):\n"
        "    return Stuck(num_blocks=context.num_blocks, block_size=context.block_size)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    flags = ("--executor=stuck_executor:build", "--max-num-blocks=16", "--log-level=error")
    with process("--listen=127.0.0.1:0", "--shutdown-timeout=0.1", *flags) as plane:
        with grpc.insecure_channel(plane.ready()) as channel:
            stub = compute_pb2_grpc.ComputeServiceStub(channel)
            opened = stub.Open(compute_pb2.OpenRequest(protocol_version=1), timeout=TIMEOUT_S)
            answer = stub.ExecuteOne.future(first_batch(opened), timeout=10 * TIMEOUT_S)
            assert plane.popen.stderr.readline() == "stuck\n"
            plane.popen.send_signal(signal.SIGTERM)
            assert answer.exception(TIMEOUT_S) is not None
        assert plane.end() == (1, "")


@pytest.mark.wide
def test_an_idle_plane_that_may_wait_for_nothing_has_nothing_left_undone():
    with process("--listen=127.0.0.1:0", "--shutdown-timeout=0", *SIMULATED) as plane:
        plane.ready()
        plane.popen.send_signal(signal.SIGTERM)
        assert plane.end() == (0, "")


def test_the_plane_ends_when_its_parent_is_gone():
    with process("--listen=127.0.0.1:0", *SIMULATED) as plane:
        port = parse_address(plane.ready()).port
        assert port > 0
        os.close(plane.lifeline)
        assert plane.end() == (0, "")


@pytest.mark.wide
def test_a_signal_while_the_plane_still_loads_ends_it_quietly(tmp_path: Path):
    (tmp_path / "slow_executor.py").write_text(
        "import os, sys, time\n"
        "def build(context):\n"
        "    os.write(2, b'loading\\n')\n"
        "    while True:\n"
        "        time.sleep(60)\n"
    )
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1))\n"
        "from compute_plane.__main__ import main\n"
        "sys.exit(main())"
    )
    popen = subprocess.Popen(
        [
            *(sys.executable, "-c", code, str(tmp_path)),
            *("--executor=slow_executor:build", "--listen=127.0.0.1:0", "--log-level=error"),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    with popen:
        assert popen.stderr is not None
        assert popen.stderr.readline() == "loading\n"
        popen.send_signal(signal.SIGTERM)
        _, errors = popen.communicate(timeout=TIMEOUT_S)
        assert (popen.returncode, errors) == (0, "")


@pytest.mark.wide
def test_the_simulated_plane_imports_neither_numba_nor_torch():
    code = (
        "import sys\n"
        "from compute_plane.app import ComputePlane\n"
        "from compute_plane.config import ComputePlaneConfig\n"
        "ComputePlane(ComputePlaneConfig(executor='simulated', listen='127.0.0.1:0'))\n"
        "print([name for name in ('numba', 'torch', 'llvmlite') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.wide
def test_a_plane_whose_kernels_are_kept_imports_no_compiler():
    code = (
        "import sys\n"
        "from compute_plane.app import ComputePlane\n"
        "from compute_plane.config import ComputePlaneConfig\n"
        "plane = ComputePlane(ComputePlaneConfig(max_num_blocks=16, listen='127.0.0.1:0'))\n"
        "plane.start()\n"
        "plane.stop()\n"
        "print([name for name in ('numba', 'kernels.cpu.compiled') if name in sys.modules])"
    )
    # The first one keeps them, if nobody did before.
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=True,
        )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow  # its first kernel takes seconds
@pytest.mark.model
def test_a_plane_that_is_stopped_while_it_compiles_ends_and_so_do_its_compilers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left() -> list[str]:
        found = []
        for process_dir in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if str(tmp_path).encode() in (process_dir / "environ").read_bytes():
                    found.append(process_dir.name)
        return found

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flags = ("--max-num-blocks=16", "--num-threads=2", "--log-level=info")
    with process(f"--listen=unix:{tmp_path}/socket", *flags) as plane:
        errors = plane.popen.stderr
        assert errors is not None
        assert any(json.loads(line)["event"] == "compiled" for line in errors)
        assert len(left()) == 3
        plane.popen.send_signal(signal.SIGTERM)
        status, _ = plane.end()
        assert status == 0
        assert left() == []


def test_a_plane_tells_its_service_manager_when_it_serves_lives_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        manager.settimeout(TIMEOUT_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        monkeypatch.setenv("WATCHDOG_USEC", "60000")
        address = f"unix:{tmp_path}/compute.sock"
        with process(*SIMULATED, f"--listen={address}") as started:
            started.ready()
            assert f"STATUS=serving on {address}" in manager.recv(1000).decode().splitlines()
            for _ in range(3):
                assert manager.recv(1000) == b"WATCHDOG=1"
            started.popen.send_signal(signal.SIGTERM)
            while (last := manager.recv(1000)) == b"WATCHDOG=1":
                pass
            assert last.startswith(b"STOPPING=1")
            assert started.end()[0] == 0
