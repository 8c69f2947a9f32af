"""Every command that takes --target shows a token over TLS where a server wants both."""

from __future__ import annotations

import io
import json

import pytest

from hetero_infer.cli import main
from hetero_infer.config import EngineConfig
from hetero_infer.local_planes import (
    compute_socket,
    private_directory,
    start_compute_plane,
    start_control_plane,
)
from hetero_infer.plane_process import wait_all_ready
from tests.certificates import Authority

BENCH = ("--prompt-tokens=4", "--output-tokens=40", "--repeat=1", "--concurrency=1")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return tmp_path_factory.mktemp("secured")


@pytest.fixture(scope="module")
def authority(files):
    return Authority(files, "ca")


@pytest.fixture(scope="module")
def tokens(files):
    """A file for the server; for its clients, one file each."""
    with pytest.MonkeyPatch.context() as patch:
        for name, flags in (("user", []), ("ops", ["--admin"])):
            printed = io.StringIO()
            patch.setattr("sys.stdout", printed)
            assert main(["token", "create", name, *flags, f"--file={files / 'tokens.json'}"]) == 0
            (files / name).write_text(printed.getvalue())
    return files / "tokens.json"


@pytest.fixture(scope="module")
def target(authority, tokens, template):
    """A deployment that wants TLS, a certificate of the client, and a token; the flags to it."""
    server, client = authority.issue("server"), authority.issue("client")
    config = EngineConfig(executor="simulated")
    listen = ("--listen=127.0.0.1:0", f"--api-tokens={tokens}", f"--chat-template={template}",
              f"--tls-cert={server.cert}", f"--tls-key={server.key}",
              f"--tls-client-ca={authority.ca}")  # fmt: skip
    with private_directory() as directory:
        compute = compute_socket(directory)
        with (
            start_compute_plane(config, compute) as below,
            start_control_plane(config, compute, *listen) as above,
        ):
            wait_all_ready([below, above])
            tls = (f"--tls-ca={authority.ca}", f"--tls-cert={client.cert}")
            yield [f"--target={above.address}", *tls, f"--tls-key={client.key}"]


def run(*argv):
    return main([str(argument) for argument in argv])


@pytest.mark.wide
def test_chat_and_complete(target, files, capsys, monkeypatch):
    flags = [
        *target,
        f"--token-file={files / 'user'}",
        "--max-tokens=4",
        "--ignore-eos",
        "--seed=1",
    ]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"hello\n")))
    assert run("chat", *flags) == 0
    assert len(capsys.readouterr().out) == 5
    (files / "prompt").write_text("hello")
    assert run("complete", *flags, files / "prompt") == 0
    assert len(json.loads(capsys.readouterr().out)["token_ids"]) == 4


@pytest.mark.parametrize(("who", "is_admin"), [("user", False), ("ops", True)])
def test_bench_throughput_and_latency(target, files, capsys, tmp_path, who, is_admin):
    flags = [*target, f"--token-file={files / who}", *BENCH]
    assert run("bench", "throughput", *flags) == 0
    latency = (*flags, "--requests=1", "--long-prompt=64", f"--json={tmp_path / 'l.json'}")
    assert run("bench", "latency", *latency) == 0
    assert "simulated" in capsys.readouterr().out
    result = json.loads((tmp_path / "l.json").read_text())
    # What only an operator's token can ask is left out with any other, and the rest is measured.
    assert ("left_out" in result["beside"]) is not is_admin


def test_the_token_may_stand_in_the_environment(target, files, capsys, monkeypatch):
    monkeypatch.setenv("HETERO_API_TOKEN", (files / "user").read_text().strip())
    assert run("bench", "throughput", *target, *BENCH) == 0
    assert "simulated" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["chat"], ["complete"], ["bench", "throughput", *BENCH]])
def test_without_its_token_it_is_refused_in_one_line(target, files, capsys, monkeypatch, command):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"hello\n")))
    prompt = [files / "prompt"] if command == ["complete"] else []
    (files / "prompt").write_text("hello")
    assert run(*command, *target, *prompt) == 1
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if "error" in line] == [said[-1]]
    assert "token" in said[-1]


@pytest.mark.parametrize("command", [["chat"], ["complete"], ["bench", "latency"]])
@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["--target=unix:/x", "--token-file=/nowhere"], "token_file: /nowhere cannot be read: No"),
        (["--target=unix:/x", "--token-file=/dev/null"], "has no token in its first line"),
        (["--token-file=/nowhere"], "token_file: the planes started here are reached over a unix"),
        (["--tls-ca=x"], "tls_ca: the planes started here are reached over a unix socket"),
        (["--target=h:1", "--tls-key=x"], "tls_cert is required with tls_key"),
    ],
)
def test_what_cannot_be_is_one_line_and_status_2(capsys, monkeypatch, command, argv, what):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"hello\n")))
    prompt = ["/dev/null"] if command == ["complete"] else []
    assert run(*command, *argv, *prompt) == 2
    assert what in capsys.readouterr().err
