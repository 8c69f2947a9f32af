"""PTX text → instructions, and what is declared around them.

The grammar is the part of it that NVVM writes, one statement a line. Whatever is not recognised is
an error that names its line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from tests.ptx.faults import Unsupported

SIZES = {
    kind + str(bits): bits // 8
    for kind, widths in {"u": (8, 16, 32, 64), "f": (16, 32, 64)}.items()
    for bits in widths
}
SIZES |= {f"{kind}{bits}": bits // 8 for kind in "sb" for bits in (8, 16, 32, 64)}


@dataclass(frozen=True, slots=True)
class Register:
    """A register, or with `negated` a predicate the other way round."""

    name: str
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Constant:
    """A number as it is written: an integer, or the bits of a float."""

    value: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """A declared variable or a label, by name; or a special register, whose name begins with %."""

    name: str


@dataclass(frozen=True, slots=True)
class Address:
    """A register or a variable between brackets, and the bytes added to it."""

    base: Register | Symbol
    offset: int


@dataclass(frozen=True, slots=True)
class Group:
    """Registers between braces."""

    items: tuple[Register | Constant, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """A result and a predicate beside it: `%r1|%p1`."""

    first: Register
    second: Register


Operand: TypeAlias = Register | Constant | Symbol | Address | Group | Pair


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction. `line` counts from 1; `opcode` is with all its modifiers."""

    line: int
    text: str
    opcode: str
    operands: tuple[Operand, ...]
    guard: Register | None

    @property
    def label(self) -> str:
        """Where a branch leads; empty for any other instruction."""
        target = self.operands[0] if self.opcode.startswith("bra") else None
        return target.name if isinstance(target, Symbol) else ""

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}"


@dataclass(frozen=True, slots=True)
class Variable:
    """Memory declared in the text: `space` is shared or global, `size` in bytes."""

    name: str
    space: str
    size: int
    alignment: int


@dataclass(frozen=True, slots=True)
class Program:
    """One kernel. `threads` of a block, as it was compiled for; `labels` by index of instruction.

    `parameters` are the types by name, in order; `registers` the types by name.
    """

    name: str
    threads: int
    parameters: dict[str, str]
    variables: dict[str, Variable]
    registers: dict[str, str]
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]


_IGNORED = re.compile(r"\.(version|target|address_size|minnctapersm|pragma)\b")
_ENTRY = re.compile(r"\.visible \.entry (\w+)\(")
_PARAMETER = re.compile(r"\.param \.(\w+) (\w+),?")
_THREADS = re.compile(r"\.maxntid (\d+), 1, 1")
_VARIABLE = re.compile(
    r"(?:\.visible |\.common )?\.(shared|global) \.align (\d+) \.(\w+) (\w+)(?:\[(\d+)\])?;"
)
_REGISTERS = re.compile(r"\.reg \.(\w+)\s+(%[a-z]+)<(\d+)>;")
_LABEL = re.compile(r"(\$\w+):")
_INSTRUCTION = re.compile(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*);")
_OPERAND = re.compile(r"\s*(\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]]+?)\s*(?:,|$)")
_ADDRESS = re.compile(r"\[([%\w$]+)(?:\+(-?\d+))?\]")
_INTEGER = re.compile(r"-?(?:0x[0-9a-fA-F]+|\d+)U?")
_FLOAT = re.compile(r"0[fdFD]([0-9a-fA-F]{8,16})")


def parse(text: str) -> Program:
    """Read the one kernel of a text. Raises Unsupported."""
    reader = _Reader()
    for number, line in _lines(text):
        if _IGNORED.match(line) or line in ("(", ")", "{", "}"):
            continue
        if not (reader.read_declaration(line) or reader.read_instruction(number, line)):
            raise Unsupported(f"line {number}: {line}")
    return reader.program()


class _Reader:
    """What has been read of a text so far."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._threads: list[int] = []
        self._parameters: dict[str, str] = {}
        self._variables: dict[str, Variable] = {}
        self._registers: dict[str, str] = {}
        self._instructions: list[Instruction] = []
        self._labels: dict[str, int] = {}

    def read_declaration(self, line: str) -> bool:
        """Take a line in if it declares something; say whether it does."""
        if match := _ENTRY.fullmatch(line):
            self._names.append(match[1])
        elif match := _PARAMETER.fullmatch(line):
            self._parameters[match[2]] = match[1]
        elif match := _THREADS.fullmatch(line):
            self._threads.append(int(match[1]))
        elif match := _VARIABLE.fullmatch(line):
            size = SIZES[match[3]] * int(match[5] or 1)
            self._variables[match[4]] = Variable(match[4], match[1], size, int(match[2]))
        elif match := _REGISTERS.fullmatch(line):
            self._registers |= {f"{match[2]}{i}": match[1] for i in range(int(match[3]))}
        elif match := _LABEL.fullmatch(line):
            self._labels[match[1]] = len(self._instructions)
        return match is not None

    def read_instruction(self, number: int, line: str) -> bool:
        """Take a line in if it is an instruction; say whether it is."""
        match = None if line.startswith(".") else _INSTRUCTION.fullmatch(line)
        if match is None:
            return False
        guard = Register(match[2], bool(match[1])) if match[2] else None
        operands = tuple(_operands(match[4], f"line {number}: {line}"))
        self._instructions.append(Instruction(number, line, match[3], operands, guard))
        return True

    def program(self) -> Program:
        """Return what has been read as a whole."""
        if len(self._names) != 1 or len(self._threads) != 1:
            raise Unsupported(f"one kernel with .maxntid is expected, not {self._names}")
        for one in self._instructions:
            if one.opcode.startswith("bra") and one.label not in self._labels:
                raise Unsupported(f"{one}: no such label")
        return Program(
            self._names[0], self._threads[0], self._parameters, self._variables,
            self._registers, tuple(self._instructions), self._labels,
        )  # fmt: skip


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), start=1):
        code = " ".join(line.split("//")[0].split())
        if code:
            yield number, code


def _operands(text: str, where: str) -> Iterator[Operand]:
    position = 0
    while position < len(text):
        match = _OPERAND.match(text, position)
        if match is None:
            raise Unsupported(where)
        yield _operand(match[1].strip(), where)
        position = match.end()


def _operand(text: str, where: str) -> Operand:
    if text.startswith("{"):
        items = [_operand(item.strip(), where) for item in text[1:-1].split(",")]
        kept = tuple(item for item in items if isinstance(item, (Register, Constant)))
        if len(kept) == len(items):
            return Group(kept)
    elif match := _ADDRESS.fullmatch(text):
        base = _operand(match[1], where)
        if isinstance(base, (Register, Symbol)):
            return Address(base, int(match[2] or 0))
    elif "|" in text:
        first, second = (_operand(item, where) for item in text.split("|"))
        if isinstance(first, Register) and isinstance(second, Register):
            return Pair(first, second)
    elif match := _FLOAT.fullmatch(text):
        return Constant(int(match[1], 16))
    elif _INTEGER.fullmatch(text):
        return Constant(int(text.rstrip("U"), 0))
    elif re.fullmatch(r"!?%[a-z]+\d+", text):
        return Register(text.lstrip("!"), negated=text.startswith("!"))
    elif re.fullmatch(r"%[a-z]+(\.[xyz])?|[\w$]+", text):
        return Symbol(text)
    raise Unsupported(where)
