# ruff: noqa: N802 - the methods have the names of the proto
"""`hetero.inference.v1.ModelService`."""

from __future__ import annotations

from typing import Any

import grpc.aio

from control_plane.api.convert_numbers import model_info_to_proto
from control_plane.api.engine_access import EngineAccess
from protos.hetero.inference.v1 import inference_pb2, inference_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]


class ModelServicer(inference_pb2_grpc.ModelServiceServicer):
    """Says which model is loaded, and with which adapters."""

    def __init__(self, access: EngineAccess) -> None:
        self._access = access

    async def ListModels(
        self,
        request: inference_pb2.ListModelsRequest,  # noqa: ARG002 - gRPC's signature
        context: _Context,  # noqa: ARG002
    ) -> inference_pb2.ListModelsResponse:
        """Say what is loaded: one model, then its adapters."""
        names = self._access.require().plane.models
        return inference_pb2.ListModelsResponse(models=map(self._info, names))

    async def GetModelInfo(
        self,
        request: inference_pb2.GetModelInfoRequest,
        context: _Context,  # noqa: ARG002 - gRPC's signature
    ) -> inference_pb2.ModelInfo:
        """Say what is loaded, and that it is, or has, what was asked for."""
        return self._info(request.model)

    def _info(self, model: str) -> inference_pb2.ModelInfo:
        engine = self._access.require(model)
        return model_info_to_proto(
            engine.plane,
            model=engine.model,
            max_model_len=engine.max_model_len,
            has_chat_template=engine.has_chat_template,
        )
