"""How formats write a call parameter by parameter, in Lark's notation: those between marks here."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, Final

from control_plane.structured.lark import lark_regex, lark_text, without
from control_plane.text.answers.glm_reader import (
    END_OF_KEY,
    END_OF_VALUE,
    KEY,
    VALUE,
    GlmReader,
)
from control_plane.text.answers.parameter_reader import (
    MAX_PARAMETER_NAME_CHARACTERS,
    ParameterReader,
)
from control_plane.text.answers.parts_reader import PartsReader
from control_plane.text.answers.qwen3_coder_reader import (
    MiniMaxReader,
    Qwen3CoderReader,
    SeedOssReader,
)

PARAMETER_NAME: Final = re.compile(rf"[^<>\r\n]{{1,{MAX_PARAMETER_NAME_CHARACTERS}}}")

MAYBE_LINE: Final = '"\\n"?'

# A mark that closes the value may be right behind the newline in front of it, too. All in one: with
# an expression for each of the two, to see that nothing can follow took the library's fuel.
_QWEN: Final = Qwen3CoderReader.VALUE_MARKS
_END_OF_LINE: Final = f"{_QWEN.closing}\n"
_ENDS: Final = "|".join(map(re.escape, _QWEN.on_own_line or ()))
_READ_WHOLE: Final = f"& ~{lark_regex(f'(?:{re.escape(_QWEN.closing)}|(?s:.*)(?:{_ENDS}))(?s:.*)')}"


class ParameterForm(ABC):
    """How a format writes a call. Methods return expressions in Lark's notation.

    `mark`: spells a mark. `NAME`: of functions, `NOT_IN_NAMES` says it. `PARAMETER_NAME`: of
    parameters, `NOT_IN_PARAMETERS` says it. `SEPARATOR`: what stands between two parameters.
    `WORDS`: values of some kinds that are not as in JSON.
    """

    READER: ClassVar[type[PartsReader]]
    NAME: ClassVar[re.Pattern[str]]
    NOT_IN_NAMES: ClassVar[str] = "no <, > or line breaks"
    PARAMETER_NAME: ClassVar[re.Pattern[str]]
    NOT_IN_PARAMETERS: ClassVar[str] = "no <, > or line breaks"
    SEPARATOR: ClassVar[str] = ""
    WORDS: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def __init__(self, mark: Callable[[str], str] = lark_text) -> None:
        self.mark = mark

    @abstractmethod
    def call(self, name: str, parameters: Sequence[str]) -> str:
        """Return a call, from the name of its function on to where its parameters end."""

    @abstractmethod
    def json(self, name: str, value: str) -> str:
        """Return a parameter with a value that is JSON."""

    @abstractmethod
    def any_name(self, value: str) -> str:
        """Return a parameter of any name, `NAME`, with any value, as `json` or `text` have it."""

    @abstractmethod
    def name_rule(self) -> str:
        """Return the rule `NAME`."""


class MarkedForm(ParameterForm):
    """Of parameters between marks, where texts have no quotes.

    `BEFORE_NAME`: what stands between the mark that begins a call and the name, `BEFORE_CLOSING`:
    in front of the one that closes it; `BETWEEN`: between two calls; `BARE`: what may begin one in
    a text, without that mark. `IS_IN_SECTION`: all calls are between these marks.
    """

    READER: ClassVar[type[ParameterReader]]
    BEFORE_NAME: ClassVar[str] = ""
    BEFORE_CLOSING: ClassVar[str] = ""
    BETWEEN: ClassVar[str] = lark_text("\n")
    BARE: ClassVar[str | None] = None
    IS_IN_SECTION: ClassVar[bool] = False
    PARAMETER_NAME: ClassVar[re.Pattern[str]] = PARAMETER_NAME

    @abstractmethod
    def text(self, name: str, rule: str) -> str:
        """Return a parameter with a text, of which `text_rule` makes the rule."""

    @abstractmethod
    def text_rule(self, rule: str, expression: str) -> list[str]:
        """Return the rule of a text, and of what closes it. `expression`: what the text may be."""


class Qwen3CoderForm(MarkedForm):
    """As `Qwen3CoderReader` reads it, with a newline between any two marks."""

    READER = Qwen3CoderReader
    BEFORE_NAME = "\n<function="
    BEFORE_CLOSING = "\n"
    BARE: ClassVar[str | None] = "<function="
    NAME = PARAMETER_NAME

    def call(self, name: str, parameters: Sequence[str]) -> str:
        """Return a call up to `</function>`."""
        return " ".join((lark_text(f"{name}>\n"), *parameters, '"</function>"'))

    def text(self, name: str, rule: str) -> str:
        """Return a text on lines of its own."""
        return f"{lark_text(f'<parameter={name}>')} {rule}"

    def any_name(self, value: str) -> str:
        """Return the same with any name."""
        return f'"<parameter=" NAME {value}'

    def json(self, name: str, value: str) -> str:
        """Return JSON on lines of its own."""
        opening, closing = f"<parameter={name}>\n", "\n</parameter>\n"
        return f"{lark_text(opening)} {value} {lark_text(closing)}"

    def text_rule(self, rule: str, expression: str) -> list[str]:
        """Return a text from the newline in front of it to that behind its mark."""
        whole = f'"\\n" (({expression}) {_READ_WHOLE}) "\\n</parameter>\\n"'
        return [f"{rule}[lazy]: {rule.upper()}", f"{rule.upper()}: {whole}"]

    def name_rule(self) -> str:
        """Return a name and what closes it."""
        return f"NAME: {lark_regex(f'{PARAMETER_NAME.pattern}>')}"


class SeedOssForm(Qwen3CoderForm):
    """As `SeedOssReader` reads it: values begin and end on the lines of their marks."""

    READER = SeedOssReader
    BARE = None

    def json(self, name: str, value: str) -> str:
        """Return JSON between its marks."""
        return f'{lark_text(f"<parameter={name}>")} {value} {lark_text(_QWEN.closing)} "\\n"'

    def text_rule(self, rule: str, expression: str) -> list[str]:
        """Return a text with no newline at its ends, which the reader would leave out."""
        ends = lark_regex(r"(?s:\n.*)|(?s:.*\n)")
        text = f"(({expression}) & ~{ends}{without(re.escape(_QWEN.closing))})"
        whole = f'{text} {lark_text(_QWEN.closing)} "\\n"'
        return [f"{rule}[lazy]: {rule.upper()}", f"{rule.upper()}: {whole}"]


class MiniMaxForm(MarkedForm):
    """As `MiniMaxReader` reads it, with newlines where templates have them."""

    READER = MiniMaxReader
    BEFORE_NAME = "\n"
    BEFORE_CLOSING = "\n"
    IS_IN_SECTION = True
    NAME = PARAMETER_NAME

    def call(self, name: str, parameters: Sequence[str]) -> str:
        """Return a call up to `</invoke>`."""
        opening = f'{MiniMaxReader.FUNCTION}"{name}">\n'
        return " ".join((lark_text(opening), *parameters, '"</invoke>"'))

    def text(self, name: str, rule: str) -> str:
        """Return a text, all that is between its marks."""
        return f"{self._opening(name)} {rule}"

    def any_name(self, value: str) -> str:
        """Return the same with any name."""
        return f"{lark_text(MiniMaxReader.PARAMETER)} NAME {value}"

    def json(self, name: str, value: str) -> str:
        """Return JSON between its marks."""
        return f"{self._opening(name)} {value} {lark_text(_END_OF_LINE)}"

    def text_rule(self, rule: str, expression: str) -> list[str]:
        """Return a text and the mark behind it."""
        text = f"(({expression}){without(re.escape(_QWEN.closing))})"
        whole = f"{text} {lark_text(_END_OF_LINE)}"
        return [f"{rule}[lazy]: {rule.upper()}", f"{rule.upper()}: {whole}"]

    def name_rule(self) -> str:
        """Return a name in quotes and what closes it."""
        quoted = f'"{self.PARAMETER_NAME.pattern}">'
        return f"NAME: {lark_regex(quoted)}"

    def _opening(self, name: str) -> str:
        return lark_text(f'{MiniMaxReader.PARAMETER}"{name}">')


class GlmForm(MarkedForm):
    """As `GlmReader` reads it. Between marks a newline may be: some templates write it."""

    READER = GlmReader
    BETWEEN = MAYBE_LINE
    PARAMETER_NAME = re.compile(
        rf"[^\s<>](?:[^<>\r\n]{{0,{MAX_PARAMETER_NAME_CHARACTERS - 2}}}[^\s<>])?"
    )
    NAME = re.compile(r"[^\s<>{}](?:[^<>{}\r\n]*[^\s<>{}])?")
    NOT_IN_NAMES = "no <, >, {, } or line breaks, and no space at their ends"
    NOT_IN_PARAMETERS = "no <, > or line breaks, no space at their ends"

    def call(self, name: str, parameters: Sequence[str]) -> str:
        """Return a call up to the mark that closes it."""
        return " ".join((lark_text(name), MAYBE_LINE, *parameters))

    def text(self, name: str, rule: str) -> str:
        """Return a text, all that is between its marks."""
        return f"{self._opening(lark_text(name))} {rule} {MAYBE_LINE}"

    def any_name(self, value: str) -> str:
        """Return the same with any name."""
        return f"{self._opening('NAME')} {value} {MAYBE_LINE}"

    def json(self, name: str, value: str) -> str:
        """Return JSON between its marks."""
        closing = self.mark(END_OF_VALUE)
        return f"{self._opening(lark_text(name))} {value} {closing} {MAYBE_LINE}"

    def text_rule(self, rule: str, expression: str) -> list[str]:
        """Return a text and the mark behind it."""
        text = f"(({expression}){without(re.escape(END_OF_VALUE))})"
        closing = self.mark(END_OF_VALUE)
        if closing == lark_text(END_OF_VALUE):
            return [f"{rule}[lazy]: {rule.upper()}", f"{rule.upper()}: {text} {closing}"]
        return [f"{rule}: {rule.upper()} {closing}", f"{rule.upper()}: {text}"]

    def name_rule(self) -> str:
        """Return a name."""
        return f"NAME: {lark_regex(self.PARAMETER_NAME.pattern)}"

    def _opening(self, name: str) -> str:
        key, end, value = map(self.mark, (KEY, END_OF_KEY, VALUE))
        return f"{key} {name} {end} {MAYBE_LINE} {value}"


FORMS: Final[Mapping[str, type[MarkedForm]]] = {
    form.READER.FORMAT: form for form in (Qwen3CoderForm, SeedOssForm, MiniMaxForm, GlmForm)
}
