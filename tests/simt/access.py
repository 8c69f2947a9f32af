"""When a thread touched memory, and whether that is over for another."""

from __future__ import annotations

from tests.simt.threads import Thread


class Access:
    """Accesses by a thread, and how often that thread had been synchronised by then."""

    __slots__ = ("barriers", "fences", "thread", "warp_barriers")

    def __init__(self, thread: Thread) -> None:
        self.thread = thread
        self.barriers = thread.barriers
        self.warp_barriers = thread.warp_barriers
        self.fences = thread.fences

    @staticmethod
    def now(thread: Thread) -> Access:
        """Return the accesses that the thread makes now; the same until it is synchronised."""
        latest = thread.latest_access
        if (
            not isinstance(latest, Access)
            or latest.barriers != thread.barriers
            or latest.warp_barriers != thread.warp_barriers
            or latest.fences != thread.fences
        ):
            latest = thread.latest_access = Access(thread)
        return latest

    def is_before(self, thread: Thread) -> bool:
        """Return whether this access is over for certain when `thread` makes one now."""
        mine = self.thread
        if mine is thread:
            return True
        if mine.block is not thread.block:
            known = thread.known
            return known.get(mine.block, 0) > self.barriers or known.get(mine, 0) > self.fences
        if thread.barriers > self.barriers:
            return True
        return mine.warp == thread.warp and thread.warp_barriers > self.warp_barriers
