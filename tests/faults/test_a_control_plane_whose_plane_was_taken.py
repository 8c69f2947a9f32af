"""Another controller takes the compute plane: the control plane ends, and its streams go on."""

from __future__ import annotations

import grpc
import pytest

from control_plane.core.generation_params import GenerationParams
from hetero_infer.config import EngineConfig
from planes.transport import PROTOCOL_VERSION
from protos.hetero.compute.v1 import compute_pb2, compute_pb2_grpc
from tests.faults.crowd import Asked, Crowd, hear_all
from tests.faults.deployment import RPC_TIMEOUT_S, ComputePlane, Deployment, deployed
from tests.waiting import PATIENCE_S

ASKED = [
    Asked(f"prompt {i}", GenerationParams(max_tokens=600, seed=i, ignore_eos=True))
    for i in range(6)
]
EXIT_FAULT = 1


def take(plane: ComputePlane) -> None:
    """Take its session over, as a tool does that then leaves."""
    with grpc.insecure_channel(plane.address.target) as channel:
        compute_pb2_grpc.ComputeServiceStub(channel).Open(
            compute_pb2.OpenRequest(
                protocol_version=PROTOCOL_VERSION, controller="another", take_over=True
            ),
            timeout=RPC_TIMEOUT_S,
        )


def wait_until_it_has_ended(deployment: Deployment) -> int:
    """Return the exit status of the control plane."""
    control, deployment.control = deployment.control, None
    assert control is not None
    status = control.process.wait(PATIENCE_S)
    control.stop()
    return status


@pytest.fixture(scope="module")
def deployment():
    with deployed(EngineConfig(executor="simulated", log_level="info")) as made:
        yield made


@pytest.mark.wide
def test_streams_go_on_at_the_control_plane_that_comes_next(deployment):
    expected = hear_all(deployment.address, ASKED)
    with deployment.explained(), Crowd(deployment.address) as crowd:
        crowd.ask(ASKED)
        crowd.progress.wait_for(60)
        take(deployment.compute[0])
        assert wait_until_it_has_ended(deployment) == EXIT_FAULT
        deployment.start_control()
        assert crowd.answers() == expected
