"""An engine loop over a real link to the fake compute plane, turn by turn on the test's thread."""

from __future__ import annotations

import threading
from collections import deque

from control_plane.config import SchedulingLimits
from control_plane.core.generation_params import GenerationParams
from control_plane.core.request import Request
from control_plane.engine.bring_up import connect, make_loop
from control_plane.engine.compute_client import ComputeClient
from control_plane.engine.loop import LoopOptions
from control_plane.errors import LinkError


class WatchedLink(ComputeClient):
    """The link; a test sees what is under way on it, and decides when something comes or breaks.

    `is_deaf`: results stay where they are. `on_result`: called with each, before the loop has it.
    `waits_s`: what the loop had patience for when it last listened.
    """

    def __init__(self, address):
        super().__init__(address, controller="test")
        self.under_way = deque()
        self.is_deaf, self.on_result, self.waits_s = False, None, None
        self._loss = None

    def lose(self):
        """Be lost when the loop listens next."""
        self._loss = LinkError("lost")

    def send(self, batch):
        super().send(batch)
        self.under_way.append(batch)

    def receive(self, timeout_s):
        self.waits_s = timeout_s
        loss, self._loss = self._loss, None
        if loss is not None:
            raise loss
        result = None if self.is_deaf else super().receive(timeout_s)
        if result is not None:
            self.under_way.popleft()
            if self.on_result is not None:
                self.on_result()
        return result

    def close(self):
        super().close()
        self.under_way.clear()


class Driver:
    """A loop on the caller's thread, and what it published: the tokens of each sample."""

    def __init__(self, address, *, limits=None, clock=None, factories=None, **options):
        self.client = WatchedLink(address)
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

    def send(self):
        """Run a turn in which no result comes: what can be sent is."""
        self.client.is_deaf = True
        self.loop.step()
        self.client.is_deaf = False

    def lose_link(self):
        """Run a turn in which the link is lost."""
        self.client.lose()
        self.loop.step()

    def forget(self, request_id):
        """Forget all that was published of a request, and the order of the news."""
        self.news.clear()
        del self.tokens[request_id], self.ends[request_id]
        for table in (self.samples, self.reasons):
            for key in [key for key in table if key[0] == request_id]:
                del table[key]

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
