"""A plane that cannot start ends with status two and one line that says why."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compute_plane.plane_process import SIMULATED, TIMEOUT_S, process, run_to_end


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
