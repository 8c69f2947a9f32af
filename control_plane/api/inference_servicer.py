"""`hetero.inference.v1.InferenceService`."""

from __future__ import annotations

from typing import Any

import grpc.aio

from control_plane.api.convert import (
    check_model,
    finish_reason_to_proto,
    memory_stats_to_proto,
    metrics_to_proto,
    model_info_to_proto,
    options_from_proto,
    params_from_proto,
    params_to_proto,
    prompt_from_proto,
    request_info_to_proto,
    states_to_proto,
    timings_to_proto,
    usage_to_proto,
)
from control_plane.api.interceptors import current_request_id
from control_plane.engine.frontend import EngineFrontend, Generation
from control_plane.errors import ComputeUnavailableError
from protos.hetero.inference.v1 import inference_pb2, inference_pb2_grpc

SERVICE = "hetero.inference.v1.InferenceService"


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Serves one engine, once there is one; until then every method answers UNAVAILABLE.

    Methods raise EngineError; `RequestInterceptor` turns it into a status. The streaming method
    writes to its context rather than yields: a cancelled coroutine is told so at its `await`,
    whereas a generator would sit at its `yield` until it is collected.
    """

    def __init__(self) -> None:
        self._engine: EngineFrontend | None = None

    def attach(self, engine: EngineFrontend) -> None:
        """Begin to serve."""
        self._engine = engine

    def _require_engine(self) -> EngineFrontend:
        if self._engine is None:
            raise ComputeUnavailableError("the compute plane is not there yet")
        return self._engine

    async def _submit(self, request: inference_pb2.GenerateRequest) -> Generation:
        engine = self._require_engine()
        check_model(request, engine.plane.model)
        return await engine.submit(
            prompt_from_proto(request),
            params_from_proto(request.sampling),
            options_from_proto(request, name=current_request_id()),
        )

    async def Generate(  # noqa: N802 - the proto's name
        self,
        request: inference_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[Any, Any],  # noqa: ARG002 - gRPC's signature
    ) -> inference_pb2.GenerateResponse:
        """Collect the stream into one answer."""
        model = self._require_engine().plane.model
        async with await self._submit(request) as generation:
            num_samples = generation.params.n
            texts: list[list[str]] = [[] for _ in range(num_samples)]
            samples = [inference_pb2.Sample(index=index) for index in range(num_samples)]
            await generation.admitted()
            while True:
                delta = await generation.next_delta()
                texts[delta.sample_index].append(delta.text)
                sample = samples[delta.sample_index]
                sample.token_ids.extend(delta.token_ids)
                if delta.finish_reason is not None:
                    sample.finish_reason = finish_reason_to_proto(delta.finish_reason)
                if delta.end is not None:
                    break
            for sample, pieces in zip(samples, texts, strict=True):
                sample.text = "".join(pieces)
            return inference_pb2.GenerateResponse(
                request_id=current_request_id(),
                model=model,
                text=samples[0].text,
                token_ids=samples[0].token_ids,
                finish_reason=finish_reason_to_proto(delta.end.finish_reason),
                usage=usage_to_proto(generation, delta.end),
                timings=timings_to_proto(delta.end.timings),
                sampling=params_to_proto(generation.params),
                samples=samples if num_samples > 1 else (),
                states=states_to_proto(delta.end.history, arrival_time=generation.arrival_time),
            )

    async def GenerateStream(  # type: ignore[override] # noqa: N802 - it writes, see the class
        self,
        request: inference_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Write `started`, the deltas, the ends of samples if there are several, and `finished`."""
        model = self._require_engine().plane.model
        async with await self._submit(request) as generation:
            await generation.admitted()
            started = inference_pb2.Started(
                request_id=current_request_id(),
                model=model,
                prompt_tokens=generation.num_prompt_tokens,
                sampling=params_to_proto(generation.params),
            )
            await context.write(inference_pb2.GenerateStreamResponse(started=started))
            num_samples = generation.params.n
            while True:
                piece = await generation.next_delta()
                index = piece.sample_index
                if piece.token_ids or piece.text:
                    delta = inference_pb2.Delta(
                        text=piece.text, token_ids=piece.token_ids, offset=piece.offset, index=index
                    )
                    await context.write(inference_pb2.GenerateStreamResponse(delta=delta))
                if piece.finish_reason is not None and num_samples > 1:
                    ended = inference_pb2.SampleFinished(
                        index=index,
                        finish_reason=finish_reason_to_proto(piece.finish_reason),
                        completion_tokens=piece.offset + len(piece.token_ids),
                    )
                    await context.write(inference_pb2.GenerateStreamResponse(sample_finished=ended))
                if piece.end is not None:
                    break
            finished = inference_pb2.Finished(
                finish_reason=finish_reason_to_proto(piece.end.finish_reason),
                usage=usage_to_proto(generation, piece.end),
                timings=timings_to_proto(piece.end.timings),
                states=states_to_proto(piece.end.history, arrival_time=generation.arrival_time),
            )
            await context.write(inference_pb2.GenerateStreamResponse(finished=finished))

    async def GetModelInfo(  # noqa: N802 - the proto's name
        self,
        request: inference_pb2.GetModelInfoRequest,  # noqa: ARG002 - gRPC's signature
        context: grpc.aio.ServicerContext[Any, Any],  # noqa: ARG002
    ) -> inference_pb2.GetModelInfoResponse:
        """Say what is loaded."""
        engine = self._require_engine()
        return model_info_to_proto(engine.plane, max_model_len=engine.max_model_len)

    async def GetMemoryStats(  # noqa: N802 - the proto's name
        self,
        request: inference_pb2.GetMemoryStatsRequest,  # noqa: ARG002 - gRPC's signature
        context: grpc.aio.ServicerContext[Any, Any],  # noqa: ARG002
    ) -> inference_pb2.GetMemoryStatsResponse:
        """Say how the block pool is used."""
        engine = self._require_engine()
        return memory_stats_to_proto(engine.memory_stats, block_size=engine.plane.block_size)

    async def GetMetrics(  # noqa: N802 - the proto's name
        self,
        request: inference_pb2.GetMetricsRequest,  # noqa: ARG002 - gRPC's signature
        context: grpc.aio.ServicerContext[Any, Any],  # noqa: ARG002
    ) -> inference_pb2.GetMetricsResponse:
        """Give the engine's counts."""
        return metrics_to_proto(self._require_engine().metrics)

    async def ListRequests(  # noqa: N802 - the proto's name
        self,
        request: inference_pb2.ListRequestsRequest,
        context: grpc.aio.ServicerContext[Any, Any],  # noqa: ARG002 - gRPC's signature
    ) -> inference_pb2.ListRequestsResponse:
        """Say what the requests are doing."""
        infos = await self._require_engine().list_requests(include_ended=request.include_ended)
        return inference_pb2.ListRequestsResponse(requests=map(request_info_to_proto, infos))
