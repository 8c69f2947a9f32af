"""Calls as the readers of their formats read them: for prompts whose template cannot write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from control_plane.text.answers.call_readers import HermesReader, Llama3JsonReader
from control_plane.text.answers.gemma4_arguments import PLAIN_KEY, QUOTE
from control_plane.text.answers.gemma4_reader import CALL, Gemma4Reader
from control_plane.text.answers.glm_reader import (
    END_OF_KEY,
    END_OF_VALUE,
    KEY,
    VALUE,
    GlmReader,
)
from control_plane.text.answers.list_readers import GraniteReader, MistralReader
from control_plane.text.answers.parameter_reader import ParameterReader
from control_plane.text.answers.pythonic_readers import Lfm2Reader, Olmo3Reader
from control_plane.text.answers.qwen3_coder_reader import (
    MiniMaxReader,
    Qwen3CoderReader,
    SeedOssReader,
)
from control_plane.text.answers.section_readers import (
    ARGUMENTS,
    FENCE,
    SEPARATOR,
    DeepSeekV3Reader,
    DeepSeekV31Reader,
    KimiReader,
    SectionReader,
)


class Call(NamedTuple):
    """A call of an earlier message. `arguments`: by name, or a text that is no object of JSON.

    `number`: of calls before it in the conversation.
    """

    name: str
    arguments: Mapping[str, object] | str
    number: int = 0

    @property
    def json(self) -> str:
        """Return the arguments as JSON; what is none stands as it is."""
        return self.arguments if isinstance(self.arguments, str) else _json(self.arguments)

    @property
    def parameters(self) -> Mapping[str, object]:
        """Return the arguments by name."""
        if isinstance(self.arguments, str):
            return {"arguments": self.arguments}
        return self.arguments


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _object(call: Call, key: str = "arguments") -> str:
    return f'{{"name": {_json(call.name)}, "{key}": {call.json}}}'


def _hermes(calls: Sequence[Call]) -> str:
    begin, end = HermesReader.NAMES
    return "\n".join(f"{begin}\n{_object(call)}\n{end}" for call in calls)


def _llama3_json(calls: Sequence[Call]) -> str:
    """Without the tag, as at the beginning of a message."""
    return "; ".join(_object(call, "parameters") for call in calls)


def _list(mark: str) -> Callable[[Sequence[Call]], str]:
    return lambda calls: f"{mark}[{', '.join(map(_object, calls))}]"


def _lines(reader: type[ParameterReader], line: str) -> Callable[[Sequence[Call]], str]:
    """Return what writes Qwen3-Coder's; `line`: what stands between a value and its marks."""

    def written(call: Call) -> str:
        values = "".join(
            f"<parameter={name}>{line}{_unquoted(value)}{line}</parameter>\n"
            for name, value in call.parameters.items()
        )
        body = f"<function={call.name}>\n{values}</function>"
        return f"{reader.MARKERS[0]}\n{body}\n{reader.CLOSING}"

    return lambda calls: "\n".join(map(written, calls))


def _minimax(calls: Sequence[Call]) -> str:
    lines = [MiniMaxReader.MARKERS[0]]
    for call in calls:
        lines.append(f'{MiniMaxReader.FUNCTION}"{call.name}">')
        lines += [
            f'{MiniMaxReader.PARAMETER}"{name}">{_unquoted(value)}</parameter>'
            for name, value in call.parameters.items()
        ]
        lines.append("</invoke>")
    return "\n".join((*lines, MiniMaxReader.CLOSING))


def _glm(calls: Sequence[Call]) -> str:
    begin, end = GlmReader.MARKERS[0], GlmReader.CLOSING
    written = []
    for call in calls:
        values = "".join(
            f"{KEY}{name}{END_OF_KEY}\n{VALUE}{_unquoted(value)}{END_OF_VALUE}\n"
            for name, value in call.parameters.items()
        )
        written.append(f"{begin}{call.name}\n{values}{end}")
    return "\n".join(written)


def _unquoted(value: object) -> str:
    return value if isinstance(value, str) else _json(value)


def _section(
    reader: type[SectionReader], body: Callable[[Call], str], between: str = ""
) -> Callable[[Sequence[Call]], str]:
    def written(calls: Sequence[Call]) -> str:
        bodies = (f"{reader.BEGIN}{body(call)}{reader.END}" for call in calls)
        return f"{reader.OPEN}{between.join(bodies)}{reader.CLOSE}"

    return written


def _deepseek_v3(call: Call) -> str:
    return f"function{SEPARATOR}{call.name}\n{FENCE}json\n{call.json}\n{FENCE}"


def _deepseek_v31(call: Call) -> str:
    return f"{call.name}{SEPARATOR}{call.json}"


def _kimi(call: Call) -> str:
    return f"{KimiReader.call_id(call.name, call.number)}{ARGUMENTS}{call.json}"


def _lfm2(calls: Sequence[Call]) -> str:
    begin, end = Lfm2Reader.NAMES
    return f"{begin}[{', '.join(_of_python(call, _python) for call in calls)}]{end}"


def _olmo3(calls: Sequence[Call]) -> str:
    begin, end = Olmo3Reader.NAMES
    lines = "\n".join(_of_python(call, _json) for call in calls)
    return f"{begin}{lines}{end}"


def _of_python(call: Call, spell: Callable[[object], str]) -> str:
    given = ", ".join(f"{name}={spell(value)}" for name, value in call.parameters.items())
    return f"{call.name}({given})"


def _python(value: object) -> str:
    """Spell a value as Python does, but for texts, which are those of JSON."""
    if isinstance(value, str):
        return _json(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_json(key)}: {_python(one)}' for key, one in value.items())}}}"
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_python, value))}]"
    return repr(value)


def _gemma4(calls: Sequence[Call]) -> str:
    begin, end = Gemma4Reader.MARKERS[0], Gemma4Reader.CLOSING
    return "".join(f"{begin}{CALL}{call.name}{_of_gemma4(call.parameters)}{end}" for call in calls)


def _of_gemma4(value: object) -> str:
    """Spell a value as Gemma's templates do; a name between marks only where it must be."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, Mapping):
        entries = (f"{_key_of_gemma4(key)}:{_of_gemma4(one)}" for key, one in value.items())
        return f"{{{','.join(entries)}}}"
    if isinstance(value, Sequence):
        return f"[{','.join(map(_of_gemma4, value))}]"
    return _json(value)


def _key_of_gemma4(key: object) -> str:
    name = str(key)
    return name if PLAIN_KEY.fullmatch(name) else f"{QUOTE}{name}{QUOTE}"


Writer: TypeAlias = Callable[[Sequence[Call]], str]

WRITERS: Final[Mapping[str, Writer]] = {
    HermesReader.FORMAT: _hermes,
    Llama3JsonReader.FORMAT: _llama3_json,
    MistralReader.FORMAT: _list(MistralReader.MARKERS[0]),
    GraniteReader.FORMAT: _list(GraniteReader.MARKERS[0]),
    Qwen3CoderReader.FORMAT: _lines(Qwen3CoderReader, "\n"),
    SeedOssReader.FORMAT: _lines(SeedOssReader, ""),
    MiniMaxReader.FORMAT: _minimax,
    GlmReader.FORMAT: _glm,
    DeepSeekV3Reader.FORMAT: _section(DeepSeekV3Reader, _deepseek_v3, "\n"),
    DeepSeekV31Reader.FORMAT: _section(DeepSeekV31Reader, _deepseek_v31),
    KimiReader.FORMAT: _section(KimiReader, _kimi),
    Lfm2Reader.FORMAT: _lfm2,
    Olmo3Reader.FORMAT: _olmo3,
    Gemma4Reader.FORMAT: _gemma4,
}
"""By the names of formats; those that write messages, not texts, have none (harmony)."""


def message_with(calls_format: str, content: str, calls: Sequence[Call]) -> str:
    """Return a message with calls behind its content, as the reader of the format reads it."""
    written = WRITERS[calls_format](calls)
    if not content:
        return written
    tag = Llama3JsonReader.MARKERS[0] if calls_format == Llama3JsonReader.FORMAT else ""
    return f"{content}\n{tag}{written}"
