"""What the user of `hetero-infer chat` types, or pipes in: turns, and commands to the program."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import Final

from hetero_infer.commands.chat_interrupts import noticed_at_the_prompt
from planes.errors import ValidationError

QUOTES: Final = '"""'
PROMPT: Final = "> "
CONTINUED: Final = "… "
TYPED: Final = "what was typed"

HELP: Final = """\
/reset         forget the conversation, keep the system message
/system TEXT   set the system message; without TEXT: have none
/help          show this
/exit          end, as Ctrl-D does
A line that ends with \\ goes on in the next one; \"\"\" begins and ends a text of several lines.
Ctrl-C cancels an answer; what came of it stays in the conversation. Once more, it ends the chat.
"""


@dataclass(frozen=True, slots=True)
class Said:
    """Something to be answered."""

    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """Something for the program. `name`: reset, system, help or exit; `text`: what follows."""

    name: str
    text: str = ""


Turn = Said | Command


class UnreadableError(ValidationError):
    """Standard input gives an error in place of a line; it would do so again."""


class TurnReader:
    """Reads turns from standard input; a pipe has one a line, like a terminal.

    `is_interactive`: a person types. Then Ctrl-C drops what was typed and raises KeyboardInterrupt.
    """

    def __init__(self) -> None:
        stdin = sys.stdin
        if stdin is None or stdin.closed:
            raise ValidationError("standard input is closed", field="input")
        self.is_interactive = stdin.isatty()
        # `input` edits lines and finds earlier ones only where both are terminals.
        self._edits = self.is_interactive and sys.stdout.isatty()
        if self._edits:
            with contextlib.suppress(ImportError):  # Python may be built without it
                import readline  # noqa: F401
        self._num_lines = 0
        self._problem: ValidationError | None = None

    def read(self) -> Turn | None:
        """Return the next turn that is not empty; None at the end of the input.

        Raises ValidationError for what is no command, or no text, when the whole turn has been
        read; UnreadableError if there is no reading on.
        """
        while True:
            self._problem = None
            line = self._line(PROMPT)
            if line is None:
                return None
            begun = line.strip()
            is_command = begun.startswith("/")
            if not is_command:
                is_quoted = begun.startswith(QUOTES)
                begun = self._quoted(begun) if is_quoted else self._continued(line)
            if self._problem is not None:
                raise self._problem
            if is_command:
                return _command(begun)
            if begun.strip():
                return Said(begun)

    def _continued(self, line: str) -> str:
        """Return a line with those it goes on in."""
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\")
            following = self._line(CONTINUED)
            if following is None:
                break
            lines.append(following)
        return "\n".join(lines)

    def _quoted(self, begun: str) -> str:
        """Return a text of several lines, between quotes or up to the end of the input."""
        line: str | None = begun.removeprefix(QUOTES)
        lines: list[str] = []
        while line is not None:
            if line.rstrip().endswith(QUOTES):
                lines.append(line.rstrip().removesuffix(QUOTES))
                break
            lines.append(line)
            line = self._line(CONTINUED)
        return "\n".join(lines).strip("\n")

    def _line(self, prompt: str) -> str | None:
        """Return one line without its end; None at the end of the input.

        Notes what is no UTF-8 in it.
        """
        try:
            if not self.is_interactive:
                return self._piped()
            with noticed_at_the_prompt():
                return self._typed(prompt)
        except EOFError:
            return None
        except OSError as error:
            raise UnreadableError(
                f"standard input cannot be read: {error.strerror}", field="input"
            ) from None

    def _piped(self) -> str | None:
        line: bytes = sys.stdin.buffer.readline()
        self._num_lines += 1
        if not line:
            return None
        text = self._decoded(line, f"line {self._num_lines} of standard input")
        return text.removesuffix("\n").removesuffix("\r")

    def _typed(self, prompt: str) -> str | None:
        try:
            if self._edits:
                line = input(prompt)
            else:
                sys.stderr.write(prompt)
                sys.stderr.flush()
                line = sys.stdin.readline()
                if not line:
                    return None
        except UnicodeDecodeError as error:
            return self._decoded(error.object, TYPED)
        # A locale without UTF-8 makes single surrogates of bytes.
        return self._decoded(line.encode(errors="surrogateescape"), TYPED).removesuffix("\n")

    def _decoded(self, data: bytes, what: str) -> str:
        """Return a line as text. What is no UTF-8 in it is the turn's problem, if it has none."""
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            self._problem = self._problem or ValidationError(
                f"{what} is not valid UTF-8: its byte {error.start + 1} is "
                f"0x{data[error.start]:02x}",
                field="input",
            )
            return data.decode(errors="replace")


def _command(line: str) -> Command:
    name, _, text = line[1:].partition(" ")
    if name not in ("reset", "system", "help", "exit"):
        raise ValidationError(f"there is no command /{name}; /help shows those there are")
    if text and name != "system":
        raise ValidationError(f"/{name} takes nothing behind it, got {text!r}")
    return Command(name, text.strip())
