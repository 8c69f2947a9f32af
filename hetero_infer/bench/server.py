"""The server a benchmark talks to: both planes, started for it, or one that runs already."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import grpc

from hetero_infer.commands.target import TargetSettings
from hetero_infer.config import EngineConfig
from hetero_infer.local_planes import (
    compute_socket,
    control_socket,
    private_directory,
    start_compute_plane,
    start_control_plane,
)
from hetero_infer.plane_process import wait_all_ready
from hetero_infer.wire_errors import error_from_rpc
from planes.address import Address, parse_address
from planes.tls_files import ClientFiles
from protos.hetero.compute.v1 import compute_pb2, compute_pb2_grpc

RPC_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class StartedPlanes:
    """Both planes on this machine: where they serve, and their process ids."""

    control: Address
    compute: Address
    control_pid: int
    compute_pid: int


@contextlib.contextmanager
def started_planes(config: EngineConfig) -> Iterator[StartedPlanes]:
    """Start both planes as `serve` does, and end them. Raises EngineError."""
    config.validate()
    with private_directory() as directory:
        compute, control = compute_socket(directory), control_socket(directory)
        with (
            start_compute_plane(config, compute) as compute_plane,
            start_control_plane(config, compute, f"--listen={control}") as control_plane,
        ):
            wait_all_ready([compute_plane, control_plane])
            yield StartedPlanes(control, compute, control_plane.pid, compute_plane.pid)


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go and how, and the planes behind it if they were started for this."""

    address: Address
    token: str | None = None
    tls: ClientFiles | None = None
    planes: StartedPlanes | None = None


@contextlib.contextmanager
def server(config: EngineConfig, target: TargetSettings) -> Iterator[Server]:
    """Return where to send requests: to a target, or else to planes that live as long as this."""
    if target.target is not None:
        yield Server(parse_address(target.target, key="target"), target.token, target.tls)
        return
    with started_planes(config) as planes:
        yield Server(planes.control, planes=planes)


def describe(compute: Address) -> compute_pb2.DescribeResponse:
    """Ask a compute plane what it is. Raises EngineError."""
    with grpc.insecure_channel(compute.target) as channel:
        stub = compute_pb2_grpc.ComputeServiceStub(channel)
        try:
            return stub.Describe(compute_pb2.DescribeRequest(), timeout=RPC_TIMEOUT_S)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None
