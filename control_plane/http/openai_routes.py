"""The routes of OpenAI's API: what they take, what they answer, who makes the answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from control_plane.http import responses
from control_plane.http.backend import Backend, LoadedEngine
from control_plane.http.body import json_route
from control_plane.http.chat import answer_chat
from control_plane.http.chat_answer_schema import ChatChunk, ChatCompletion
from control_plane.http.chat_schema import ChatRequest
from control_plane.http.completion_schema import Completion, CompletionChunk, CompletionRequest
from control_plane.http.completions import answer_completion
from control_plane.http.document import declared_answers
from control_plane.http.embedding_schema import EmbeddingList, EmbeddingsRequest
from control_plane.http.embeddings import answer_embeddings
from control_plane.http.model_schema import Model, ModelList, describe_model, list_of_models
from control_plane.http.reply import Connection, Reply
from control_plane.http.responses_answer_schema import Response as ModelResponse
from control_plane.http.responses_answer_schema import ResponseEvent
from control_plane.http.responses_schema import ResponseRequest

BodyT = TypeVar("BodyT", CompletionRequest, ChatRequest, ResponseRequest, EmbeddingsRequest)


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
        """List the loaded model and its adapters."""
        names = backend.require_engine().frontend.plane.models
        return JSONResponse(list_of_models([backend.require_engine(name) for name in names]))

    @router.get("/models/{model:path}", response_model=Model)
    async def get_model(model: str) -> Response:
        """Describe the loaded model, or one of its adapters."""
        return JSONResponse(describe_model(backend.require_engine(model)))

    @router.post("/completions", **declared_answers(Completion, CompletionChunk))
    async def create_completion(body: CompletionRequest) -> Response:
        """Go on with a text."""
        return reply(answer_completion, body)

    @router.post("/chat/completions", **declared_answers(ChatCompletion, ChatChunk))
    async def create_chat_completion(body: ChatRequest) -> Response:
        """Go on with a conversation."""
        return reply(answer_chat, body)

    @router.post("/responses", **declared_answers(ModelResponse, ResponseEvent, is_typed=True))
    async def create_response(body: ResponseRequest) -> Response:
        """Go on with a conversation, as OpenAI's newer API spells it."""
        return reply(responses.answer_response, body)

    @router.post("/embeddings", response_model=EmbeddingList)
    async def create_embeddings(body: EmbeddingsRequest) -> Response:
        """Make an embedding of each text."""
        return reply(answer_embeddings, body)

    return router
