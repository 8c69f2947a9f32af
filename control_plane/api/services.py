"""The services of `hetero.inference.v1`, all of them, on one server."""

from __future__ import annotations

from typing import Final

import grpc.aio

from control_plane.api.admin_servicer import AdminServicer
from control_plane.api.engine_access import EngineAccess
from control_plane.api.inference_servicer import InferenceServicer
from control_plane.api.model_servicer import ModelServicer
from control_plane.api.tokenizer_servicer import TokenizerServicer
from protos.hetero.inference.v1 import inference_pb2, inference_pb2_grpc

SERVICES: Final = tuple(
    service.full_name for service in inference_pb2.DESCRIPTOR.services_by_name.values()
)
"""Their full names, for health, reflection and interceptors."""

ADMIN_SERVICES: Final = (inference_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name,)
"""Those that are for operators only."""


def add_services(server: grpc.aio.Server, access: EngineAccess) -> None:
    """Let the server answer for every one of them."""
    grpc_ = inference_pb2_grpc
    grpc_.add_InferenceServiceServicer_to_server(InferenceServicer(access), server)
    grpc_.add_ModelServiceServicer_to_server(ModelServicer(access), server)
    grpc_.add_TokenizerServiceServicer_to_server(TokenizerServicer(access), server)
    grpc_.add_AdminServiceServicer_to_server(AdminServicer(access), server)
