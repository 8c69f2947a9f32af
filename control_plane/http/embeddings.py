"""`POST /v1/embeddings`."""

from __future__ import annotations

import asyncio
import base64
import sys
from array import array

from control_plane.core.embedding_params import FIELD
from control_plane.http.backend import LoadedEngine
from control_plane.http.embedding_schema import EmbeddingsRequest
from control_plane.http.json_text import Spelled, to_json
from control_plane.http.reply import Connection
from control_plane.http.request_id import current_request_id
from planes.errors import EngineError

NAME = "input"


async def answer_embeddings(
    engine: LoadedEngine, request: EmbeddingsRequest, connection: Connection
) -> None:
    """Answer one request. Raises EngineError before anything is written."""
    inputs, is_base64 = request.inputs, request.encoding_format == "base64"
    try:
        found = await engine.frontend.embed(
            inputs, request.params, request.options(current_request_id())
        )
    except EngineError as error:
        _rename(error)
        raise
    data = []
    for index, one in enumerate(found):
        spelled = Spelled([to_json(_base64(one.values) if is_base64 else _numbers(one.values))])
        data.append({"object": "embedding", "index": index, "embedding": spelled})
        await asyncio.sleep(0)  # 4096 numbers take 2 ms
    num_tokens = sum(one.num_tokens for one in found)
    await connection.send_json(
        {
            "object": "list",
            "data": data,
            "model": engine.model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
    )


def _rename(error: EngineError) -> None:
    """Call the texts what the endpoint calls them."""
    if error.field is not None and error.field.startswith(FIELD):
        error.field = NAME + error.field.removeprefix(FIELD)
        if error.message.startswith(FIELD):
            error.message = NAME + error.message.removeprefix(FIELD)


def _base64(values: array[float]) -> str:
    """Return float32, little-endian, as OpenAI's package reads it."""
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return base64.b64encode(values).decode()


def _numbers(values: array[float]) -> list[float]:
    """Return numbers as short as they may be to be read as the same float32."""
    return [float(f"{value:.9g}") for value in values]
