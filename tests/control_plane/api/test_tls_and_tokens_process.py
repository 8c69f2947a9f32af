"""Both planes as processes, TLS on every port, mutual between the planes, tokens for clients."""

from __future__ import annotations

import os
import re
import signal
import ssl
import subprocess
import sys
from pathlib import Path

import grpc
import httpx
import pytest

from control_plane.access.limits import Limits
from control_plane.access.token_file import add_token
from control_plane.engine.compute_client import ComputeClient
from control_plane.errors import LinkError, TokenMissingError, TokenUnknownError
from hetero_infer.channel import Route
from hetero_infer.wire_errors import ServerLostError, error_from_rpc
from planes.address import parse_address
from planes.tls import ClientTls
from planes.tls_files import ClientFiles
from protos.hetero.inference.v1 import inference_pb2 as pb
from protos.hetero.inference.v1 import inference_pb2_grpc
from tests.certificates import Authority
from tests.control_plane.api.conftest import Process

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"), "authority")


@pytest.fixture(scope="module")
def compute(authority):
    """A compute plane that asks for certificates; its address."""
    identity = authority.issue("compute")
    ready, write = os.pipe()
    process = subprocess.Popen(
        [
            sys.executable, "-m", "compute_plane", "--listen=127.0.0.1:0", "--executor=simulated",
            f"--tls-cert={identity.cert}", f"--tls-key={identity.key}",
            f"--tls-client-ca={authority.ca}", f"--ready-fd={write}",
        ],
        pass_fds=[write],
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
    )  # fmt: skip
    os.close(write)
    yield os.read(ready, 4096).decode().removeprefix("READY ").strip()
    os.close(ready)
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def token(tmp_path_factory):
    """The file of tokens, and a token of it."""
    file = tmp_path_factory.mktemp("tokens") / "tokens.json"
    return file, add_token(file, "alice", Limits(), admin=False, shares_cache=False)


@pytest.fixture(scope="module")
def served(authority, compute, token):
    own, client = authority.issue("control"), authority.issue("controller")
    process = Process(
        f"--compute={compute}", f"--compute-tls-ca={authority.ca}",
        f"--compute-tls-cert={client.cert}", f"--compute-tls-key={client.key}",
        "--grpc-port=0", "--http-port=0", "--log-format=json",
        f"--tls-cert={own.cert}", f"--tls-key={own.key}", f"--api-tokens={token[0]}",
    )  # fmt: skip
    # One address a port: gRPC, HTTP.
    process.grpc, process.http = process.ready().split("\t")
    yield process
    process.close()


def answer(address, **how) -> str:
    """The text of an answer, as a client of ours asks for it."""
    route = Route(parse_address(address), **how)
    request = pb.GenerateRequest(text="hello", sampling=pb.SamplingParams(max_tokens=3, seed=0))
    with route.open() as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        try:
            return stub.Generate(request, metadata=route.metadata, timeout=60).text
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None


def test_a_client_with_the_authority_and_a_token_gets_its_answer(served, authority, token):
    tls = ClientFiles(authority.ca)
    assert answer(served.grpc, token=token[1], tls=tls)
    with pytest.raises(TokenMissingError):
        answer(served.grpc, tls=tls)
    with pytest.raises(TokenUnknownError):
        answer(served.grpc, token="wrong", tls=tls)
    with pytest.raises(ServerLostError):
        answer(served.grpc, token=token[1])


def test_https_serves_the_same(served, authority, token):
    address = served.http
    context = ssl.create_default_context(cafile=authority.ca)
    with httpx.Client(base_url=f"https://{address}", verify=context, timeout=60) as client:
        assert client.get("/readyz").status_code == 200
        assert client.get("/v1/models").status_code == 401
        client.headers["Authorization"] = f"Bearer {token[1]}"
        model = client.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": "hello", "max_tokens": 3, "seed": 0}
        completion = client.post("/v1/completions", json=body)
        assert completion.json()["usage"]["completion_tokens"] == 3
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://{address}/readyz", timeout=60)


def test_the_compute_plane_answers_only_to_certificates_of_its_authority(
    compute, authority, tmp_path
):
    friend = authority.issue("friend")
    stranger = Authority(tmp_path, "other").issue("stranger")
    for identity, is_let_in in ((friend, True), (stranger, False), (None, False)):
        files = ClientFiles(
            authority.ca,
            None if identity is None else identity.cert,
            None if identity is None else identity.key,
        )
        client = ComputeClient(parse_address(compute), controller="test", tls=ClientTls(files))
        try:
            if is_let_in:
                assert client.describe().executor == "simulated"
            else:
                with pytest.raises(LinkError):
                    client.describe()
        finally:
            client.shut_down()


def test_a_hangup_is_no_end_but_a_look_at_the_tokens(served, token):
    file, _ = token
    add_token(file, "bob", Limits(), admin=False, shares_cache=False)
    served.process.send_signal(signal.SIGHUP)
    served.wait_for_log("file of tokens read again")


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--tls-cert=/none", "--tls-key=/none"], "tls_cert: /none cannot be read"),
        (["--api-tokens=/none"], "api_tokens: /none cannot be read"),
        (["--grpc-host=0.0.0.0"], "listen: 0.0.0.0:50051 can be reached from other machines"),
    ],
)
def test_what_cannot_be_is_one_line_and_status_2(flags, what):
    process = Process("--compute=unix:/none", "--no-http", *flags)
    try:
        code, output = process.wait()
    finally:
        process.close()
    assert code == 2
    assert re.fullmatch(rf"control_plane: {re.escape(what)}.*\n", output)
