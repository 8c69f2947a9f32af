"""Errors of tasks that did parts of one thing."""

from __future__ import annotations


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first single exception of a group."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
