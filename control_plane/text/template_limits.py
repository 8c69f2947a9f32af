"""How much a chat template may compute, whatever it is given.

A template is a program: one that looks through all messages for each of them takes seconds for a
conversation that is nowhere too long, and one that repeats a text as often as a caller's variable
says takes all memory. Loops and macros are made to look at the clock; products are looked at.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final

import jinja2
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox

from planes.errors import TokenizationError

MAX_RENDERED_CHARACTERS: Final = 16 << 20
MAX_RENDER_S: Final = 2.0
"""Of the processor, for one rendering; templates of models take 0.25 for 2 MiB at worst."""

_MAX_BITS: Final = 1 << 14
"""Of a product or a power."""

_TURNS_AT_ONCE: Final = 16
_LOOKS_EVERY: Final = 4
"""So many times so many turns of loops, at most, between two looks at the clock, which cost more
than a turn."""

_CLOCK: Final = "the clock"
"""Name of the clock among a template's variables; none that a template can spell."""
_WATCHED: Final = "watched"
_NOTED: Final = "noted"


class Clock:
    """How long one rendering may still take."""

    __slots__ = ("_end", "_noted")

    def __init__(self) -> None:
        self._end = time.thread_time() + MAX_RENDER_S
        self._noted = 0

    def note_turns(self) -> None:
        """Note that something goes on. Raises TokenizationError when time is up."""
        self._noted += 1
        if self._noted == _LOOKS_EVERY:
            self._noted = 0
            if time.thread_time() > self._end:
                raise TokenizationError(
                    f"the chat template takes more than {MAX_RENDER_S:g} s for these messages",
                    field="messages",
                )


class LimitedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with limits. Templates are made by `limited`, variables by `with_clock`."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - as of the base class
        super().__init__(**options)
        self.filters[_WATCHED] = _watched
        self.filters[_NOTED] = _noted

    def call_binop(
        self,
        context: jinja2.runtime.Context,
        operator: str,
        left: Any,  # noqa: ANN401 - whatever is there
        right: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Compute a product or a power that is not too large."""
        if operator == "**":
            is_large = _bits(left) * (right if isinstance(right, int) else 1) > _MAX_BITS
        elif isinstance(left, int) and isinstance(right, int):
            is_large = _bits(left) + _bits(right) > _MAX_BITS
        else:
            is_large = _length(left) * _length(right) > MAX_RENDERED_CHARACTERS
        if is_large:
            raise TokenizationError(
                f"the chat template computes something too large ({operator}) of these messages",
                field="messages",
            )
        return super().call_binop(context, operator, left, right)

    def limited(self, tree: jinja2.nodes.Template) -> jinja2.Template:
        """Return the template of a syntax tree, which is changed."""
        for loop in tree.find_all(jinja2.nodes.For):
            loop.iter = _filtered(loop.iter, _WATCHED)
        for macro in tree.find_all(jinja2.nodes.Macro):
            note = _filtered(jinja2.nodes.Const("", lineno=macro.lineno), _NOTED)
            macro.body.insert(0, jinja2.nodes.Output([note], lineno=macro.lineno))
        tree.set_environment(self)
        return self.from_string(tree)


def with_clock(variables: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of one rendering, whose time begins now."""
    return {**variables, _CLOCK: Clock()}


def _filtered(node: jinja2.nodes.Node, name: str) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Watched:
    """What a loop goes through, with its length if it has one."""

    __slots__ = ("_clock", "_items")

    def __init__(self, items: Any, clock: Clock) -> None:  # noqa: ANN401 - whatever is there
        self._items = items
        self._clock = clock

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        items = iter(self._items)
        for item in items:
            self._clock.note_turns()
            yield item
            yield from itertools.islice(items, _TURNS_AT_ONCE - 1)


@jinja2.pass_context
def _watched(context: jinja2.runtime.Context, items: Iterable[Any]) -> _Watched:
    return _Watched(items, context.parent[_CLOCK])


@jinja2.pass_context
def _noted(context: jinja2.runtime.Context, text: str) -> str:
    context.parent[_CLOCK].note_turns()
    return text


def _bits(value: Any) -> int:  # noqa: ANN401
    return value.bit_length() if isinstance(value, int) else 1


def _length(value: Any) -> int:  # noqa: ANN401
    """Return how often a factor repeats the other, or how long it is."""
    if isinstance(value, int):
        return value
    try:
        return len(value)
    except TypeError:
        return 0
