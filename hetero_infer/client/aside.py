"""Calls of gRPC's, made out of reach of signal handlers.

Python runs signal handlers in the main thread, between any two steps of what it does there. If one
raises (Ctrl-C, say) inside gRPC, what gRPC held stays held: a call that nobody knows of and that
the server works on, or the lock of the channel, and then the next call, or closing the channel,
waits for good. So what the main thread wants of gRPC is done by a thread beside it, and the main
thread waits where an exception harms nothing; that costs it some twenty microseconds a message.
Other threads are never interrupted and make their calls themselves.
"""

from __future__ import annotations

import contextlib
import threading
from _thread import start_new_thread  # of one step, which no handler can break in two
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar, cast

from hetero_infer.wire_errors import ServerLostError

T = TypeVar("T")

GIVEN_UP: Final = "the call was given up"

Take: TypeAlias = Callable[[Any], T]
"""Waits for something that a call brings, and returns it, or raises; keeps nothing of gRPC's."""


class Outcome(NamedTuple, Generic[T]):
    """What a function returned or raised."""

    value: T | None
    error: BaseException | None


class AsideCall:
    """One call. One thread at a time may read it, and any may cancel it, a signal handler too.

    Whoever is interrupted while reading cancels it, and reads no more.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        """`make`: begins the call and returns it at once; runs with the first thing read."""
        self._make = make
        self._call: Any = None
        self._is_made = False
        self._is_cancelled = False
        self._is_let_go = False
        self._asked: SimpleQueue[Take[Any] | None] | None = None
        self._told: SimpleQueue[Outcome[Any]] = SimpleQueue()

    def read(self, take: Take[T], *, is_last: bool = False) -> T:
        """Return `take(call)`. Raises what it raises, and what `make` raises.

        `is_last`: nothing more will be read, the call is let go. Raises ServerLostError where that
        has happened already, because it was cancelled.
        """
        if self._asked is None and not is_main_thread():
            return take(self._begun())
        if self._asked is None:
            self._asked = SimpleQueue()
            start_new_thread(self._serve, ())
        self._asked.put(take)
        if self._is_let_go:  # cancelled in between, and nobody serves any more
            start_new_thread(self._serve_rest, ())
        if is_last:
            self._asked.put(None)
        outcome: Outcome[T] = self._told.get()
        return _value_of(outcome)

    def cancel(self) -> None:
        """End the call, even if it has not begun yet, and let it go. Waits for nothing."""
        # Set first here, and looked at last where the call begins: one of the two sees the other.
        # A lock would not do, because handlers of signals come here too.
        self._is_cancelled = True
        if is_main_thread():
            with contextlib.suppress(RuntimeError):  # the program ends: its connections do, too
                start_new_thread(self._cancel, ())
        else:
            self._cancel()

    def _serve(self) -> None:
        asked = self._asked
        assert asked is not None
        while (take := asked.get()) is not None:
            self._told.put(_outcome(take, self._begun))
            del take  # it belongs to who reads, who may be given up meanwhile
        # Who cancels puts None ahead of what is just being asked: that is answered all the same.
        # Set first here, and looked at last where it is asked: one of the two sees the other.
        self._is_let_go = True
        self._serve_rest()

    def _serve_rest(self) -> None:
        asked = self._asked
        assert asked is not None
        with contextlib.suppress(Empty):
            while True:
                take = asked.get_nowait()
                if take is not None:
                    self._told.put(_outcome(take, self._begun))
                del take
        self._call = None  # so that its last reference is here, and not in the main thread

    def _begun(self) -> Any:  # noqa: ANN401 - gRPC's call
        if self._call is None:
            if self._is_made:
                raise ServerLostError(GIVEN_UP)
            self._is_made = True
            self._call = self._make()
        if self._is_cancelled:
            self._call.cancel()
        return self._call

    def _cancel(self) -> None:
        call, asked = self._call, self._asked
        if call is not None:
            call.cancel()
        if asked is not None:
            asked.put(None)


class Flag:
    """Is raised once, at any moment: by any thread, and by a signal handler.

    A `threading.Event` may not be set by a handler: who waits for one holds its lock for moments,
    and the handler, in the same thread, would wait for that for good.
    """

    def __init__(self) -> None:
        self._is_up = False
        self._told: SimpleQueue[None] = SimpleQueue()

    def is_set(self) -> bool:
        """Whether it is up."""
        return self._is_up

    def set(self) -> None:
        """Raise it."""
        self._is_up = True
        self._told.put(None)

    def wait(self, timeout_s: float) -> None:
        """Return once it is up, or after the time; for one thread."""
        if not self._is_up:
            with contextlib.suppress(Empty):
                self._told.get(timeout=timeout_s)


def do_aside(action: Callable[[], T]) -> T:
    """Return what a function returns that uses gRPC. Raises what it raises.

    Interrupted, it goes on by itself.
    """
    if not is_main_thread():
        return action()
    told: SimpleQueue[Outcome[T]] = SimpleQueue()
    start_new_thread(lambda: told.put(_outcome(lambda _: action(), lambda: None)), ())
    return _value_of(told.get())


def is_main_thread() -> bool:
    """Whether signal handlers may run here."""
    return threading.get_ident() == threading.main_thread().ident


def _outcome(take: Take[T], begun: Callable[[], Any]) -> Outcome[T]:
    try:
        return Outcome(take(begun()), None)
    except BaseException as error:  # noqa: BLE001 - raised again where it was asked for
        error.__context__ = None  # with its trace it holds the call
        return Outcome(None, error.with_traceback(None))


def _value_of(outcome: Outcome[T]) -> T:
    if outcome.error is not None:
        raise outcome.error
    return cast("T", outcome.value)
