"""What every client was answered: each is asked each case once."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

from tests.integration.clients.case_table import Client, Table
from tests.integration.clients.driver_process import Driver, DriverFault

Row: TypeAlias = tuple[str, str, str]
"""Client, case, way."""


class Clients:
    """Asks any client any case. `start`: starts a driver, when it is needed first.

    `defaults`: fields of every request that a case may give otherwise; None: left out.
    """

    def __init__(
        self, table: Table, start: Callable[[Client], Driver], defaults: dict[str, str | None]
    ) -> None:
        self._table, self._start = table, start
        self._defaults = {name: value for name, value in defaults.items() if value is not None}
        self._drivers: dict[str, Driver] = {}
        self._answers: dict[Row, dict[str, Any] | DriverFault] = {}
        self._locks: defaultdict[str, threading.RLock] = defaultdict(threading.RLock)

    def ask_ahead(self, rows: Iterable[Row]) -> None:
        """Let all clients ask their cases at the same time, each one after the other.

        A third of the time: the server computes them in one batch. Cases of which it is watched
        what becomes of the request are left out.
        """
        rows_of = defaultdict(list)
        for row in rows:
            if not self._table.case_of[row[1]].is_watched:
                rows_of[row[0]].append(row)
        if rows_of:
            with ThreadPoolExecutor(len(rows_of)) as pool:
                list(pool.map(lambda mine: [self._look_up(row) for row in mine], rows_of.values()))

    def answer(self, client: str, case_id: str, way: str) -> dict[str, Any]:
        """Return the answer to a case. Raises DriverFault."""
        found = self._look_up((client, case_id, way))
        if isinstance(found, DriverFault):
            raise found
        return found

    def text(self, client: str, case_id: str) -> str:
        """Return the first text of a case, as this client got it or, if it cannot ask, another."""
        case = self._table.case_of[case_id]
        if self._table.why_not(client, case) is not None:
            client = self._table.reference(client, case) or client
        text: str = self.answer(client, case_id, case.ways[0])["choices"][0]["text"]
        return text

    def request(self, case_id: str) -> dict[str, Any]:
        """Return what is asked, with everything in it that the table only refers to."""
        ask = self._table.case_of[case_id].ask
        return {**self._defaults, **{name: self._expand(value) for name, value in ask.items()}}

    def _look_up(self, row: Row) -> dict[str, Any] | DriverFault:
        client, case_id, way = row
        with self._locks[client]:
            if row not in self._answers:
                if client not in self._drivers:
                    self._drivers[client] = self._start(self._table.clients[client])
                way_to_ask = {"stream": True} if way == "streamed" else {}
                try:
                    request = {**self.request(case_id), **way_to_ask}
                    self._answers[row] = self._drivers[client].ask(request)
                except DriverFault as fault:
                    self._answers[row] = fault
            return self._answers[row]

    def _expand(self, value: Any) -> Any:
        if isinstance(value, dict) and "times" in value:
            return value["text"] * value["times"]
        if isinstance(value, dict) and "token_ids_of" in value:
            answer = self.answer("grpcurl", value["token_ids_of"], "whole")
            tokens = answer["choices"][0] if "choices" in answer else answer
            return tokens["token_ids"][: value.get("first")]
        return value
