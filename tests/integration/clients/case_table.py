"""The table: which client is asked what, in which way, and which client has the same answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
GENERATING = ("complete", "chat", "respond")

REFERENCES = ("curl", "grpcurl", "openai-python")
"""A client's answer must be that of the first of these, other than itself, that can ask too."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row. `ask`: the request in neutral names; `see`: what must be seen of its answer.

    `slow`: the ways that only `make test-slow` goes.
    """

    id: str
    ask: dict[str, Any]
    see: dict[str, Any]
    ways: tuple[str, ...]
    slow: tuple[str, ...]
    cannot: dict[str, str]

    @property
    def is_watched(self) -> bool:
        """Whether it is asked of the server, too, what became of the request."""
        return "request_is" in self.see


@dataclass(frozen=True, slots=True)
class Client:
    """A client, and what its driver is. `does_not_tell`: what answers on its surface lack."""

    name: str
    surface: str
    command: tuple[str, ...]
    does_not_tell: dict[str, str]
    cannot: dict[str, str]


class Table:
    """Everything that cases.json says."""

    def __init__(self) -> None:
        table = json.loads((HERE / "cases.json").read_text(encoding="utf-8"))
        self.clients = {
            name: _client(name, entry, table["surfaces"])
            for name, entry in table["clients"].items()
        }
        self.cases = [_case(entry, table["defaults"]) for entry in table["cases"]]
        self.case_of = {case.id: case for case in self.cases}

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Yield client, case and way of everything that is asked, one client after the other."""
        for client in self.clients:
            for case in self.cases:
                if self.why_not(client, case) is None:
                    for way in case.ways:
                        yield client, case.id, way

    def why_not(self, client: str, case: Case) -> str | None:
        """Return why a client cannot ask a case; None: it can."""
        entry = self.clients[client]
        asked = {case.ask["op"], *case.ask}
        if "token" in case.ask and case.ask["token"] is None:
            asked.add("no_token")
        reasons = [reason for name, reason in entry.cannot.items() if name in asked]
        reasons += [why for name, why in case.cannot.items() if name in (client, entry.surface)]
        return reasons[0] if reasons else None

    def left_out(self) -> Iterator[tuple[str, str, str]]:
        """Yield for each client one case, and a way, for each reason that it cannot ask some."""
        for client in self.clients:
            tried: set[str | None] = {None}
            for case in self.cases:
                reason = self.why_not(client, case)
                if reason not in tried and not case.is_watched:
                    tried.add(reason)
                    yield client, case.id, case.ways[0]

    def reference(self, client: str, case: Case) -> str | None:
        """Return whose answer a client's must equal; None: nobody else can ask this."""
        for name in REFERENCES:
            if name != client and self.why_not(name, case) is None:
                return name
        return None


def _client(name: str, entry: dict[str, Any], surfaces: dict[str, Any]) -> Client:
    surface = surfaces[entry["surface"]]
    return Client(
        name,
        entry["surface"],
        tuple(entry["command"]),
        surface["does_not_tell"],
        {**surface["cannot"], **entry.get("cannot", {})},
    )


def _case(entry: dict[str, Any], defaults: dict[str, Any]) -> Case:
    ask = entry["ask"]
    is_generating = ask["op"] in GENERATING
    ways = ("whole", "streamed") if is_generating and "error" not in entry["see"] else ("whole",)
    return Case(
        id=entry["id"],
        ask={**defaults, **ask} if is_generating else ask,
        see=entry["see"],
        ways=tuple(entry.get("ways", ways)),
        slow=tuple(entry.get("slow", ())),
        cannot=entry.get("cannot", {}),
    )
