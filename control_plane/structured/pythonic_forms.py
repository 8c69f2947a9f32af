"""How calls are written as Python writes them, in Lark's notation. Values are JSON, texts too.

Texts of JSON mean the same in Python, and its reader knows `true`, `false` and `null`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, Final

from control_plane.structured.lark import lark_regex, lark_text
from control_plane.structured.parameter_forms import MAYBE_LINE, ParameterForm
from control_plane.text.answers.parameter_reader import MAX_PARAMETER_NAME_CHARACTERS
from control_plane.text.answers.pythonic_readers import Lfm2Reader, Olmo3Reader, PythonicReader


class PythonicForm(ParameterForm):
    """As `PythonicReader` reads it. `OPENING`, `BETWEEN`, `ENDING`: beside calls, between marks."""

    READER: ClassVar[type[PythonicReader]]
    OPENING: ClassVar[str]
    BETWEEN: ClassVar[str]
    ENDING: ClassVar[str]
    NAME = re.compile(r"[^\s()\[\]{}<>,=](?:[^()\[\]{}<>,=\r\n]*[^\s()\[\]{}<>,=])?")
    NOT_IN_NAMES = "no commas, equals signs, <, >, brackets or line breaks, no space at their ends"
    PARAMETER_NAME = re.compile(rf"""[^\s()\[\]{{}},='"]{{1,{MAX_PARAMETER_NAME_CHARACTERS}}}""")
    NOT_IN_PARAMETERS = "no space, quotes, commas, equals signs or brackets"
    SEPARATOR = lark_text(", ")

    def call(self, name: str, parameters: Sequence[str]) -> str:
        """Return a call up to its closing parenthesis."""
        return " ".join((lark_text(f"{name}("), *parameters, lark_text(")")))

    def json(self, name: str, value: str) -> str:
        """Return a name and its value."""
        return f"{lark_text(f'{name}=')} {value}"

    def any_name(self, value: str) -> str:
        """Return the same with any name."""
        return f'NAME "=" {value}'

    def name_rule(self) -> str:
        """Return a name as Python has it."""
        return f"NAME: {lark_regex('[A-Za-z_][A-Za-z0-9_]{0,63}')}"


class Lfm2Form(PythonicForm):
    """A list of calls."""

    READER = Lfm2Reader
    OPENING = lark_text("[")
    BETWEEN = lark_text(", ")
    ENDING = lark_text("]")
    WORDS: ClassVar[Mapping[str, str]] = MappingProxyType({"boolean": '("True" | "False")'})


class Olmo3Form(PythonicForm):
    """A call a line, with values as JSON has them. Templates write no more lines, models do."""

    READER = Olmo3Reader
    OPENING = MAYBE_LINE
    BETWEEN = lark_text("\n")
    ENDING = MAYBE_LINE


PYTHONIC_FORMS: Final[Mapping[str, type[PythonicForm]]] = {
    form.READER.FORMAT: form for form in (Lfm2Form, Olmo3Form)
}
