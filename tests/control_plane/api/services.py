"""All services of the public API under one name, and what most tests ask of them."""

from __future__ import annotations

import socket

from protos.hetero.inference.v1 import inference_pb2 as pb
from protos.hetero.inference.v1 import inference_pb2_grpc


class Services:
    """The methods of all of them; no two have the same name."""

    def __init__(self, channel):
        for service in ("Inference", "Model", "Tokenizer", "Admin"):
            stub = getattr(inference_pb2_grpc, f"{service}ServiceStub")(channel)
            vars(self).update(vars(stub))


def generate(stub, *, timeout=60, **sampling):
    """Return the stream of a short prompt."""
    params = pb.SamplingParams(seed=0, **sampling)
    request = pb.GenerateRequest(text="hello", sampling=params)
    return stub.GenerateStream(request, timeout=timeout)


def free_port():
    """Return a port that nobody listens on at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
