"""What ends a launch: a thread did what the machine does not allow, or what nobody modelled."""

from __future__ import annotations


class Fault(Exception):
    """A launch went wrong; the message names the line of the PTX."""


class Unsupported(Fault):
    """The text holds something that this machine does not know; nothing is ever left out."""


class OutOfBounds(Fault):
    """An address outside of every buffer, or a write to one that may only be read."""


class Misaligned(Fault):
    """An access whose address is no multiple of its size."""


class Uninitialised(Fault):
    """A register or a piece of shared memory is read that nobody has written."""


class Race(Fault):
    """Two threads touch one place, at least one writing, with no barrier between."""


class TooEarly(Fault):
    """Memory is touched before the launch ahead has ended, or a thread ends without having waited.

    Only of launches that begin early.
    """


class InFlight(Fault):
    """A place is touched that an asynchronous copy is still writing."""


class Divergence(Fault):
    """Threads that must meet at an instruction do not: a barrier, or one of a whole warp."""


class Undefined(Fault):
    """The manual does not say what comes out: a division by zero, a foreign lane's register."""


class Endless(Fault):
    """More instructions than any test of ours needs."""
