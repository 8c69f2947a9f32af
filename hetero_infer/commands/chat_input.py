"""What the user of `hetero-infer chat` types, or pipes in: turns, and commands to the program."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import Final

from planes.errors import ValidationError

QUOTES: Final = '"""'
PROMPT: Final = "> "
CONTINUED: Final = "… "

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

    def read(self) -> Turn | None:
        """Return the next turn that is not empty; None at the end of the input.

        Raises ValidationError for what is no text, or no command.
        """
        while True:
            line = self._line(PROMPT)
            if line is None:
                return None
            begun = line.strip()
            if begun.startswith("/"):
                return _command(begun)
            text = self._quoted(begun) if begun.startswith(QUOTES) else self._continued(line)
            if text.strip():
                return Said(text)

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
        """Return one line without its end; None at the end of the input."""
        try:
            if self._edits:
                return input(prompt)
            if self.is_interactive:
                sys.stderr.write(prompt)
                sys.stderr.flush()
            line = sys.stdin.readline()
        except EOFError:
            return None
        except UnicodeDecodeError as error:
            raise ValidationError(
                f"standard input is not valid UTF-8 (at byte {error.start})", field="input"
            ) from None
        except OSError as error:
            raise ValidationError(
                f"standard input cannot be read: {error.strerror}", field="input"
            ) from None
        return line.removesuffix("\n").removesuffix("\r") if line else None


def _command(line: str) -> Command:
    name, _, text = line[1:].partition(" ")
    if name not in ("reset", "system", "help", "exit"):
        raise ValidationError(f"there is no command /{name}; /help shows those there are")
    if text and name != "system":
        raise ValidationError(f"/{name} takes nothing behind it, got {text!r}")
    return Command(name, text.strip())
