"""`serve` as users run it: real processes, with the simulated executor in the compute plane."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from control_plane.core.generation_params import GenerationParams
from control_plane.errors import DrainingError
from hetero_infer.client import Client, Delta
from hetero_infer.commands.serve import HURRY_AFTER_S
from hetero_infer.config import EngineConfig
from hetero_infer.local_planes import start_compute_plane
from planes.address import Address, parse_address
from planes.errors import EngineError
from protos.hetero.inference.v1 import inference_pb2, inference_pb2_grpc
from tests.hetero_infer.command_processes import (
    PATIENCE_S,
    SIMULATED,
    private_directories,
    run,
    started,
)

SERVE = ["serve", "--grpc-port", "0", "--no-http", *SIMULATED]
SERVING = re.compile(
    r"Serving gRPC on (?P<address>\S+) \(control plane: pid (?P<control>\d+); "
    r"compute plane: (pid (?P<compute>\d+) at )?(?P<compute_address>\S+)\)\n"
)


FORTY_TOKENS = GenerationParams(max_tokens=40, seed=1, ignore_eos=True)


def generate(address: str) -> str:
    return answer(address)[1]


def answer(address: str) -> tuple[str, str]:
    """A request's id and its text."""
    with Client(parse_address(address)) as client:
        started, *events = client.stream("Hello", FORTY_TOKENS)
    text = "".join(event.text for event in events if isinstance(event, Delta))
    return started.request_id, text


def serving(process: subprocess.Popen[str]) -> re.Match[str]:
    line = process.stdout.readline()
    match = SERVING.fullmatch(line)
    assert match is not None, line + process.stderr.read()
    return match


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """The next line of the log with these words."""
    while words not in (line := process.stderr.readline()):
        assert line, "serve has ended"
    return line


@pytest.mark.wide
def test_serve_survives_its_compute_plane_and_sighup_and_ends_with_status_0_on_sigterm(environ):
    with started(environ, *SERVE) as process:
        match = serving(process)
        # Without a terminal a hangup is nobody's end.
        for pid in (process.pid, int(match["control"]), int(match["compute"])):
            os.kill(pid, signal.SIGHUP)
        text = generate(match["address"])
        assert text
        os.kill(int(match["compute"]), signal.SIGKILL)
        # The control plane takes requests meanwhile; they wait for the next compute plane.
        assert generate(match["address"]) == text
        with grpc.insecure_channel(match["address"]) as channel:
            admin = inference_pb2_grpc.AdminServiceStub(channel)
            metrics = admin.GetMetrics(inference_pb2.GetMetricsRequest())
        assert (metrics.num_plane_losses, metrics.num_preemptions) == (1, 0)
        process.terminate()
        _, log = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
        lines = [json.loads(line) for line in log.splitlines()]
        own = [line for line in lines if line["plane"] == "supervisor"]
        assert [line["event"] for line in own][:1] == [
            "the compute plane was ended by SIGKILL; starting another one"
        ]
        assert log.count("starting another one") == 1
        assert "parent process is gone" not in log
        assert {tuple(sorted(line)) for line in own} == {("event", "level", "plane", "timestamp")}
        assert private_directories(environ) == []


@pytest.mark.wide
def test_lines_of_serve_are_text_where_those_of_planes_are(environ):
    flags = ["--grpc-port", "0", "--log-format", "console", *SIMULATED]
    with started(environ, "serve", *flags) as process:
        match = serving(process)
        os.kill(int(match["compute"]), signal.SIGKILL)
        awaited = "hetero-infer: the compute plane was ended by SIGKILL; starting another one\n"
        lines = []
        while (line := process.stderr.readline()) != awaited:
            assert line, ("serve has ended", lines)
            assert not line.startswith("{")
            lines.append(line)


@pytest.mark.wide
def test_serve_ends_in_order_when_its_terminal_is_gone(environ):
    terminal, inside = os.openpty()
    with started(environ, *SERVE, stdin=inside) as process:
        os.close(inside)
        serving(process)
        process.send_signal(signal.SIGHUP)  # as the system does to a terminal's processes
        _, log = process.communicate(timeout=PATIENCE_S)
        os.close(terminal)
    assert process.returncode == 0
    assert "parent process is gone" not in log
    assert private_directories(environ) == []


@pytest.mark.wide
def test_serve_starts_its_control_plane_again_where_clients_found_it(environ):
    with started(environ, "--serve", "--grpc-port", "0", *SIMULATED) as process:
        match = serving(process)
        first_id, text = answer(match["address"])
        os.kill(int(match["control"]), signal.SIGKILL)
        # The next one says that it serves itself, in the log that it shares with `serve`.
        for awaited in ("the control plane was ended by SIGKILL; starting another", '"serving"'):
            read_until(process, awaited)
        second_id, same_text = answer(match["address"])
        assert same_text == text
        assert second_id != first_id
        assert Path(f"/proc/{match['compute']}").exists()
        process.terminate()
        _, log = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, log
        assert private_directories(environ) == []


@pytest.mark.wide
def test_a_second_signal_to_serve_cuts_the_requests_off_that_it_waits_for(environ):
    endless = ["--max-model-len", "90000", "--max-num-blocks", "9000", "--shutdown-timeout", "600"]
    params = GenerationParams(max_tokens=60000, seed=1, ignore_eos=True)
    with started(environ, "serve", "--grpc-port", "0", *endless, *SIMULATED) as process:
        match = serving(process)
        with (
            Client(parse_address(match["address"])) as client,
            grpc.insecure_channel(match["address"]) as channel,
        ):
            events = client.stream("Hello", params)
            next(events)
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            process.terminate()
            assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING  # it has heard
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(HURRY_AFTER_S + 0.1)  # else it is the same wish
            process.terminate()
            _, log = process.communicate(timeout=PATIENCE_S)
            with pytest.raises(EngineError):
                list(events)
        assert process.returncode == 128 + signal.SIGTERM
        assert "requests cut off by the shutdown" in log
        assert private_directories(environ) == []


@pytest.mark.wide
def test_serve_attaches_to_a_compute_plane_and_leaves_it_alone(environ, tmp_path):
    address = Address(path=str(tmp_path / "compute.sock"))
    with start_compute_plane(EngineConfig(executor="simulated"), address) as compute:
        compute.wait_ready(PATIENCE_S)
        flags = ["--compute", str(address), "--listen", f"unix:{tmp_path}/control.sock"]
        with started(environ, "serve", *flags) as process:
            match = serving(process)
            assert match["compute"] is None
            assert match["compute_address"] == str(address)
            assert generate(match["address"])
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0
        assert compute.is_running


@pytest.mark.wide
def test_serve_on_a_port_that_is_taken_is_a_fault_that_names_it(environ):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        result = run(environ, "serve", "--grpc-port", str(port), *SIMULATED)
    assert result.returncode == 2
    assert result.stdout == ""
    last = result.stderr.splitlines()[-1]
    assert last.startswith("hetero-infer: error: the control plane ended with status 2: ")
    assert f"cannot listen on 127.0.0.1:{port}" in last
    assert "Traceback" not in result.stderr


@pytest.mark.wide
def test_the_last_line_of_serve_says_why_its_compute_plane_cannot_start(environ):
    flags = ["--grpc-port", "0", "--no-http", "--executor", "no_such_module:Thing"]
    result = run(environ, "serve", *flags)
    assert result.returncode == 2
    last = result.stderr.splitlines()[-1]
    assert last.startswith("hetero-infer: error: the compute plane ended with status 2: ")
    assert "no_such_module:Thing cannot be imported" in last


@pytest.mark.wide
def test_a_signal_ends_serve_while_it_waits_to_start_a_plane_again(environ):
    with started(environ, *SERVE) as process:
        match = serving(process)
        pid = int(match["compute"])
        for is_last in (False, False, False, True):  # each pause is twice as long
            assert generate(match["address"])
            os.kill(pid, signal.SIGKILL)
            read_until(process, "the compute plane was ended by SIGKILL; starting another one")
            if not is_last:
                line = read_until(process, "compute plane: pid ")
                pid = int(json.loads(line)["event"].rpartition(" ")[2])
        process.terminate()
        _, log = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert "compute plane: pid" not in log
    assert private_directories(environ) == []


@pytest.mark.wide
def test_when_serve_is_killed_both_planes_end_and_the_next_one_goes_on(environ, tmp_path):
    address = f"unix:{tmp_path}/control.sock"
    flags = ["serve", "--listen", address, "--no-http", *SIMULATED]
    params = GenerationParams(max_tokens=600, seed=1, ignore_eos=True)
    with Client(parse_address(address)) as client:
        with started(environ, *flags) as process:
            serving(process)
            expected = client.generate("Hello", params).text
            broken, resumed = (client.stream("Hello", params, resume=r) for r in (False, True))
            for stream in (broken, resumed):
                while not isinstance(next(stream), Delta):
                    pass
            process.kill()
            # The planes hold the other end of this pipe: its end of file says that they have ended.
            process.communicate(timeout=PATIENCE_S)
        with pytest.raises(DrainingError):
            list(broken)
        (left,) = private_directories(environ)
        with started(environ, *flags) as process:
            serving(process)
            assert private_directories(environ) != [left]
            assert len(private_directories(environ)) == 1
            assert resumed.answer().text == expected
            process.terminate()
            process.communicate(timeout=PATIENCE_S)
        assert private_directories(environ) == []
