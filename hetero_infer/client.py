"""A small synchronous client of `hetero.inference.v1`, as the command line uses it."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, fields, replace
from types import TracebackType
from typing import Final

import grpc

from control_plane.core.generation_params import GenerationParams
from hetero_infer.wire_errors import ServerLostError, error_from_rpc
from planes.address import Address
from planes.errors import ValidationError
from planes.transport import MAX_CLIENT_MESSAGE_BYTES
from protos.hetero.inference.v1 import inference_pb2, inference_pb2_grpc

ON_THE_WIRE: Final = (
    "max_tokens",
    "temperature",
    "top_p",
    "seed",
    "ignore_eos",
    "n",
    "beam_width",
    "length_penalty",
    "early_stopping",
)
"""The parameters that the public service takes; others are refused, not forgotten."""
PLAIN: Final = GenerationParams()


@dataclass(frozen=True, slots=True)
class Started:
    """The request is admitted. `params` are the effective ones, the seed included."""

    request_id: str
    model: str
    prompt_tokens: int
    params: GenerationParams


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of sample `index` (whole characters only, maybe none), and its new tokens."""

    text: str
    token_ids: tuple[int, ...]
    index: int = 0


@dataclass(frozen=True, slots=True)
class SampleFinished:
    """The end of one sample of several. `finish_reason`: stop, length, cancelled or error."""

    index: int
    finish_reason: str
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of the request. Times in seconds from receipt.

    `finish_reason`: of the first sample. `completion_tokens`: of all. `cached_tokens`: tokens of
    the prompt that had been computed before.
    """

    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    queue_s: float
    time_to_first_token_s: float
    total_s: float
    cached_tokens: int = 0


Event = Started | Delta | SampleFinished | Finished


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the server runs."""

    model: str
    dtype: str
    weight_format: str
    executor: str
    device: str
    max_model_len: int


class InferenceClient:
    """One channel to a control plane. Every method raises an `EngineError`, never a gRPC one."""

    def __init__(self, address: Address) -> None:
        self._channel = grpc.insecure_channel(
            address.target,
            options=[
                ("grpc.max_send_message_length", MAX_CLIENT_MESSAGE_BYTES),
                ("grpc.max_receive_message_length", MAX_CLIENT_MESSAGE_BYTES),
            ],
        )
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    def model_info(self, timeout_s: float = 10.0) -> ModelInfo:
        """Ask what is loaded."""
        try:
            info = self._stub.GetModelInfo(inference_pb2.GetModelInfoRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None
        return ModelInfo(
            model=info.model,
            dtype=info.dtype,
            weight_format=info.weight_format,
            executor=info.executor,
            device=info.device,
            max_model_len=info.max_model_len,
        )

    def generate_stream(
        self,
        prompt: str,
        params: GenerationParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Generator[Event, None, None]:
        """Generate text piece by piece: one Started, any number of Delta, one Finished.

        With several samples, a SampleFinished after the last Delta of each. Closing the iterator
        early aborts the request.
        """
        request = inference_pb2.GenerateRequest(
            text=prompt,
            sampling=_params_to_proto(params),
            priority=priority,
            cache_salt=cache_salt,
        )
        call = self._stub.GenerateStream(request)
        is_finished = False
        try:
            for response in call:
                event = _event_from_proto(response)
                is_finished = isinstance(event, Finished)
                yield event
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None
        finally:
            call.cancel()  # type: ignore[no-untyped-call] # nothing happens if it has ended
        if not is_finished:
            raise ServerLostError("the server closed the stream before the end of the text")

    def close(self) -> None:
        """Close the channel; calls under way are cancelled."""
        self._channel.close()

    def __enter__(self) -> InferenceClient:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _params_to_proto(params: GenerationParams) -> inference_pb2.SamplingParams:
    for item in fields(GenerationParams):
        if item.name not in ON_THE_WIRE and getattr(params, item.name) != getattr(PLAIN, item.name):
            raise ValidationError(
                f"{item.name} is not part of hetero.inference.v1, got "
                f"{getattr(params, item.name)!r}",
                field=item.name,
            )
    values = {name: getattr(params, name) for name in ON_THE_WIRE}
    return inference_pb2.SamplingParams(**values)


def _params_from_proto(sampling: inference_pb2.SamplingParams) -> GenerationParams:
    given = {descriptor.name: value for descriptor, value in sampling.ListFields()}
    return replace(PLAIN, **{name: given[name] for name in ON_THE_WIRE if name in given})


def _event_from_proto(response: inference_pb2.GenerateStreamResponse) -> Event:
    kind = response.WhichOneof("event")
    if kind == "started":
        started = response.started
        return Started(
            request_id=started.request_id,
            model=started.model,
            prompt_tokens=started.prompt_tokens,
            params=_params_from_proto(started.sampling),
        )
    if kind == "delta":
        delta = response.delta
        return Delta(text=delta.text, token_ids=tuple(delta.token_ids), index=delta.index)
    if kind == "sample_finished":
        ended = response.sample_finished
        reason = _finish_reason(ended.finish_reason)
        return SampleFinished(ended.index, reason, ended.completion_tokens)
    if kind == "finished":
        finished = response.finished
        return Finished(
            finish_reason=_finish_reason(finished.finish_reason),
            prompt_tokens=finished.usage.prompt_tokens,
            completion_tokens=finished.usage.completion_tokens,
            queue_s=finished.timings.queue_s,
            time_to_first_token_s=finished.timings.time_to_first_token_s,
            total_s=finished.timings.total_s,
            cached_tokens=finished.usage.cached_tokens,
        )
    raise ServerLostError(
        "the server sent an event this client does not know; their versions differ"
    )


def _finish_reason(reason: inference_pb2.FinishReason.ValueType) -> str:
    return inference_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()
