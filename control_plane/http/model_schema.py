"""`/v1/models` and the state of the server on the wire."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from control_plane.http.backend import LoadedEngine

OWNER = "hetero-paged-infer"


class Model(BaseModel):
    """The loaded model, or an adapter. `max_model_len`: prompt and answer together, in tokens.

    `root`: its name; `parent`: that of the model which an adapter changes.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(BaseModel):
    """Everything that `model` may name: the loaded model, then its adapters."""

    object: Literal["list"]
    data: list[Model]


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
    }
