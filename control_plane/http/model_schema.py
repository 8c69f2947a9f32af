"""`/v1/models` and the state of the server on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

from pydantic import BaseModel

from control_plane.http.backend import LoadedEngine

OWNER = "hetero-paged-infer"


class Model(BaseModel):
    """The loaded model, or an adapter. `max_model_len`: prompt and answer together, in tokens.

    `root`: its name; `parent`: that of the model which an adapter changes. `type`, `display_name`
    and `created_at`, which is `created` in RFC 3339, are what Anthropic's clients read.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    type: Literal["model"]
    display_name: str
    created_at: str


class ModelList(BaseModel):
    """Everything that `model` may name: the loaded model, then its adapters.

    It is one page, however many were asked for; `has_more`, `first_id` and `last_id` say so to
    Anthropic's clients.
    """

    object: Literal["list"]
    data: list[Model]
    has_more: Literal[False]
    first_id: str
    last_id: str


class State(BaseModel):
    """Whether the server works. `state`: starting, open, away, draining or stopped."""

    status: Literal["ok", "unavailable"]
    state: str


def describe_model(engine: LoadedEngine) -> dict[str, object]:
    """Spell the loaded model, or an adapter."""
    return {
        "id": engine.model,
        "object": "model",
        "created": engine.created,
        "owned_by": OWNER,
        "root": engine.model,
        "parent": engine.base_model,
        "max_model_len": engine.frontend.max_model_len,
        "type": "model",
        "display_name": engine.model,
        "created_at": datetime.fromtimestamp(engine.created, UTC).isoformat(),
    }


def list_of_models(engines: Sequence[LoadedEngine]) -> dict[str, object]:
    """Spell a list of the loaded model and its adapters."""
    return {
        "object": "list",
        "data": [describe_model(engine) for engine in engines],
        "has_more": False,
        "first_id": engines[0].model,
        "last_id": engines[-1].model,
    }
