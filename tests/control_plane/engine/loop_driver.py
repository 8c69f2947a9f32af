"""An engine loop over a real link to the fake compute plane, turn by turn on the test's thread."""

from __future__ import annotations

import threading

from control_plane.config import SchedulingLimits
from control_plane.core.generation_params import GenerationParams
from control_plane.core.request import Request
from control_plane.engine.bring_up import connect, make_loop
from control_plane.engine.compute_client import ComputeClient
from control_plane.engine.loop import LoopOptions


class Driver:
    """A loop on the caller's thread, and what it published: the tokens of each sample."""

    def __init__(self, address, *, limits=None, clock=None, factories=None, **options):
        self.client = ComputeClient(address, controller="test")
        self.connected = connect(self.client, limits or SchedulingLimits(), stop=threading.Event())
        self.tokens, self.ends, self.links, self.news = {}, {}, [], []
        self.samples, self.reasons = {}, {}
        extra = {"clock": clock} if clock else {}
        self.loop = make_loop(
            self.client,
            self.connected,
            self.collect,
            options=LoopOptions(**options),
            factories=factories,
            on_link_change=self.links.append,
            **extra,
        )
        self.next_id = 0

    def collect(self, updates):
        self.news.append(list(updates))
        for update in updates:
            assert update.request_id not in self.ends
            if update.sample_index == 0:
                self.tokens.setdefault(update.request_id, []).extend(update.new_token_ids)
            key = (update.request_id, update.sample_index)
            assert key not in self.reasons
            self.samples.setdefault(key, []).extend(update.new_token_ids)
            if update.finish_reason is not None:
                self.reasons[key] = update.finish_reason
            if update.end is not None:
                self.ends[update.request_id] = update.end

    def submit(self, prompt, max_tokens=12, seed=0, *, n=1, form=None, asking=None, **options):
        """`asking`: further parameters by name."""
        self.next_id += 1
        params = GenerationParams(
            max_tokens=max_tokens, seed=seed, n=n, structured_outputs=form, **(asking or {})
        )
        self.loop.inbox.submit(
            Request(
                self.next_id,
                list(prompt.encode()),
                params,
                eos_token_ids=frozenset(self.connected.assets.eos_token_ids),
                **options,
            )
        )
        return self.next_id

    def run(self):
        self.run_until(lambda: not self.loop.has_pending_work)

    def run_until(self, condition):
        for _ in range(2000):
            if condition():
                return
            self.loop.step()
        raise AssertionError("it did not come to it in 2000 turns")

    def text(self, request_id, sample=0):
        return bytes(self.samples[request_id, sample]).decode()
