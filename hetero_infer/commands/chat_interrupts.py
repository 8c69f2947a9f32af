"""Ctrl-C in `hetero-infer chat`: seen at once at the prompt, and in the middle of an answer."""

from __future__ import annotations

import contextlib
import signal
import sys
import termios
from collections.abc import Iterator
from types import FrameType
from typing import Final

from hetero_infer.client import Stream

LOOK_S: Final = 0.1
"""How late a Ctrl-C may be noticed that came just before the wait for a key."""


@contextlib.contextmanager
def noticed_at_the_prompt() -> Iterator[None]:
    """Have Ctrl-C noticed while a line is read, whenever it comes.

    A signal that arrives between the prompt and the wait for a key does not end that wait: it would
    be noticed at the next key only. A timer ends the wait again and again, and each time Python
    looks for signals that have come.
    """
    before = signal.signal(signal.SIGALRM, lambda _number, _frame: None)
    signal.setitimer(signal.ITIMER_REAL, LOOK_S, LOOK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


class Interrupts:
    """Ctrl-C while an answer comes: the first one closes its stream, a second one ends the chat."""

    def __init__(self) -> None:
        self._stream: Stream | None = None
        self.came = False

    def watch(self, stream: Stream) -> None:
        """Close this stream when Ctrl-C comes, or now if it has come."""
        self._stream = stream
        if self.came:
            stream.close()

    def on_signal(self, _number: int, _frame: FrameType | None) -> None:
        """Take a Ctrl-C."""
        if self.came:
            raise KeyboardInterrupt
        self.came = True
        if self._stream is not None:
            self._stream.close()


@contextlib.contextmanager
def cancelling() -> Iterator[Interrupts]:
    """Let Ctrl-C cancel an answer, as `Interrupts` says."""
    interrupts = Interrupts()
    before = signal.signal(signal.SIGINT, interrupts.on_signal)
    try:
        with _kept_output():
            yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _kept_output() -> Iterator[None]:
    """Let Ctrl-C throw away nothing that is on its way to the screen, as terminals do otherwise.

    What has been written of an answer stays in the conversation: the screen is to show all of it.
    """
    fd = sys.stdin.fileno()
    try:
        before = termios.tcgetattr(fd)
        kept = [*before[:3], before[3] | termios.NOFLSH, *before[4:]]
        termios.tcsetattr(fd, termios.TCSANOW, kept)
    except termios.error:  # it has been hung up
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(fd, termios.TCSANOW, before)
