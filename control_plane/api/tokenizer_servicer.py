# ruff: noqa: N802 - the methods have the names of the proto
"""`hetero.inference.v1.TokenizerService`."""

from __future__ import annotations

from typing import Any

import grpc.aio

from control_plane.api.conversation import conversation_from_proto, prompt_end_from_proto
from control_plane.api.engine_access import EngineAccess
from protos.hetero.inference.v1 import inference_pb2, inference_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]


class TokenizerServicer(inference_pb2_grpc.TokenizerServiceServicer):
    """Turns text into tokens and back, within the bounds of a prompt."""

    def __init__(self, access: EngineAccess) -> None:
        self._access = access

    async def Tokenize(
        self,
        request: inference_pb2.TokenizeRequest,
        context: _Context,  # noqa: ARG002 - gRPC's signature
    ) -> inference_pb2.TokenizeResponse:
        """Return the tokens a prompt of this text has."""
        adds_special = not request.HasField("add_special_tokens") or request.add_special_tokens
        engine = self._access.require(request.model)
        ids = await engine.tokenize(request.text, add_special_tokens=adds_special, field="text")
        return inference_pb2.TokenizeResponse(token_ids=ids)

    async def Detokenize(
        self,
        request: inference_pb2.DetokenizeRequest,
        context: _Context,  # noqa: ARG002 - gRPC's signature
    ) -> inference_pb2.DetokenizeResponse:
        """Return the text of tokens."""
        skips = not request.HasField("skip_special_tokens") or request.skip_special_tokens
        engine = self._access.require(request.model)
        text = await engine.detokenize(request.token_ids.ids, skip_special_tokens=skips)
        return inference_pb2.DetokenizeResponse(text=text)

    async def ApplyChatTemplate(
        self,
        request: inference_pb2.ApplyChatTemplateRequest,
        context: _Context,  # noqa: ARG002 - gRPC's signature
    ) -> inference_pb2.ApplyChatTemplateResponse:
        """Return the prompt of a conversation."""
        engine = self._access.require(request.model)
        chat = await engine.apply_chat_template(
            *await conversation_from_proto(request), **prompt_end_from_proto(request)
        )
        return inference_pb2.ApplyChatTemplateResponse(text=chat.text, token_ids=chat.token_ids)
