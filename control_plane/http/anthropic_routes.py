"""The routes of Anthropic's Messages API: what they take, what they answer, who makes it."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from control_plane.http.anthropic_answer_schema import AnsweredMessage, MessageEvent, TokenCount
from control_plane.http.anthropic_errors import COUNT_TOKENS_PATH, MESSAGES_PATH
from control_plane.http.anthropic_messages import answer_message, count_tokens
from control_plane.http.anthropic_schema import CountRequest, MessageRequest
from control_plane.http.backend import Backend
from control_plane.http.body import json_route
from control_plane.http.document import declared_answers
from control_plane.http.reply import Reply


def anthropic_routes(backend: Backend) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["anthropic"], route_class=json_route(backend))

    @router.post(MESSAGES_PATH, **declared_answers(AnsweredMessage, MessageEvent, is_typed=True))
    async def create_message(body: MessageRequest) -> Response:
        """Go on with a conversation, as Anthropic's API spells it."""
        engine = backend.require_engine(body.model)
        return Reply(lambda connection: answer_message(engine, body, connection))

    @router.post(COUNT_TOKENS_PATH, response_model=TokenCount)
    async def count_message_tokens(body: CountRequest) -> Response:
        """Count the tokens of what a message would be made of; none is made."""
        engine = backend.require_engine(body.model)
        return JSONResponse({"input_tokens": await count_tokens(engine, body)})

    return router
