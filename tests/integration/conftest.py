"""The real deployments of the black-box tests: both planes as processes, the embedded model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from hetero_infer.config import EngineConfig
from hetero_infer.local_planes import (
    compute_socket,
    private_directory,
    start_compute_plane,
    start_control_plane,
)
from hetero_infer.plane_process import wait_all_ready
from planes.address import Address
from tests.devices import Target


@dataclass(frozen=True, slots=True)
class Deployment:
    """Where clients find the control plane (TCP, `http` too) and tools the compute plane (unix)."""

    control: Address
    compute: Address
    http: Address


@contextmanager
def _deployed(target: Target, dtype: str) -> Iterator[Deployment]:
    config = target.config(dtype=dtype)
    with private_directory() as directory:
        compute = compute_socket(directory)
        with (
            start_compute_plane(config, compute) as compute_plane,
            start_control_plane(
                config, compute, "--grpc-port=0", "--http", "--http-port=0"
            ) as control_plane,
        ):
            wait_all_ready([compute_plane, control_plane])
            assert control_plane.address is not None
            assert control_plane.http_address is not None
            yield Deployment(
                control=control_plane.address, compute=compute, http=control_plane.http_address
            )


@pytest.fixture(scope="session")
def deployment(target: Target) -> Iterator[Deployment]:
    """The one for everything that does not depend on what the model says.

    Where bits of a sequence are not promised, near ties are rarer in float32.
    """
    with _deployed(target, "auto" if target.keeps_bits else "float32") as made:
        yield made


@pytest.fixture(scope="session")
def exact_deployment(target: Target) -> Iterator[Deployment]:
    """The one that says what transformers has said in float32; twice as slow.

    A file that uses it is named in `tests/conftest.py`, beside the others: one worker runs them.
    """
    with _deployed(target, "float32") as made:
        yield made


@pytest.fixture(scope="session")
def simulated_plane() -> Iterator[Path]:
    """The socket of a compute plane without a model, whose session is free to take."""
    config = EngineConfig(executor="simulated")
    with private_directory() as directory:
        address = compute_socket(directory)
        with start_compute_plane(config, address) as plane:
            plane.wait_ready()
            yield Path(directory / "compute.sock")
