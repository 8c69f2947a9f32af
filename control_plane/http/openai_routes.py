"""The routes of `/v1`: what they take, what they answer, who makes the answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from control_plane.http import responses
from control_plane.http.backend import Backend, LoadedEngine
from control_plane.http.body import json_route
from control_plane.http.chat import answer_chat
from control_plane.http.chat_answer_schema import ChatChunk, ChatCompletion
from control_plane.http.chat_schema import ChatRequest
from control_plane.http.completion_schema import Completion, CompletionChunk, CompletionRequest
from control_plane.http.completions import answer_completion
from control_plane.http.embedding_schema import EmbeddingList, EmbeddingsRequest
from control_plane.http.embeddings import answer_embeddings
from control_plane.http.errors import ErrorResponse
from control_plane.http.model_schema import Model, ModelList, describe_model
from control_plane.http.reply import Connection, Reply
from control_plane.http.responses_answer_schema import Response as ModelResponse
from control_plane.http.responses_answer_schema import ResponseEvent
from control_plane.http.responses_schema import ResponseRequest

BodyT = TypeVar("BodyT", CompletionRequest, ChatRequest, ResponseRequest, EmbeddingsRequest)

_REF = "#/components/schemas/"


def openai_routes(backend: Backend) -> APIRouter:
    """Return the routes."""
    router = APIRouter(prefix="/v1", tags=["openai"], route_class=json_route(backend))

    def reply(
        answer: Callable[[LoadedEngine, BodyT, Connection], Awaitable[None]], body: BodyT
    ) -> Response:
        engine = backend.require_engine(body.model)
        return Reply(lambda connection: answer(engine, body, connection))

    @router.get("/models", response_model=ModelList)
    async def list_models() -> Response:
        """List the loaded model."""
        engine = backend.require_engine()
        return JSONResponse({"object": "list", "data": [describe_model(engine)]})

    @router.get("/models/{model:path}", response_model=Model)
    async def get_model(model: str) -> Response:
        """Describe the loaded model."""
        return JSONResponse(describe_model(backend.require_engine(model)))

    @router.post("/completions", **_answers(Completion, CompletionChunk))
    async def create_completion(body: CompletionRequest) -> Response:
        """Go on with a text."""
        return reply(answer_completion, body)

    @router.post("/chat/completions", **_answers(ChatCompletion, ChatChunk))
    async def create_chat_completion(body: ChatRequest) -> Response:
        """Go on with a conversation."""
        return reply(answer_chat, body)

    @router.post("/responses", **_answers(ModelResponse, ResponseEvent))
    async def create_response(body: ResponseRequest) -> Response:
        """Go on with a conversation, as OpenAI's newer API spells it."""
        return reply(responses.answer_response, body)

    @router.post("/embeddings", response_model=EmbeddingList)
    async def create_embeddings(body: EmbeddingsRequest) -> Response:
        """Make an embedding of each text."""
        return reply(answer_embeddings, body)

    return router


def _answers(whole: type[BaseModel], event: type[BaseModel]) -> dict[str, Any]:
    """Declare an answer that is one object, or with `stream` server-sent events."""
    if event is ResponseEvent:
        said, named = _json_of(event), ["event", "data"]
    else:
        said = {"anyOf": [{"const": "[DONE]"}, _json_of(event), _json_of(ErrorResponse)]}
        named = ["data"]
    # Of each event: the document's version has no other place for it.
    fields = {"event": {"type": "string"}, "data": said}
    stream = {"schema": {"type": "object", "properties": fields, "required": named}}
    return {
        "response_model": whole,
        "responses": {HTTPStatus.OK.value: {"content": {"text/event-stream": stream}}},
    }


def _json_of(model: type[BaseModel]) -> dict[str, Any]:
    """Declare a text that is JSON."""
    schema = {"$ref": _REF + model.__name__}
    return {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}
