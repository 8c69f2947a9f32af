"""All services of the public API under one name."""

from __future__ import annotations

from protos.hetero.inference.v1 import inference_pb2_grpc


class Services:
    """The methods of all of them; no two have the same name."""

    def __init__(self, channel):
        for service in ("Inference", "Model", "Tokenizer", "Admin"):
            stub = getattr(inference_pb2_grpc, f"{service}ServiceStub")(channel)
            vars(self).update(vars(stub))
