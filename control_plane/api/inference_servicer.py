# ruff: noqa: N802 - the methods have the names of the proto
"""`hetero.inference.v1.InferenceService`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import grpc.aio

from control_plane.api.answer_parts import reader_of
from control_plane.api.answer_size import AnswerSize
from control_plane.api.answers import AnswerHead, events, whole_answer
from control_plane.api.conversation import (
    conversation_from_proto,
    prompt_end_from_proto,
    tool_choice_from_proto,
)
from control_plane.api.convert import options_from_proto, params_from_proto, prompt_from_proto
from control_plane.api.convert_embeddings import (
    embedding_params_from_proto,
    embeddings_to_proto,
    inputs_from_proto,
)
from control_plane.api.engine_access import EngineAccess
from control_plane.api.forced_calls import calls_in_params
from control_plane.api.interceptors import current_request_id
from control_plane.engine.frontend import EngineFrontend, Generation
from control_plane.engine.send_patience import send_patience
from control_plane.engine.streams import SEND_PATIENCE_S
from control_plane.text.answers.reader import AnswerReader
from control_plane.text.answers.text_form import text_form_of
from planes.errors import ValidationError
from protos.hetero.inference.v1 import inference_pb2, inference_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]
_Request = inference_pb2.GenerateRequest | inference_pb2.ChatRequest


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Generates and embeds text.

    Methods raise EngineError; `RequestInterceptor` turns it into a status. The streaming methods
    write to their context rather than yield: a cancelled coroutine is told so at its `await`,
    whereas a generator would sit at its `yield` until it is collected.
    """

    def __init__(self, access: EngineAccess) -> None:
        self._access = access

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: _Context
    ) -> inference_pb2.GenerateResponse:
        """Collect the stream into one answer."""
        return await self._answer(request, context)

    async def GenerateStream(  # type: ignore[override] # it writes, see the class
        self, request: inference_pb2.GenerateRequest, context: _Context
    ) -> None:
        """Write the events of an answer."""
        await self._stream(request, context)

    async def Chat(
        self, request: inference_pb2.ChatRequest, context: _Context
    ) -> inference_pb2.GenerateResponse:
        """Collect the stream into one answer."""
        return await self._answer(request, context)

    async def ChatStream(  # type: ignore[override] # it writes, see the class
        self, request: inference_pb2.ChatRequest, context: _Context
    ) -> None:
        """Write the events of an answer."""
        await self._stream(request, context)

    async def Resume(  # type: ignore[override] # it writes, see the class
        self, request: inference_pb2.ResumeRequest, context: _Context
    ) -> None:
        """Write the events of an answer from behind the tokens its client has."""
        kind = request.WhichOneof("request")
        if kind is None:
            raise ValidationError("generate or chat must be given", field="request")
        original: _Request = request.generate if kind == "generate" else request.chat
        await self._stream(original, context, request.received_token_ids)

    async def Embed(
        self,
        request: inference_pb2.EmbedRequest,
        context: _Context,  # noqa: ARG002 - its end is that of this task
    ) -> inference_pb2.EmbedResponse:
        """Embed all texts of a call."""
        engine = self._access.require(request.model)
        request_id = current_request_id()
        found = await engine.embed(
            inputs_from_proto(request),
            embedding_params_from_proto(request),
            options_from_proto(request, name=request_id),
        )
        return embeddings_to_proto(found, request_id=request_id, model=engine.model)

    async def _answer(
        self,
        request: _Request,
        context: _Context,  # noqa: ARG002 - told apart from a stream by what it returns
    ) -> inference_pb2.GenerateResponse:
        engine = self._access.require(request.model)
        submitted, read_as = await _submit(engine, request, ())
        async with submitted as generation:
            num_samples = generation.params.n
            AnswerSize(engine.max_model_len, num_samples=num_samples).add(generation)
            reader = read_as(generation)
            return await whole_answer(generation, _head(engine), reader)

    async def _stream(
        self, request: _Request, context: _Context, received: Sequence[int] = ()
    ) -> None:
        engine = self._access.require(request.model)
        submitted, read_as = await _submit(engine, request, received)
        async with submitted as generation, send_patience(SEND_PATIENCE_S) as patience:
            reader = read_as(generation)
            async for event in events(generation, _head(engine), reader):
                patience.begin()
                await context.write(event)
                patience.end()


async def _submit(
    engine: EngineFrontend, request: _Request, received: Sequence[int]
) -> tuple[Generation, Callable[[Generation], AnswerReader | None]]:
    """Make a prompt of the request and hand it to the engine; what makes the answer's reader."""
    params = params_from_proto(request.sampling)
    options = options_from_proto(request, name=current_request_id())
    if isinstance(request, inference_pb2.GenerateRequest):
        prompt = prompt_from_proto(request)
        return await engine.submit(prompt, params, options, continued=received), lambda _: None
    params.validate()  # before the template runs
    options.validate()
    choice = tool_choice_from_proto(request)
    conversation = await conversation_from_proto(request)
    chat = await engine.apply_chat_template(*conversation, **prompt_end_from_proto(request))
    params = await calls_in_params(
        params, choice, conversation.tools or (), chat.answer, "tools[{}].parameters_json"
    )
    form = text_form_of(chat.answer, params, is_single=choice.is_single)
    token_ids = chat.ids_for(params)
    generation = await engine.submit(token_ids, params, options, continued=received, form=form)
    max_calls = 1 if choice.is_single else None
    return generation, partial(
        reader_of, tokenizer=engine.tokenizer, answer_format=chat.answer, max_calls=max_calls
    )


def _head(engine: EngineFrontend) -> AnswerHead:
    return AnswerHead(current_request_id(), engine.model)
