"""The plane as a real process: its start, its one-line faults, its end."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from planes.address import parse_address
from protos.hetero.compute.v1 import compute_pb2, compute_pb2_grpc
from tests.compute_plane.rpc.plane_harness import start

TIMEOUT_S = 30.0
COMPILE_TIMEOUT_S = 300.0
SIMULATED = ("--executor=simulated", "--max-num-blocks=16", "--log-level=error")


class Process:
    """A compute plane started as its users start it; `ready` waits for the announcement."""

    def __init__(self, *flags: str, umask: int = -1) -> None:
        self._ready, ready_write = os.pipe()
        lifeline_read, self.lifeline = os.pipe()
        self.popen = subprocess.Popen(
            [
                *(sys.executable, "-m", "compute_plane", *flags),
                f"--ready-fd={ready_write}",
                f"--lifeline-fd={lifeline_read}",
            ],
            pass_fds=(ready_write, lifeline_read),
            umask=umask,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(ready_write)
        os.close(lifeline_read)

    def ready(self) -> str:
        assert select.select([self._ready], [], [], COMPILE_TIMEOUT_S)[0], "not ready in time"
        with os.fdopen(self._ready) as pipe:
            word, address = pipe.readline().split()
        assert word == "READY"
        return address

    def end(self) -> tuple[int, str]:
        """Wait for the process; its exit status and stderr."""
        _, errors = self.popen.communicate(timeout=TIMEOUT_S)
        return self.popen.returncode, errors

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.lifeline)
        self.popen.kill()
        self.popen.communicate()


@contextlib.contextmanager
def process(*flags: str, umask: int = -1) -> Iterator[Process]:
    started = Process(*flags, umask=umask)
    try:
        yield started
    finally:
        started.close()


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


def run_to_end(*flags: str) -> tuple[int, list[str]]:
    """Start a plane that cannot start; its exit status and the lines it printed."""
    with process(*flags) as started:
        status, errors = started.end()
    return status, errors.splitlines()


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
def test_a_living_planes_socket_is_not_taken_and_a_dead_ones_is_replaced(tmp_path: Path):
    path = tmp_path / "plane.sock"
    flags = (f"--listen=unix:{path}", *SIMULATED)
    with process(*flags) as first:
        first.ready()
        status, lines = run_to_end(*flags)
        assert status == 2
        assert lines == [f"compute_plane: listen: cannot listen on unix:{path}: it is in use"]
        first.popen.kill()
        first.end()
        assert path.exists()
        with process(*flags) as second:
            assert second.ready() == f"unix:{path}"


def test_a_port_in_use_is_refused_in_one_line():
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        status, lines = run_to_end(f"--listen={address}", *SIMULATED)
    assert status == 2
    assert lines == [f"compute_plane: listen: cannot listen on {address}: it is in use"]


@pytest.mark.wide
def test_an_address_of_another_machine_and_a_missing_directory_have_lines_of_their_own(
    tmp_path: Path,
):
    status, lines = run_to_end("--listen=192.0.2.1:5", "--allow-insecure", *SIMULATED)
    assert (status, lines) == (
        2,
        [
            "compute_plane: listen: cannot listen on 192.0.2.1:5: "
            "192.0.2.1 is not an address of this machine"
        ],
    )
    missing = tmp_path / "missing"
    status, (line,) = run_to_end(f"--listen=unix:{missing}/s", *SIMULATED)
    assert (status, line.endswith(f"there is no directory {missing}")) == (2, True)


def test_a_file_where_the_socket_should_be_is_left_alone(tmp_path: Path):
    path = tmp_path / "precious"
    path.write_text("text")
    status, (line,) = run_to_end(f"--listen=unix:{path}", *SIMULATED)
    assert status == 2
    assert "is not a socket" in line
    assert path.read_text() == "text"


@pytest.mark.wide
def test_a_faulty_model_file_ends_the_start_with_one_line(tmp_path: Path):
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(9))
    status, (line,) = run_to_end(f"--model={path}", "--listen=127.0.0.1:0", "--log-level=error")
    assert status == 2
    assert line.startswith(f"compute_plane: {path}: ")


CANNOT_START = {
    "--device=cuda": "device: cuda: ",
    "--device=cuda:5": "device: cuda:5: ",
    "--kv-cache-dtype=float4": "kv_cache_dtype (from --kv-cache-dtype) must be",
    "--block-size=0": "block_size (from --block-size) must be at least 1, got 0",
    "--listen=0.0.0.0:0": "--allow-insecure",
    "--listen=unix:/nowhere/plane.sock": "there is no directory /nowhere",
    "--executor=nothing": "executor must be auto, cpu, cuda, simulated or module:attribute",
    "--executor=no_such_module:build": "cannot be imported: ModuleNotFoundError",
    "--executor=os:sep": "must be callable, got str",
    "--model=/nowhere/model.gguf": "/nowhere/model.gguf",
    "--config=/nowhere.json": "config file /nowhere.json",
}


@pytest.mark.wide
def test_what_cannot_be_ends_in_one_line_and_status_two():
    # All in one process, because each start of an interpreter takes its time.
    code = (
        "import contextlib, io, json, os, sys\n"
        "from compute_plane.__main__ import main\n"
        "os.environ['CUDA_VISIBLE_DEVICES'] = ''\n"
        "for flag in sys.argv[1:]:\n"
        "    with contextlib.redirect_stderr(io.StringIO()) as errors:\n"
        "        status = main(['--listen=127.0.0.1:0', flag], prog='hetero-infer')\n"
        "    print(json.dumps([status, errors.getvalue()]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *CANNOT_START],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=True,
    )  # fmt: skip
    ends = [json.loads(line) for line in done.stdout.splitlines()]
    for (flag, words), (status, errors) in zip(CANNOT_START.items(), ends, strict=True):
        assert status == 2, flag
        (line,) = errors.splitlines()
        assert line.startswith("hetero-infer: ")
        assert words in line


@pytest.mark.wide
def test_a_factory_that_fails_is_logged_with_its_traceback():
    status, lines = run_to_end("--executor=builtins:dict", "--listen=127.0.0.1:0")
    assert status == 2
    assert "executor: builtins:dict failed: TypeError" in lines[-1]
    assert any("Traceback" in line or "exception" in line for line in lines[:-1])


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
