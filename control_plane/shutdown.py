"""When the process ends, and how long requests that run get to finish then."""

from __future__ import annotations

import asyncio

import structlog

from control_plane.engine.stream_hub import StreamHub

LINK_PATIENCE_S = 1.0
"""A drain waits no longer for a compute plane that is away: it ends as well, most likely."""

ORPHAN_DRAIN_S = 2.0
"""A drain without a parent: nobody would end it if it hung, and its port is wanted again."""

_log = structlog.get_logger(__name__)


class Shutdown:
    """Hears of every reason to end; lives on one event loop.

    `hub`: knows the requests that run. `timeout_s`: what they get at most.
    """

    def __init__(self, hub: StreamHub, *, timeout_s: float) -> None:
        self._hub = hub
        self._timeout_s = timeout_s
        self._begun = asyncio.Event()
        self._hurry = asyncio.Event()
        self._link_up = asyncio.Event()
        self._link_down = asyncio.Event()  # neither before the first session

    def begin(self) -> None:
        """Let `wait` return."""
        self._begun.set()

    def on_signal(self) -> None:
        """Begin; a second signal cuts the waiting for requests short."""
        if self._begun.is_set():
            self._hurry.set()
        self._begun.set()

    def on_parent_gone(self) -> None:
        """Begin, and be quick about it even if a signal came before."""
        self._begun.set()
        _log.warning("the parent process is gone")
        asyncio.get_running_loop().call_later(ORPHAN_DRAIN_S, self._hurry.set)

    def set_linked(self, *, is_linked: bool) -> None:
        """Note whether there is a compute plane."""
        here, gone = self._link_up, self._link_down
        (here if is_linked else gone).set()
        (gone if is_linked else here).clear()

    async def wait(self) -> None:
        """Return once the process is to end."""
        await self._begun.wait()

    async def wait_for_requests(self) -> None:
        """Wait until no request runs, at most `timeout_s`, unless told to hurry.

        Requests cannot go on without a compute plane: when it is away, it gets a moment only.
        """
        lost = asyncio.create_task(self._wait_for_lost_plane())
        waits = [
            asyncio.create_task(self._hub.wait_until_idle()),
            asyncio.create_task(self._hurry.wait()),
            lost,
        ]
        try:
            done, _ = await asyncio.wait(
                waits, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for wait in waits:
                wait.cancel()
        if len(self._hub) == 0:
            return
        if lost in done:
            reason = "the compute plane is away"
        elif done:
            reason = "a second signal, or the parent process is gone"
        else:
            reason = f"shutdown_timeout of {self._timeout_s:g} s"
        _log.warning("requests cut off by the shutdown", requests=len(self._hub), reason=reason)

    async def _wait_for_lost_plane(self) -> None:
        """Return once the compute plane has been away for LINK_PATIENCE_S in one piece."""
        while True:
            await self._link_down.wait()
            try:
                await asyncio.wait_for(self._link_up.wait(), LINK_PATIENCE_S)
            except TimeoutError:
                return
