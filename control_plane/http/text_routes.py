"""`/tokenize`, `/detokenize` and `/tokenizer_info`."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from control_plane.http.backend import Backend, LoadedEngine
from control_plane.http.body import json_route
from control_plane.http.json_text import SpelledList
from control_plane.http.reply import Reply
from control_plane.http.text_schema import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)

TOKENS_AT_ONCE = 2048
"""That are named and spelled between two turns of others: 2 ms."""

TOKENIZE_NAMES: dict[str, str] = {}
DETOKENIZE_NAMES = {"token_ids": "tokens"}


def text_routes(backend: Backend) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["text"], route_class=json_route(backend))

    @router.post("/tokenize", response_model=TokenizeResponse)
    async def tokenize(body: TokenizeRequest) -> Response:
        """Turn a text or a conversation into the tokens the model would see."""
        engine = backend.require_engine(body.model)
        tokens = await _tokens(engine, body)
        body.forget()
        ids, names = SpelledList(), SpelledList()
        for start in range(0, len(tokens), TOKENS_AT_ONCE):
            some = tokens[start : start + TOKENS_AT_ONCE]
            ids.extend(some)
            if body.return_token_strs:
                names.extend([engine.speller.spell(token).text for token in some])
            await asyncio.sleep(0)
        answer = {
            "count": len(tokens),
            "max_model_len": engine.frontend.max_model_len,
            "tokens": ids.joined(),
            "token_strs": names.joined() if body.return_token_strs else None,
        }
        return Reply(lambda connection: connection.send_json(answer))

    @router.post("/detokenize", response_model=DetokenizeResponse)
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Turn tokens into text."""
        engine = backend.require_engine(body.model)
        text = await engine.frontend.detokenize(
            body.tokens, skip_special_tokens=body.skip_special_tokens is not False
        )
        return JSONResponse({"prompt": text})

    @router.get("/tokenizer_info", response_model=TokenizerInfo)
    async def tokenizer_info() -> Response:
        """Name the special tokens, for clients that use the two routes as their tokenizer."""
        engine = backend.require_engine()
        tokenizer = engine.frontend.tokenizer
        special = {
            "bos_token": tokenizer.bos_token_id,
            "eos_token": tokenizer.eos_token_id,
            "pad_token": tokenizer.pad_token_id,
        }
        return JSONResponse(
            {
                kind: None if token_id is None else engine.speller.spell(token_id).text
                for kind, token_id in special.items()
            }
        )

    return router


async def _tokens(engine: LoadedEngine, body: TokenizeRequest) -> list[int]:
    if body.messages is None:
        return await engine.frontend.tokenize(
            body.prompt or "", add_special_tokens=body.add_special_tokens is not False
        )
    chat = await engine.frontend.apply_chat_template(
        *body.conversation,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
    )
    return chat.token_ids
