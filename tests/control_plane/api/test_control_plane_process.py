"""The control plane process: how it starts, and in which order it takes requests."""

from __future__ import annotations

import json
import socket
import time

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from control_plane.__main__ import main
from protos.hetero.inference.v1 import inference_pb2 as pb
from tests.control_plane.api.services import Services, free_port, generate


def health(channel, service=""):
    request = health_pb2.HealthCheckRequest(service=service)
    return health_pb2_grpc.HealthStub(channel).Check(request, timeout=60).status


def test_it_listens_not_serving_until_the_compute_plane_comes(launch, fake_plane):
    fake_plane.kill()
    port = free_port()
    process = launch(f"--grpc-port={port}")
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=60)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.RpcError) as caught:
            list(generate(Services(channel)))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        fake_plane.start()
        assert process.ready() == f"127.0.0.1:{port}"
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING


def test_a_full_queue_is_exhausted_and_says_when_to_retry(launch, fake_plane):
    process = launch("--max-queued-requests=1", "--max-num-seqs=1")
    request = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=5))
    fake_plane.may_run.clear()
    with grpc.insecure_channel(process.ready()) as channel:
        stub = Services(channel)
        held = [stub.GenerateStream(request)]
        next(held[0])
        fake_plane.steps_seen.acquire(timeout=60)  # it runs now and waits no more
        held.append(stub.GenerateStream(request))
        next(held[1])
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.GenerateStream(request))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        retry = error_details_pb2.RetryInfo()
        (packed,) = (
            d for d in rpc_status.from_call(caught.value).details if d.Is(retry.DESCRIPTOR)
        )
        packed.Unpack(retry)
        assert retry.retry_delay.seconds == 1
        fake_plane.may_run.set()
        assert [len(list(stream)) > 1 for stream in held] == [True, True]


def test_a_lower_priority_number_goes_first(launch, fake_plane):
    def request(text, priority=0):
        sampling = pb.SamplingParams(max_tokens=3)
        return pb.GenerateRequest(text=text, sampling=sampling, priority=priority)

    process = launch("--max-num-seqs=1", "--no-prefix-cache")
    with grpc.insecure_channel(process.ready()) as channel:
        stub = Services(channel)
        fake_plane.may_run.clear()
        streams = [stub.GenerateStream(request("a"))]
        next(streams[0])
        assert fake_plane.steps_seen.acquire(timeout=60)  # it runs; the others wait
        for name, priority in (("late", 5), ("usual", 0), ("urgent", -5)):
            streams.append(stub.GenerateStream(request(name, priority)))
            next(streams[-1])
        fake_plane.may_run.set()
        for stream in streams:
            assert list(stream)[-1].HasField("finished")
    starts = [bytes(start.token_ids).decode() for b in fake_plane.batches for start in b.starts]
    assert starts == ["a", "urgent", "usual", "late"]


def test_a_request_cancelled_in_the_queue_never_runs(launch, fake_plane):
    process = launch("--max-num-seqs=1")
    fake_plane.may_run.clear()
    with grpc.insecure_channel(process.ready()) as channel:
        stub = Services(channel)
        first = generate(stub, max_tokens=5)
        next(first)
        queued = generate(stub, max_tokens=5)
        next(queued)
        queued.cancel()
        deadline = time.monotonic() + 60
        while stub.GetMetrics(pb.GetMetricsRequest()).cancelled_requests == 0:
            assert time.monotonic() < deadline
        fake_plane.may_run.set()
        list(first)
        metrics = stub.GetMetrics(pb.GetMetricsRequest())
    assert (metrics.total_requests, metrics.completed_requests) == (2, 1)
    assert sum(len(batch.starts) for batch in fake_plane.batches) == 1


def test_a_normal_start_before_the_compute_plane_says_only_that_it_waits(launch, fake_plane):
    fake_plane.kill()
    process = launch()
    process.wait_for_log("waiting for the compute plane")
    fake_plane.start()
    assert process.ready()
    process.terminate()
    _, stderr = process.wait()
    assert stderr.count("waiting for the compute plane") == 1
    assert fake_plane.address in stderr
    assert "UNAVAILABLE" not in stderr


@pytest.mark.wide
def test_a_second_control_plane_says_what_to_do_and_waits_for_its_turn(
    compute, start_control_plane
):
    first = start_control_plane(compute)
    second = None
    try:
        assert first.ready()
        second = start_control_plane(compute)
        second.wait_for_log("stop that one first")
        first.terminate()
        assert first.wait()[0] == 0
        assert second.ready()
        second.terminate()
        code, stderr = second.wait()
        assert code == 0
        assert "another control plane uses it (session 1 of controller" in stderr
        assert "take_over" not in stderr
    finally:
        first.close()
        if second is not None:
            second.close()


@pytest.mark.wide
def test_a_taken_port_is_one_clear_line(launch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, stderr = launch(f"--grpc-port={port}").wait()
    assert code == 2
    assert stderr == (
        f"control_plane: grpc_port: cannot listen on 127.0.0.1:{port}: it is in use; another one "
        "is --grpc-port\n"
    )
    assert "Traceback" not in stderr


@pytest.mark.wide
def test_a_socket_somebody_listens_on_is_not_taken_from_him(launch, tmp_path):
    path = tmp_path / "taken.sock"
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(str(path))
        taken.listen()
        code, stderr = launch(f"--listen=unix:{path}").wait()
    assert code == 2
    assert f"cannot listen on unix:{path}: it is in use" in stderr
    first = launch(f"--listen=unix:{path}")
    assert first.ready() == f"unix:{path}"  # a dead socket file is no obstacle


def test_one_port_for_both_is_refused_with_the_names_of_both(launch):
    code, stderr = launch("--grpc-port=50951", "--http-port=50951", "--http").wait()
    assert code == 2
    assert stderr == (
        "control_plane: http_port: 127.0.0.1:50951 is where gRPC listens too (--grpc-port); each "
        "needs a port of its own\n"
    )


@pytest.mark.wide
def test_an_address_of_another_machine_and_a_missing_directory_have_lines_of_their_own(
    launch, tmp_path
):
    missing = tmp_path / "missing"
    for flags, reason in (
        (["--listen=192.0.2.1:5", "--allow-insecure"], "192.0.2.1 is not an address of this machi"),
        ([f"--listen=unix:{missing}/s"], f"there is no directory {missing}"),
    ):
        code, stderr = launch(*flags).wait()
        assert code == 2
        (line,) = stderr.splitlines()
        assert line.startswith("control_plane: listen: cannot listen on ")
        assert reason in line


@pytest.mark.wide
def test_log_lines_carry_the_request_id_and_no_prompt(launch):
    process = launch("--log-level=debug")
    with grpc.insecure_channel(process.ready()) as channel:
        stub = Services(channel)
        started = next(iter(generate(stub, max_tokens=3))).started
        list(generate(stub, max_tokens=3))
    process.terminate()
    _, stderr = process.wait()
    lines = [json.loads(line) for line in stderr.splitlines()]
    assert any(line.get("request_id") == started.request_id for line in lines)
    assert {line["plane"] for line in lines} == {"control"}
    assert "hello" not in stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "compute (from --compute or HETERO_COMPUTE) is required"),
        (["--compute=nowhere"], "compute: expected unix:PATH or HOST:PORT, got 'nowhere'"),
        (["--compute=10.0.0.1:7"], "--allow-insecure"),
        (["--compute=unix:x", "--grpc-host=0.0.0.0"], "listen: 0.0.0.0:50051 can be reached"),
        (["--compute=unix:x", "--max-batch-size=0"], "max_batch_size (from --max-batch-size)"),
        (["--compute=unix:x", "--memory-threshold=nan"], "must be finite, got 'nan'"),
        (["--compute=unix:x", "--pipeline-depth=9"], "at most 8, got 9"),
    ],
)
def test_a_bad_configuration_is_one_line_and_exit_code_2(capsys, monkeypatch, flags, said):
    monkeypatch.delenv("HETERO_COMPUTE", raising=False)
    assert main(flags) == 2
    stderr = capsys.readouterr().err
    assert said in stderr
    assert stderr.count("\n") == 1


def test_environment_and_file_and_flags_override_in_that_order(tmp_path, monkeypatch):
    from control_plane.config import load_config

    file = tmp_path / "config.json"
    values = {"max_batch_size": 5, "max_num_seqs": 6, "max_model_len": 7, "block_size": 16}
    file.write_text(json.dumps(values | {"max_bach_size": 1}))
    monkeypatch.setenv("HETERO_MAX_NUM_SEQS", "60")
    monkeypatch.setenv("HETERO_MAX_MODEL_LEN", "70")
    loaded = load_config([f"--config={file}", "--max-model-len=700", "--compute=unix:/x"])
    config = loaded.config
    assert (config.max_batch_size, config.max_num_seqs, config.max_model_len) == (5, 60, 700)
    assert loaded.unknown_keys == ("max_bach_size",)
