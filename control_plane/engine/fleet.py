"""Several compute planes under one control plane, to the front end like one engine.

Each plane has a scheduler, a page table and an engine thread of its own. A request belongs to one
of them; which one, is known here, on the event loop. When a plane is lost, its engine gives the
requests that may go elsewhere back, as messages, and they are handed to the others with all their
tokens. Their streams hear nothing of it: they are keyed by the request, and all engines publish
into the same hub.

A command for a request may meet it on its way. So every command is remembered with the request's
route and repeated wherever the request arrives; whoever has obeyed it already does nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import structlog

from control_plane.core.kv_interface import MemoryStats
from control_plane.core.request import FinishReason, Request, RequestState
from control_plane.engine.events import (
    Publisher,
    RequestEnd,
    RequestInfo,
    RequestTimings,
    RequestUpdate,
)
from control_plane.engine.inbox import Inbox
from control_plane.engine.member import Member, PlaneFacts
from control_plane.engine.moving import Moving, begin_anew, is_started
from control_plane.engine.routing import choose, chunk_hashes
from control_plane.engine.totals import total_memory, total_metrics
from control_plane.errors import DrainingError
from control_plane.telemetry import EngineMetrics

PLACED_AT_ONCE = 64
"""Requests that move in one turn of the event loop: each of a long prompt takes 0.2 ms of it."""

_log = structlog.get_logger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class _Route:
    """Where a request is, or where it goes.

    `weight`: its samples or beams. `commands`: to be repeated where it arrives.
    """

    member: Member
    weight: int
    commands: list[Callable[[Inbox], None]] = field(default_factory=list)


class Fleet:
    """All compute planes that answered; used on the event loop, where not said otherwise.

    `publish` gets the news of all engines, on their threads. `call_soon` runs something on the
    event loop, from any thread. `on_link_change` is told when the first plane is linked (True) and
    when the last one is lost (False).
    """

    def __init__(
        self,
        publish: Publisher,
        *,
        is_alone: bool,
        allow_numerics_change: bool,
        call_soon: Callable[[Callable[[], None]], None],
        on_link_change: Callable[[bool], None],
    ) -> None:
        self._publish = publish
        self._is_alone = is_alone
        self._allow_numerics_change = allow_numerics_change
        self._call_soon = call_soon
        self._on_link_change = on_link_change
        self._members: list[Member] = []
        self._routes: dict[int, _Route] = {}
        self._linked: tuple[PlaneFacts, ...] = ()  # replaced as a whole: engine threads read it
        self._is_stopping = False  # they read this one, too

    @property
    def members(self) -> Sequence[Member]:
        """The planes that answered, in that order."""
        return self._members

    def add(self, member: Member) -> None:
        """Take a plane in; it gets requests from now on, at first those that find no other."""
        self._members.append(member)

    def begin_to_stop(self) -> None:
        """Let no request move any more: the engines end theirs."""
        self._is_stopping = True

    # --- the engine as the front end sees it ---

    def submit(self, request: Request) -> None:
        """Hand a request to the plane that is best for it."""
        if self._is_alone:
            self._members[0].inbox.submit(request)
            return
        hashes = self._hashes(request)
        able = [member for member in self._members if member.facts.takes(request)]
        linked = [member for member in able if member.is_linked]
        # One that no plane takes is refused by the scheduler of the one that it gets.
        member = self._best(linked or able or self._members, hashes)
        self._routes[request.id] = _Route(member, request.params.beam_width or request.params.n)
        self._send_there(request, hashes)
        member.inbox.submit(request)

    def cancel(self, request_id: int) -> None:
        """End a request, wherever it is; nothing happens if it has ended."""
        self._command(request_id, lambda inbox: inbox.cancel(request_id))

    def end_sample(self, request_id: int, sample_index: int, num_tokens: int) -> None:
        """End one sample of a request, wherever it is."""
        self._command(
            request_id, lambda inbox: inbox.end_sample(request_id, sample_index, num_tokens)
        )

    def inspect(
        self, reply: Callable[[list[RequestInfo]], None], *, include_ended: bool = False
    ) -> None:
        """Call `reply` on some engine thread with what all requests are doing, oldest first."""

        def combine(answers: list[list[RequestInfo]]) -> None:
            infos = [info for answer in answers for info in answer]
            infos.sort(key=lambda info: (info.finish_reason is None, info.arrival_time))
            reply(infos)

        answers = _Answers(len(self._members), combine)
        for member in self._members:
            member.inbox.inspect(answers.take, include_ended=include_ended)

    def flush_prefix_cache(self, reply: Callable[[int], None]) -> None:
        """Empty all prefix caches; call `reply` on some engine thread: how many blocks."""

        def add_up(counts: list[int]) -> None:
            reply(sum(counts))

        answers = _Answers(len(self._members), add_up)
        for member in self._members:
            member.trace.clear()
            member.inbox.flush_prefix_cache(answers.take)

    def metrics(self) -> EngineMetrics:
        """Return the counts of all engines as of their last turns."""
        return total_metrics([m.loop.metrics for m in self._members], self.memory_stats())

    def memory_stats(self) -> MemoryStats:
        """Return the use of all pools, in blocks of the first plane's size."""
        pools = [(m.loop.memory_stats, m.connected.plane.block_size) for m in self._members]
        return total_memory(pools, pools[0][1])

    # --- what engine threads call ---

    def publish(self, updates: Sequence[RequestUpdate]) -> None:
        """Pass a turn's news on to the streams, and note who has ended. Any thread."""
        self._publish(updates)
        if not self._is_alone:
            ended = [update.request_id for update in updates if update.end is not None]
            if ended:
                self._call_soon(partial(self._note_ends, ended))

    def note_link(self, member: Member, is_linked: bool) -> None:
        """Note that a plane was opened or lost. Its engine thread."""
        if not is_linked and not self._is_alone:
            # Here and now: the engine answers before it tries to open the link again.
            self._withdraw(member)
        self._call_soon(partial(self._set_linked, member, is_linked=is_linked))

    def others_serve(self, member: Member, grace_s: float) -> bool:
        """Whether another plane is linked, or was so of late: requests wait for it. Any thread."""
        since = time.monotonic() - grace_s
        return any(
            other.is_linked or (other.lost_at is not None and other.lost_at > since)
            for other in self._members
            if other is not member
        )

    def _may_go(self, origin: PlaneFacts, request: Request) -> bool:
        """Whether another plane could have the request. Engine thread of `origin`."""
        return not self._is_stopping and any(
            facts is not origin and self._may_move(origin, facts, request) for facts in self._linked
        )

    def _may_move(self, origin: PlaneFacts, other: PlaneFacts, request: Request) -> bool:
        is_like = origin.numerics_id == other.numerics_id or self._allow_numerics_change
        return (is_like or not is_started(request)) and other.takes(request)

    # --- links ---

    def _set_linked(self, member: Member, *, is_linked: bool) -> None:
        had_any = bool(self._linked)
        if member.is_linked and not is_linked:
            member.lost_at = time.monotonic()
        member.is_linked = is_linked
        member.trace.clear()  # whatever it had, it has no more
        self._linked = tuple(m.facts for m in self._members if m.is_linked)
        if bool(self._linked) != had_any:
            self._on_link_change(not had_any)
        if self._is_alone or not self._linked:
            return
        for other in self._members:
            if not other.is_linked:
                self._withdraw(other)

    def _withdraw(self, member: Member) -> None:
        """Ask a lost plane's engine for the requests that may go. Any thread."""
        member.inbox.withdraw(partial(self._may_go, member.facts), partial(self._take_back, member))

    def _take_back(self, origin: Member, moving: list[Moving]) -> None:
        if moving:
            self._call_soon(partial(self._place, origin, moving))

    # --- requests between planes ---

    def _place(self, origin: Member, moving: list[Moving]) -> None:
        """Hand requests that left a lost plane to those that are there, a few at a time."""
        if self._is_stopping:  # the engines may be gone
            self.publish([_cut_off(each.request) for each in moving])
            return
        now, later = moving[:PLACED_AT_ONCE], moving[PLACED_AT_ONCE:]
        for each in now:
            self._place_one(origin, each)
        _log.info("requests moved", from_address=origin.facts.address, requests=len(now))
        if later:
            self._call_soon(partial(self._place, origin, later))

    def _place_one(self, origin: Member, moving: Moving) -> None:
        request = moving.request
        route = self._routes[request.id]
        able = [
            member
            for member in self._members
            if member.is_linked
            and (member is origin or self._may_move(origin.facts, member.facts, request))
        ]
        hashes = self._hashes(request)
        member = self._best(able, hashes) if able else origin
        if member.facts.numerics_id != origin.facts.numerics_id and not is_started(request):
            begin_anew(request)
        route.member.load -= route.weight
        route.member = member
        self._send_there(request, hashes)
        member.inbox.adopt(moving)
        for command in route.commands:
            command(member.inbox)

    def _hashes(self, request: Request) -> list[int]:
        return chunk_hashes(request.input_tokens, request.cache_scope) if request.uses_cache else []

    def _best(self, members: Sequence[Member], hashes: list[int]) -> Member:
        return members[choose([member.candidate(hashes) for member in members])]

    def _send_there(self, request: Request, hashes: list[int]) -> None:
        """Count a request as one of its new plane's."""
        route = self._routes[request.id]
        route.member.load += route.weight
        route.member.trace.note(hashes)

    def _command(self, request_id: int, command: Callable[[Inbox], None]) -> None:
        """Give a command where the request is, and wherever it arrives."""
        if self._is_alone:
            command(self._members[0].inbox)
            return
        route = self._routes.get(request_id)
        if route is not None:
            route.commands.append(command)
            command(route.member.inbox)

    def _note_ends(self, request_ids: list[int]) -> None:
        for request_id in request_ids:
            route = self._routes.pop(request_id, None)
            if route is not None:
                route.member.load -= route.weight


def _cut_off(request: Request) -> RequestUpdate:
    """Return the end of a request that was on its way when the server shut down."""
    end = RequestEnd(
        RequestState.FAILED,
        FinishReason.ERROR,
        RequestTimings(None, None, request.history[-1].at - request.arrival_time),
        DrainingError("the server shut down before the request ended"),
    )
    return RequestUpdate(request.id, end=end)


class _Answers(Generic[T]):
    """Waits for an answer of every engine, each from its own thread, and then gives them on."""

    def __init__(self, num_wanted: int, then: Callable[[list[T]], None]) -> None:
        self._num_wanted = num_wanted
        self._then = then
        self._lock = threading.Lock()
        self._answers: list[T] = []

    def take(self, answer: T) -> None:
        """Note an answer; the last one is passed on with the others."""
        with self._lock:
            self._answers.append(answer)
            is_last = len(self._answers) == self._num_wanted
        if is_last:
            self._then(self._answers)
