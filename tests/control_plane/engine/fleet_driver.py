"""A fleet on an event loop, before fake compute planes, and what it published."""

from __future__ import annotations

import asyncio
import threading

from control_plane.config import SchedulingLimits
from control_plane.core.generation_params import GenerationParams
from control_plane.core.request_options import RequestOptions
from control_plane.engine.compute_client import ComputeClient
from control_plane.engine.fleet import Fleet
from control_plane.engine.loop import LoopOptions
from control_plane.engine.plugins import CoreFactories
from control_plane.engine.roster import Roster, RosterOptions
from planes.address import parse_address

PATIENCE_S = 30.0


LENGTH = 300
STANDS_AFTER = 30
"""Batches of a plane that is to be killed: some tokens of each request, and far from all."""


class FleetDriver:
    """Use with `async with`; leaving it ends the engines."""

    def __init__(self, planes, *, limits=None, factories=None, grace_s=30.0, **options):
        loop = asyncio.get_running_loop()
        self.tokens, self.ends, self.links, self.faults = {}, {}, [], []
        self.prepared_on, self.attached_on = [], []
        self.news = asyncio.Event()
        self.admission = None
        self.fleet = Fleet(
            lambda updates: loop.call_soon_threadsafe(self.collect, updates),
            is_alone=len(planes) == 1,
            allow_numerics_change=options.get("allow_numerics_change", False),
            call_soon=loop.call_soon_threadsafe,
            on_link_change=self.note_link,
        )
        self.roster = Roster(
            [ComputeClient(parse_address(p.address), controller="test") for p in planes],
            self.fleet,
            RosterOptions(
                limits or SchedulingLimits(),
                LoopOptions(compute_grace_s=grace_s),
                factories or CoreFactories(),
            ),
            prepare=self.note_prepared,
            on_fault=lambda fault: loop.call_soon_threadsafe(self.note_fault, fault),
        )

    async def __aenter__(self):
        self.roster.start()
        return self

    async def __aexit__(self, *_):
        self.roster.stop_connecting()
        await self.roster.stop(5.0)
        await self.roster.shut_down(5.0)

    def note_prepared(self, _connected):
        self.prepared_on.append(threading.current_thread())
        return self.note_first

    def note_first(self, admission):
        self.attached_on.append(threading.current_thread())
        self.admission = admission

    def note_link(self, is_linked):
        self.links.append(is_linked)
        self.news.set()

    def note_fault(self, fault):
        self.faults.append(fault)
        self.news.set()

    def collect(self, updates):
        for update in updates:
            assert update.request_id not in self.ends
            key = update.request_id, update.sample_index
            self.tokens.setdefault(key, []).extend(update.new_token_ids)
            if update.end is not None:
                self.ends[update.request_id] = update.end
        self.news.set()

    async def until(self, condition):
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self.news.clear()
                # Not everything that a condition looks at makes news.
                try:
                    await asyncio.wait_for(self.news.wait(), 0.02)
                except TimeoutError:
                    continue

    async def linked(self, number):
        await self.until(lambda: sum(m.is_linked for m in self.fleet.members) == number)

    def submit(self, prompt, max_tokens=12, *, salt="", adapter=0, **params):
        request = self.admission.make_request(
            list(prompt.encode()),
            GenerationParams(max_tokens=max_tokens, **{"seed": 0, **params}),
            arrival_time=asyncio.get_running_loop().time(),
            options=RequestOptions(cache_salt=salt, adapter=adapter),
        )
        self.fleet.submit(request)
        return request.id

    async def ended(self, *ids):
        await self.until(lambda: all(i in self.ends for i in ids))

    def text(self, request_id, sample=0):
        return bytes(self.tokens[request_id, sample]).decode()

    def member_of(self, plane):
        return next(m for m in self.fleet.members if m.facts.address == plane.address)


async def kill(plane):
    await asyncio.to_thread(plane.kill)
