"""Numbers that nobody said."""

from __future__ import annotations


class DefaultInt(int):
    """A default that can be told from the same number said by somebody.

    Where nobody said a number, a better one may be chosen, by a device or by what a context has
    left. It is not handed on to a child process, which makes its own default.
    """
