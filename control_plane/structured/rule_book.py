"""The rules and schemas of a grammar of calls, each written once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class TextForm(Protocol):
    """How a format writes texts."""

    def text_rule(self, rule: str, expression: str) -> list[str]:
        """Return the rule of a text, and of what closes it. `expression`: what the text may be."""


class Entry(NamedTuple):
    """A name and its value, as they are written."""

    expression: str
    is_required: bool

    def maybe(self, expression: str) -> str:
        """Return an expression that may miss where the entry may."""
        return expression if self.is_required else f"({expression})?"


class RuleBook:
    """Collects rules. `lines`: they; `schemas`: by the names they have there.

    `texts`: expressions of texts and the names of their rules.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.schemas: dict[str, str] = {}
        self.texts: dict[str, str] = {}
        self._names: dict[str, str] = {}  # of schemas
        self._needed: set[str] = set()
        self._num_rules = 0

    def text(self, form: TextForm, expression: str) -> str:
        """Return the name of the rule of a text."""
        name = self.texts.get(expression)
        if name is None:
            name = self.texts[expression] = f"text_{len(self.texts)}"
            self.lines += form.text_rule(name, expression)
        return name

    def json(self, schema: str) -> str:
        """Return JSON that keeps to a schema."""
        name = self._names.get(schema)
        if name is None:
            name = self._names[schema] = f"value_{len(self._names)}"
            self.schemas[name] = schema
        return f"@{name}"

    def need(self, line: str) -> None:
        """Add a rule, unless it is there."""
        if line not in self._needed:
            self._needed.add(line)
            self.lines.append(line)

    def new_name(self) -> str:
        """Return the name of a rule to be written."""
        self._num_rules += 1
        return f"rule_{self._num_rules - 1}"

    def joined(self, entries: Sequence[Entry], separator: str) -> list[str]:
        """Return entries in their order, with what stands between any two that there are."""
        if not separator:
            return [one.maybe(one.expression) for one in entries]
        first = next((at for at, one in enumerate(entries) if one.is_required), None)
        if first is not None:
            before = [one.maybe(f"{one.expression} {separator}") for one in entries[:first]]
            behind = [one.maybe(f"{separator} {one.expression}") for one in entries[first + 1 :]]
            return [*before, entries[first].expression, *behind]
        ways, rest = list[str](), ""
        for one in reversed(entries):  # each may be the first; the rules are what may follow it
            ways.append(f"{one.expression} {rest}")
            name = self.new_name()
            self.lines.append(f"{name}: ({separator} {one.expression})? {rest}")
            rest = name
        return [f"({' | '.join(reversed(ways))})?"] if ways else []
