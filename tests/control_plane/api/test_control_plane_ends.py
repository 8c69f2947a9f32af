"""All the ways in which the control plane process ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.control_plane.api.services import Services, free_port, generate


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(
    control_plane, channel, stub, fake_plane, expected
):
    fake_plane.may_run.clear()
    running = generate(stub, max_tokens=30)
    assert next(running).WhichOneof("event") == "started"
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    control_plane.terminate()
    assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(grpc.RpcError) as caught:
        list(generate(stub))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "draining" in caught.value.details()
    watch.cancel()
    fake_plane.may_run.set()
    events = list(running)
    assert "".join(event.delta.text for event in events) == expected("hello", 30)
    assert events[-1].WhichOneof("event") == "finished"
    assert control_plane.wait()[0] == 0


def test_requests_beyond_the_shutdown_timeout_end_unavailable(launch, fake_plane):
    process = launch("--shutdown-timeout=0.05")
    with grpc.insecure_channel(process.ready()) as channel:
        fake_plane.may_run.clear()
        running = generate(Services(channel), max_tokens=30)
        next(running)
        process.terminate()
        with pytest.raises(grpc.RpcError) as caught:
            list(running)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert process.wait()[0] == 0
    fake_plane.may_run.set()


@pytest.mark.wide
def test_sigterm_before_the_compute_plane_came_ends_it_in_order(launch, fake_plane):
    fake_plane.kill()
    port = free_port()
    process = launch(f"--grpc-port={port}")
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        grpc.channel_ready_future(channel).result(timeout=60)
        process.terminate()
        assert process.wait()[0] == 0
    fake_plane.start()


def test_the_end_of_its_parent_ends_it(fake_plane):
    read, write = os.pipe()
    os.set_inheritable(read, True)
    process = subprocess.Popen(
        [
            sys.executable, "-m", "control_plane", f"--compute={fake_plane.address}",
            "--grpc-port=0", "--no-http", f"--lifeline-fd={read}",
        ],
        pass_fds=[read],
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(read)
    os.close(write)
    assert process.wait(timeout=30) == 0


def test_its_parent_may_end_with_the_pipe_its_log_goes_to(fake_plane):
    lifeline, write = os.pipe()
    log, log_end = os.pipe()
    process = subprocess.Popen(
        [
            sys.executable, "-m", "control_plane", f"--compute={fake_plane.address}",
            "--grpc-port=0", "--no-http", f"--lifeline-fd={lifeline}",
        ],
        pass_fds=[lifeline],
        stderr=log_end,
    )  # fmt: skip
    os.close(lifeline)
    os.close(log_end)
    os.read(log, 1)  # it has begun to log
    os.close(log)
    os.close(write)
    assert process.wait(timeout=30) == 0


@pytest.mark.wide
def test_without_its_parent_it_drains_for_a_moment_only(launch, fake_plane):
    read, write = os.pipe()
    process = launch("--shutdown-timeout=600", lifeline=read)
    os.close(read)
    with grpc.insecure_channel(process.ready()) as channel:
        fake_plane.may_run.clear()
        stub = Services(channel)
        running = generate(stub, timeout=60, max_tokens=30)
        next(running)
        os.close(write)
        with pytest.raises(grpc.RpcError) as caught:
            list(running)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    code, stderr = process.wait()
    assert code == 0
    assert "the parent process is gone" in stderr
    fake_plane.may_run.set()


@pytest.mark.spread(1)
@pytest.mark.parametrize("lost_first", [True, False])
def test_a_drain_does_not_wait_for_a_compute_plane_that_is_gone(launch, fake_plane, lost_first):
    process = launch("--shutdown-timeout=600", "--compute-grace=600")
    with grpc.insecure_channel(process.ready()) as channel:
        fake_plane.may_run.clear()
        stub = Services(channel)
        running = generate(stub, timeout=60, max_tokens=200)
        next(running)
        fake_plane.steps_seen.acquire(timeout=60)
        if lost_first:
            fake_plane.server.stop(None)
            process.wait_for_log("link lost")
            process.terminate()
        else:
            process.terminate()
            process.wait_for_log("shutting down")
            fake_plane.server.stop(None)
        with pytest.raises(grpc.RpcError) as caught:
            list(running)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    code, stderr = process.wait()
    assert code == 0
    assert "the compute plane is away" in stderr
    fake_plane.kill()
    fake_plane.start()


def test_a_fenced_control_plane_ends_with_a_fault(control_plane, stub, fake_plane):
    fake_plane.other_session = 99
    with pytest.raises(grpc.RpcError) as caught:
        list(generate(stub))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    code, stderr = control_plane.wait()
    assert code == 1
    last = json.loads(stderr.splitlines()[-1])
    assert "another control plane took over" in last["error"]
    assert "Traceback" not in stderr


@pytest.mark.wide
def test_a_plane_of_another_model_ends_it_loudly(control_plane, fake_plane):
    fake_plane.kill()
    fake_plane.model = "other"
    fake_plane.start()
    code, stderr = control_plane.wait()
    assert code == 1
    assert "another model: 'other', it was 'fake'" in stderr


def test_two_interrupts_cut_the_shutdown_short(control_plane, stub, fake_plane):
    fake_plane.may_run.clear()
    running = generate(stub, max_tokens=30)
    next(running)
    control_plane.process.send_signal(signal.SIGINT)
    with pytest.raises(grpc.RpcError):  # it drains: the second one is a second one
        list(generate(stub))
    control_plane.process.send_signal(signal.SIGINT)
    assert control_plane.wait()[0] == 0
    fake_plane.may_run.set()


def test_it_tells_its_service_manager_when_it_listens_lives_and_stops(
    launch, fake_plane, tmp_path, monkeypatch
):
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        manager.settimeout(20)
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        monkeypatch.setenv("WATCHDOG_USEC", "60000")
        fake_plane.kill()
        process = launch()
        assert manager.recv(1000).startswith(b"READY=1\nSTATUS=listening on ")
        assert manager.recv(1000) == b"WATCHDOG=1"  # also while there is no compute plane
        fake_plane.start()
        process.ready()
        for _ in range(4):
            assert manager.recv(1000) == b"WATCHDOG=1"
        process.terminate()
        while (last := manager.recv(1000)) == b"WATCHDOG=1":
            pass
        assert last.startswith(b"STOPPING=1")
        assert process.wait()[0] == 0
