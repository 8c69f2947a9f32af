"""A small synchronous client of `hetero.inference.v1`, as the command line uses it."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Final

import grpc

from control_plane.core.generation_params import GenerationParams
from hetero_infer.wire_errors import ServerLostError, error_from_rpc
from planes.address import Address
from planes.errors import ValidationError
from planes.transport import MAX_CLIENT_MESSAGE_BYTES
from protos.hetero.inference.v1 import inference_pb2, inference_pb2_grpc

ON_THE_WIRE: Final = frozenset({"max_tokens", "temperature", "top_p", "seed", "ignore_eos"})
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
    """New text (whole characters only, maybe none) and the tokens that are new with it."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The end. `finish_reason`: stop, length, cancelled or error. Times in seconds from receipt."""

    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    queue_s: float
    time_to_first_token_s: float
    total_s: float


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
        self, prompt: str, params: GenerationParams
    ) -> Generator[Started | Delta | Finished, None, None]:
        """Generate text piece by piece: one Started, any number of Delta, one Finished.

        Closing the iterator early aborts the request.
        """
        call = self._stub.GenerateStream(
            inference_pb2.GenerateRequest(text=prompt, sampling=_params_to_proto(params))
        )
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
    return inference_pb2.SamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        seed=params.seed,
        ignore_eos=params.ignore_eos,
    )


def _params_from_proto(sampling: inference_pb2.SamplingParams) -> GenerationParams:
    return GenerationParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed if sampling.HasField("seed") else None,
        ignore_eos=sampling.ignore_eos,
    )


def _event_from_proto(
    response: inference_pb2.GenerateStreamResponse,
) -> Started | Delta | Finished:
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
        return Delta(text=response.delta.text, token_ids=tuple(response.delta.token_ids))
    if kind == "finished":
        finished = response.finished
        reason = inference_pb2.FinishReason.Name(finished.finish_reason)
        return Finished(
            finish_reason=reason.removeprefix("FINISH_REASON_").lower(),
            prompt_tokens=finished.usage.prompt_tokens,
            completion_tokens=finished.usage.completion_tokens,
            queue_s=finished.timings.queue_s,
            time_to_first_token_s=finished.timings.time_to_first_token_s,
            total_s=finished.timings.total_s,
        )
    raise ServerLostError(
        "the server sent an event this client does not know; their versions differ"
    )
