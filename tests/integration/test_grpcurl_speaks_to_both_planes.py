"""A generic gRPC tool, knowing nothing but reflection, looks into both planes.

What it is answered when it generates text stands in the table of `clients`, for all clients.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.devices import Target
from tests.integration.conftest import Deployment

pytestmark = pytest.mark.model

GRPCURL = shutil.which("grpcurl", path=str(Path(sys.executable).parent))
CONTROL = "hetero.inference.v1.InferenceService"
MODELS = "hetero.inference.v1.ModelService"
ADMIN = "hetero.inference.v1.AdminService"
COMPUTE = "hetero.compute.v1.ComputeService"


@pytest.fixture(autouse=True)
def tool(target: Target) -> None:
    """Without the tool fail; on a machine that only has the GPU, skip: the CPU showed it."""
    if GRPCURL is None and target.device != "cpu":
        pytest.skip("grpcurl is not installed beside this Python")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert GRPCURL is not None
    return subprocess.run(
        [GRPCURL, "-plaintext", "-max-time", "60", *arguments],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def call(request: object, *arguments: str) -> list[dict[str, Any]]:
    """Call a method; the messages it answered with."""
    done = run("-d", json.dumps(request), *arguments)
    assert done.returncode == 0, done.stderr
    decoder, rest, messages = json.JSONDecoder(), done.stdout.lstrip(), []
    while rest:
        message, end = decoder.raw_decode(rest)
        messages.append(message)
        rest = rest[end:].lstrip()
    return messages


@pytest.fixture
def control(deployment: Deployment) -> str:
    return deployment.control.target


@pytest.fixture
def compute(deployment: Deployment) -> tuple[str, str]:
    return ("-unix", str(deployment.compute.path))


def test_the_control_plane_lists_and_describes_its_services(control: str) -> None:
    assert {CONTROL, "grpc.health.v1.Health"} <= set(run(control, "list").stdout.split())
    described = run(control, "describe", CONTROL).stdout
    assert "rpc GenerateStream" in described


def test_the_compute_plane_lists_and_describes_its_services(compute: tuple[str, str]) -> None:
    assert {COMPUTE, "grpc.health.v1.Health"} <= set(run(*compute, "list").stdout.split())
    assert "rpc ExecuteOne" in run(*compute, "describe", COMPUTE).stdout


def test_both_planes_are_serving(control: str, compute: tuple[str, str]) -> None:
    for where, service in (((control,), CONTROL), (compute, COMPUTE)):
        for name in ("", service):
            [health] = call({"service": name}, *where, "grpc.health.v1.Health/Check")
            assert health == {"status": "SERVING"}


def test_the_model_memory_and_metrics_can_be_asked_for(control: str) -> None:
    [info] = call({}, control, f"{MODELS}/GetModelInfo")
    assert info["vocab_size"] == 49152
    [memory] = call({}, control, f"{ADMIN}/GetMemoryStats")
    assert memory["total_blocks"] == 1024
    [metrics] = call({}, control, f"{ADMIN}/GetMetrics")
    assert int(metrics.get("failed_requests", 0)) == 0


def test_a_second_controller_is_refused_while_the_first_one_lives(
    compute: tuple[str, str],
) -> None:
    done = run("-d", '{"protocol_version": 1}', *compute, f"{COMPUTE}/Open")
    assert "FailedPrecondition" in done.stderr


@pytest.mark.wide
def test_one_batch_can_be_run_by_hand(simulated_plane: Path) -> None:
    where = ("-unix", str(simulated_plane))
    [session] = call({"protocol_version": 1, "controller": "by hand"}, *where, f"{COMPUTE}/Open")
    sampling = {"temperature": 0, "top_p": 1}
    start = {"slot": 0, "token_ids": [72, 105], "num_prompt_tokens": 2, "block_ids": [3]}
    batch = {
        "session": session["session"],
        "epoch": session["epoch"],
        "step_id": 1,
        "starts": [{**start, "sampling": sampling}],
        "slots": [0],
        "query_lens": [2],
        "positions": [0],
        "sampled_rows": [0],
    }
    [output] = call(batch, *where, f"{COMPUTE}/ExecuteOne")
    assert len(output["sampled_token_ids"]) == 1
    done = run("-d", json.dumps({**batch, "step_id": 2, "query_lens": [0]}), *where,
               f"{COMPUTE}/ExecuteOne")  # fmt: skip
    assert "InvalidArgument" in done.stderr
    assert "query_lens" in done.stderr
