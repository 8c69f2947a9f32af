"""The control plane as a process, its HTTP port as anybody's client finds it."""

from __future__ import annotations

import json
import subprocess
import sys
from http.client import HTTPConnection

import pytest

from control_plane.config import ControlPlaneConfig
from planes.errors import ConfigError
from planes.extras import the_extra
from tests.control_plane.api.conftest import ROOT, Process

WITHOUT_THE_EXTRA = (
    "import sys; import control_plane.http.server as server; server.NEEDED = ('no_such_package',); "
    "from control_plane.__main__ import main; sys.exit(main(sys.argv[1:]))"
)


@pytest.fixture
def launch(fake_plane):
    processes = []

    def start(*flags: str) -> Process:
        own = (f"--compute={fake_plane.address}", "--grpc-port=0", "--log-format=json")
        processes.append(Process(*own, *flags))
        return processes[-1]

    yield start
    for process in processes:
        process.close()


def http_address_of(process: Process) -> str:
    return process.ready().split("\t")[1]


def run_without_the_extra(fake_plane, *flags: str) -> subprocess.CompletedProcess[str]:
    own = (f"--compute={fake_plane.address}", "--grpc-port=0", "--log-format=json")
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_EXTRA, *own, *flags],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", timeout=30,
        check=False,
    )  # fmt: skip


@pytest.mark.wide
def test_a_stream_under_way_ends_well_when_the_server_is_told_to_stop(launch, fake_plane, openai):
    process = launch("--http-port=0")
    address = http_address_of(process)
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="-", max_retries=0) as client:
        whole = client.completions.create(
            model="fake", prompt="Hello", max_tokens=30, seed=1, extra_body={"ignore_eos": True}
        )
        fake_plane.may_run.clear()
        stream = client.completions.create(
            model="fake", prompt="Hello", max_tokens=30, seed=1, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        process.terminate()
        process.wait_for_log("a second signal (Ctrl-C) ends them")
        with pytest.raises(openai.InternalServerError) as refused:
            client.completions.create(model="fake", prompt="Hello")
        assert (refused.value.status_code, refused.value.code) == (503, "draining")
        fake_plane.may_run.set()
        assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    code, log = process.wait()
    assert code == 0
    assert "Traceback" not in log
    (line,) = (line for line in map(json.loads, log.splitlines()) if "second" in line["event"])
    assert line["event"].startswith("shutting down: waiting for requests, 30 s at most; a second")
    assert line["requests_running"] == 1


@pytest.mark.wide
def test_what_is_no_http_is_answered_with_a_400_and_harms_nobody(launch):
    process = launch("--http-port=0")
    host, _, port = http_address_of(process).partition(":")
    connection = HTTPConnection(host, int(port), timeout=10)
    connection.connect()
    connection.sock.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
    assert connection.sock.recv(100).startswith(b"HTTP/1.1 400")
    connection.close()
    for path in ("/healthz", "/readyz"):
        connection.request("HEAD", path)
        head = connection.getresponse()
        assert (head.status, head.read()) == (200, b"")
    connection.request("GET", "/readyz")
    assert json.load(connection.getresponse())["status"] == "ok"
    connection.request("GET", "/metrics")
    page = connection.getresponse().read().decode()
    assert 'hetero_errors_total{protocol="http",reason="INVALID_HTTP"} 1' in page
    connection.close()
    process.terminate()
    code, log = process.wait()
    assert code == 0
    # Clients could fill the log with it; it is counted.
    assert "Invalid HTTP" not in log


@pytest.mark.wide
def test_a_port_in_use_is_one_line_and_status_2(launch):
    address = http_address_of(launch("--http-port=0"))
    port = address.rpartition(":")[2]
    code, log = launch(f"--http-port={port}").wait()
    assert code == 2
    assert log == (
        f"control_plane: http_port: cannot listen on {address}: it is in use; another one is "
        "--http-port, none --no-http\n"
    )


@pytest.mark.wide
def test_calls_of_more_than_may_wait_are_answered_or_told_that_they_never_fit(launch, fake_plane):
    fake_plane.features = (*fake_plane.features, "embeddings")
    process = launch("--http-port=0", "--max-num-seqs=1", "--max-queued-requests=1")
    connection = HTTPConnection(http_address_of(process), timeout=30)

    def post(path: str, **body: object) -> tuple[int, dict]:
        text = json.dumps({"model": "fake", **body})
        connection.request("POST", path, text, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, json.load(response)

    status, answer = post("/v1/embeddings", input=["a", "b", "c"])
    assert (status, len(answer["data"])) == (200, 3)
    status, answer = post("/v1/completions", prompt=["a", "b", "c"])
    assert (status, answer["error"]["param"]) == (400, "prompt")
    connection.close()
    process.terminate()
    assert process.wait()[0] == 0


def test_without_the_extra_it_starts_and_says_how_to_get_it(fake_plane):
    # A lifeline that ends at once ends the process in good order.
    result = run_without_the_extra(fake_plane, "--lifeline-fd=0")
    assert result.returncode == 0
    (line,) = [json.loads(line) for line in result.stderr.splitlines() if "no HTTP port" in line]
    assert line["level"] == "warning"
    assert line["reason"] == f"the HTTP port needs no_such_package, of {the_extra('http')}"


def test_without_the_extra_a_port_that_is_asked_for_is_refused(fake_plane):
    result = run_without_the_extra(fake_plane, "--http-port=0")
    assert result.returncode == 2
    assert result.stderr == (
        f"control_plane: http_port: the HTTP port needs no_such_package, of {the_extra('http')}\n"
    )


def test_fastapi_is_not_loaded_where_there_is_no_http_port():
    code = (
        "import sys, control_plane.app; "
        "sys.exit(any(name in sys.modules for name in ('fastapi', 'uvicorn', 'pydantic')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_plaintext_for_other_machines_must_be_meant():
    with pytest.raises(ConfigError, match=r"http_host: 0\.0\.0\.0:3000"):
        ControlPlaneConfig(compute="unix:a", http_host="0.0.0.0")
    ControlPlaneConfig(compute="unix:a", http_host="0.0.0.0", allow_insecure=True)
    assert (
        ControlPlaneConfig(compute="unix:a", http_host="0.0.0.0", http=False).http_address is None
    )
    assert str(ControlPlaneConfig(compute="unix:a").http_address) == "127.0.0.1:3000"
