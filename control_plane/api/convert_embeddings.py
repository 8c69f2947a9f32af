"""Embeddings between `hetero.inference.v1` and the engine."""

from __future__ import annotations

from collections.abc import Sequence

from control_plane.core.embedding_params import FIELD, EmbeddingParams, Input, TextEmbedding
from planes.errors import ValidationError
from protos.hetero.inference.v1 import inference_pb2


def inputs_from_proto(request: inference_pb2.EmbedRequest) -> list[Input]:
    """Return the texts and lists of token ids. Raises ValidationError for one that is neither."""
    return [_input_from_proto(index, entry) for index, entry in enumerate(request.inputs)]


def _input_from_proto(index: int, entry: inference_pb2.EmbedInput) -> Input:
    kind = entry.WhichOneof("input")
    if kind is None:
        raise ValidationError(
            f"{FIELD}[{index}] must be text or token_ids", field=f"{FIELD}[{index}]"
        )
    return entry.text if kind == "text" else entry.token_ids.ids


def embedding_params_from_proto(request: inference_pb2.EmbedRequest) -> EmbeddingParams:
    """Return what is made of hidden states. It is not checked yet."""
    return EmbeddingParams(
        dimensions=request.dimensions if request.HasField("dimensions") else None,
        normalize=request.normalize if request.HasField("normalize") else True,
    )


def embeddings_to_proto(
    found: Sequence[TextEmbedding], *, request_id: str, model: str
) -> inference_pb2.EmbedResponse:
    """Return the answer."""
    return inference_pb2.EmbedResponse(
        request_id=request_id,
        model=model,
        embeddings=[
            inference_pb2.Embedding(
                values=one.values, prompt_tokens=one.num_tokens, cached_tokens=one.cached_tokens
            )
            for one in found
        ],
        usage=inference_pb2.Usage(
            prompt_tokens=sum(one.num_tokens for one in found),
            cached_tokens=sum(one.cached_tokens for one in found),
        ),
    )
