"""The server a command talks to: one that runs already, or planes that live as long as the command.

What is said meanwhile goes to stderr, where results never go.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from hetero_infer.commands.client_options import refuse_engine_flags
from hetero_infer.commands.target import TargetSettings
from hetero_infer.config import EngineConfig, Settings
from hetero_infer.local_planes import (
    compute_socket,
    control_socket,
    private_directory,
    start_compute_plane,
    start_control_plane,
)
from hetero_infer.plane_process import STOP_GRACE_S, wait_all_ready
from hetero_infer.supervision import Ended, SupervisedPlane, take_turn
from planes.address import Address, parse_address
from planes.errors import EngineError
from planes.tls_files import ClientFiles

if TYPE_CHECKING:
    from rich.console import Console

STARTING = "Starting the planes … (compiling kernels, the first time: half a minute)"
"""Has room in a line of 80 characters, behind the spinner."""

NOTICED_S = 1.0
"""A shorter wait for a server is told to nobody."""


class Notices:
    """What is said beside results."""

    @functools.cached_property
    def console(self) -> Console:
        """What draws on a terminal."""
        from rich.console import Console  # which takes a while to import, for a pipe in vain

        return Console(stderr=True, soft_wrap=True)

    def progress(self, text: str) -> contextlib.AbstractContextManager[object]:
        """Show a spinner on a terminal, nothing in a pipe."""
        if _is_terminal() and self.console.is_terminal:
            return self.console.status(text)
        return contextlib.nullcontext()

    def log(self, line: str) -> None:
        """Pass on a line of a plane; any thread."""
        if _is_terminal():
            self.console.print(line, markup=False, highlight=False)
        elif sys.stderr is not None:
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()

    def tell_wait(self, error: EngineError, pause_s: float) -> None:
        """Say why nothing happens, where it lasts long enough to be noticed (`Client.on_wait`)."""
        if pause_s >= NOTICED_S:
            self.log(f"hetero-infer: waiting {pause_s:.0f} s for the server: {error.message}")


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


@dataclass(frozen=True, slots=True)
class Server:
    """Where a server is and how it is spoken to."""

    address: Address
    token: str | None = None
    tls: ClientFiles | None = None


@contextlib.contextmanager
def own_server(
    config: EngineConfig, log: Callable[[str], None], *listen_flags: str
) -> Iterator[Server]:
    """Start both planes, and end them at the end; one that dies is started again meanwhile.

    `listen_flags`: what else the control plane is told. Raises EngineError.
    """
    config.validate()
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(private_directory())
        compute, control = compute_socket(directory), control_socket(directory)
        ended = Ended()

        def say(line: str) -> None:
            log(f"hetero-infer: {line}")

        planes = [
            SupervisedPlane(start, ended, say)
            for start in (
                partial(start_compute_plane, config, compute, log),
                partial(
                    start_control_plane, config, compute, f"--listen={control}", *listen_flags,
                    on_output=log,
                ),
            )
        ]  # fmt: skip
        for plane in planes:
            stack.callback(plane.stop, STOP_GRACE_S)
        processes = [plane.start() for plane in planes]
        # Whoever starts a server speaks to it; now there is time to import what with.
        importlib.import_module("hetero_infer.client")
        wait_all_ready(processes)
        keeper = threading.Thread(target=_keep_alive, args=(planes, ended, say), daemon=True)
        keeper.start()
        stack.callback(keeper.join)
        stack.callback(ended.put, None)
        yield Server(control)


def _keep_alive(
    planes: Sequence[SupervisedPlane], ended: Ended, say: Callable[[str], None]
) -> None:
    """Start planes again until None is put into `ended`, or it is of no use."""
    try:
        while take_turn(planes, ended):
            pass
    except EngineError as error:
        say(error.message)
        for plane in reversed(planes):  # or clients would wait for what does not come back
            plane.stop(STOP_GRACE_S)


@contextlib.contextmanager
def server_of(
    settings: Settings, target: TargetSettings, flags: Mapping[str, object], notices: Notices
) -> Iterator[Server]:
    """Return the server that the command line names, or start one. Raises EngineError."""
    target.validate()
    if target.target is not None:
        refuse_engine_flags(flags)
        yield Server(parse_address(target.target, key="target"), target.token, target.tls)
        return
    config = settings.resolve(EngineConfig)
    with contextlib.ExitStack() as stack:
        with notices.progress(STARTING):
            server = stack.enter_context(own_server(config, notices.log, *target.own_flags))
        yield server
