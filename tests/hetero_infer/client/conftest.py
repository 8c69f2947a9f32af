"""A server with the simulated executor, and one that does as it is told."""

from __future__ import annotations

from concurrent import futures

import grpc
import pytest

from hetero_infer.commands.server import own_server
from hetero_infer.config import EngineConfig
from planes.address import Address
from protos.hetero.inference.v1 import inference_pb2_grpc

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}{{ mood }}"
)


@pytest.fixture(scope="session")
def template(tmp_path_factory):
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(TEMPLATE)
    return file


@pytest.fixture(scope="session")
def server(template):
    """Both planes; their address."""
    config = EngineConfig(executor="simulated", max_queued_requests=4)
    with own_server(config, lambda _: None, f"--chat-template={template}") as server:
        yield server.address


@pytest.fixture
def serve(tmp_path):
    """Serve a servicer of a test's own; returns where."""
    servers = []

    def start(servicer) -> Address:
        address = Address(path=str(tmp_path / "s.sock"))
        server = grpc.server(futures.ThreadPoolExecutor(2))
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
        server.add_insecure_port(address.target)
        server.start()
        servers.append(server)
        return address

    yield start
    for server in servers:
        server.stop(0).wait()
