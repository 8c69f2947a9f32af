# ruff: noqa: N802 - the methods have the names of the proto
"""`hetero.inference.v1.AdminService`."""

from __future__ import annotations

from typing import Any

import grpc.aio

from control_plane.api.convert_numbers import (
    memory_stats_to_proto,
    metrics_to_proto,
    request_info_to_proto,
)
from control_plane.api.engine_access import EngineAccess
from planes.errors import ValidationError
from protos.hetero.inference.v1 import inference_pb2, inference_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]


class AdminServicer(inference_pb2_grpc.AdminServiceServicer):
    """Numbers for operators, and a hand on the server."""

    def __init__(self, access: EngineAccess) -> None:
        self._access = access

    async def GetMemoryStats(
        self,
        request: inference_pb2.GetMemoryStatsRequest,  # noqa: ARG002 - gRPC's signature
        context: _Context,  # noqa: ARG002
    ) -> inference_pb2.GetMemoryStatsResponse:
        """Say how the block pool is used."""
        engine = self._access.require()
        return memory_stats_to_proto(engine.memory_stats, block_size=engine.plane.block_size)

    async def GetMetrics(
        self,
        request: inference_pb2.GetMetricsRequest,  # noqa: ARG002 - gRPC's signature
        context: _Context,  # noqa: ARG002
    ) -> inference_pb2.GetMetricsResponse:
        """Give the engine's counts."""
        return metrics_to_proto(self._access.require().metrics)

    async def ListRequests(
        self,
        request: inference_pb2.ListRequestsRequest,
        context: _Context,  # noqa: ARG002 - gRPC's signature
    ) -> inference_pb2.ListRequestsResponse:
        """Say what the requests are doing."""
        engine = self._access.require()
        infos = await engine.list_requests(include_ended=request.include_ended)
        names = engine.plane.name_of
        return inference_pb2.ListRequestsResponse(
            requests=[request_info_to_proto(info, names(info.adapter)) for info in infos]
        )

    async def Abort(
        self,
        request: inference_pb2.AbortRequest,
        context: _Context,  # noqa: ARG002 - gRPC's signature
    ) -> inference_pb2.AbortResponse:
        """End a request."""
        if not request.request_id:
            raise ValidationError("request_id must not be empty", field="request_id")
        self._access.require().abort(request.request_id)
        return inference_pb2.AbortResponse()

    async def Drain(
        self,
        request: inference_pb2.DrainRequest,  # noqa: ARG002 - gRPC's signature
        context: _Context,  # noqa: ARG002
    ) -> inference_pb2.DrainResponse:
        """Take no new requests from now on."""
        engine = self._access.require()
        engine.drain()
        num_requests = len(await engine.list_requests())
        return inference_pb2.DrainResponse(num_requests=num_requests)

    async def FlushPrefixCache(
        self,
        request: inference_pb2.FlushPrefixCacheRequest,  # noqa: ARG002 - gRPC's signature
        context: _Context,  # noqa: ARG002
    ) -> inference_pb2.FlushPrefixCacheResponse:
        """Forget what earlier requests left."""
        num_blocks = await self._access.require().flush_prefix_cache()
        return inference_pb2.FlushPrefixCacheResponse(num_blocks=num_blocks)
