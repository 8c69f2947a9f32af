"""The two clients are one API: what one learns of one holds for the other."""

from __future__ import annotations

import inspect
import typing
from pathlib import Path

import pytest

from hetero_infer import AsyncClient, AsyncStream, Client, Stream

ROOT = Path(__file__).parents[3]

WAITING = {"close", "texts", "answer"}
"""Methods whose docstrings may differ: who may call them, and how one waits."""


def methods_of(cls):
    return {
        name: getattr(cls, name)
        for name in dir(cls)
        if not name.startswith("_") and callable(getattr(cls, name))
    }


@pytest.mark.parametrize(("sync", "other"), [(Client, AsyncClient), (Stream, AsyncStream)])
def test_both_have_the_same_public_methods_with_the_same_arguments(sync, other):
    ours, theirs = methods_of(sync), methods_of(other)
    assert ours.keys() == theirs.keys()
    for name, method in ours.items():
        parameters = inspect.signature(method).parameters
        assert parameters == inspect.signature(theirs[name]).parameters, name
        assert method.__doc__, name
        assert name in WAITING or method.__doc__ == theirs[name].__doc__, name


def test_what_a_client_is_made_with_is_in_the_documents():
    made, made_too = (inspect.signature(client).parameters for client in (Client, AsyncClient))
    assert made == made_too
    page = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    for name in (*made, "ClientFiles"):
        assert name == "target" or f"{name}=" in page or f"`{name}`" in page or f"{name}(" in page


@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_every_argument_and_every_result_has_a_type(client):
    for name, method in methods_of(client).items():
        hints = typing.get_type_hints(method)
        parameters = set(inspect.signature(method).parameters) - {"self"}
        assert set(hints) == parameters | {"return"}, name
        assert typing.Any not in hints.values(), name
