"""All that may befall a scheduler before its model plane, and how it comes to an end."""

from __future__ import annotations

import pytest

from control_plane.core.errors import RequestNeverFitsError
from control_plane.core.generation_params import GenerationParams
from control_plane.core.request import FinishReason, Request, RequestState
from control_plane.core.scheduler import RequestOutput
from control_plane.core.token_masks import all_but
from planes.errors import SchedulerError, ValidationError
from tests.properties.scheduler_promises import Promises, Sent
from tests.properties.toy_constraint import VOCABULARY, Rule, ToyConstraint
from tests.properties.toy_model import EOS


class World(Promises):
    """What happens, one event at a time; the promises are looked at with every step."""

    # --- what befalls it ---

    def make(self, prompt: list[int], max_tokens: int, **options: object) -> Request:
        number = self.next_number()
        width = options.pop("beam_width", None)
        min_tokens = int(str(options.pop("min_tokens", 0))) * (width is None)
        ignore_eos = bool(options.pop("ignore_eos", min_tokens == 0))
        n = int(str(options.pop("n", 1)))
        is_constrained = bool(options.pop("constrained", False)) and width is None
        if is_constrained:
            options["constraints"] = tuple(ToyConstraint(number) for _ in range(n))
        if width is not None:
            n = min(n, int(str(width)))
        self.salts[number] = str(options.get("cache_salt", ""))
        self.adapters[number] = int(str(options.get("adapter", 0)))
        request = Request(
            id=7 + 3 * number,
            input_tokens=prompt,
            params=GenerationParams(
                max_tokens=max_tokens,
                seed=number,
                ignore_eos=ignore_eos,
                n=n,
                beam_width=width,  # type: ignore[arg-type]
                early_stopping=bool(number % 2),
                min_tokens=min(min_tokens, max_tokens),
            ),
            eos_token_ids=EOS,
            arrival_time=self.now,
            **options,  # type: ignore[arg-type]
        )
        self.know(request)
        return request

    def know(self, request: Request) -> None:
        """Note what its samples may say, as the admission would and as the plane will be told."""
        ends = request.end_token_ids
        if request.params.min_tokens > len(request.output_tokens) and ends:
            request.open_tokens = all_but(ends, VOCABULARY)
        self.rules[request.params.seed] = Rule.of(request)

    def next_number(self) -> int:
        return len(self.requests)

    def submit(self, prompt: list[int], max_tokens: int, **options: object) -> Request | None:
        request = self.make(prompt, max_tokens, **options)
        total = len(prompt) + max_tokens
        width = request.params.beam_width or 1
        if total > self.config.max_model_len:
            with pytest.raises(ValidationError):
                self.scheduler.add_request(request)
        elif self.blocks_of(request) > self.memory.num_blocks:
            with pytest.raises(RequestNeverFitsError):
                self.scheduler.add_request(request)
        elif width > self.config.num_slots:
            with pytest.raises(ValidationError, match="beam_width must be at most"):
                self.scheduler.add_request(request)
        else:
            self.scheduler.add_request(request)
            self._expect(request, ())
            return request
        return None

    def blocks_of(self, request: Request) -> int:
        """What the request needs alone: its prompt's full blocks once, the rest for each beam.

        Where there are states, all for each beam.
        """
        num_each = -(-(request.max_total_len - 1) // self.memory.block_size)
        num_shared = request.num_prompt_tokens // self.memory.block_size
        num_shared *= self.config.num_states == 0
        return num_shared + (num_each - num_shared) * (request.params.beam_width or 1)

    def fork(self, parent: Request, max_tokens: int) -> None:
        child = self.make(
            list(parent.input_tokens),
            max_tokens,
            cache_salt=parent.cache_salt,
            adapter=parent.adapter,
        )
        given = tuple(parent.output_tokens)
        total = child.max_total_len
        fits = -(-(total - 1) // self.memory.block_size) <= self.memory.num_blocks
        if (
            parent.state.is_final
            or parent.params.n > 1
            or parent.params.beam_width is not None
            or parent.constraints
            or len(given) >= max_tokens
            or total > self.config.max_model_len
            or not fits
        ):
            with pytest.raises((SchedulerError, ValidationError, RequestNeverFitsError)):
                self.scheduler.fork(parent.id, child)
        else:
            self.has_forked = True
            self.scheduler.fork(parent.id, child)
            self._expect(child, given)

    def _expect(self, request: Request, given: tuple[int, ...]) -> None:
        self.requests.append(request)
        self.given[request.id] = given
        for index in range(request.params.n):
            self.received[request.id, index] = list(given)

    def cancel(self, request: Request) -> None:
        was_final = request.state.is_final
        event = self.scheduler.cancel(request.id, self.now)
        assert (event is None) == was_final
        if event is not None:
            assert event.state is RequestState.CANCELLED
            self.take(event)

    def end_sample(self, request: Request, index: int, num_tokens: int) -> None:
        """Let a sample have stopped after some of its tokens."""
        sample = request.id, index
        num_tokens = min(num_tokens, len(self.received[sample]))
        has_ended = request.state.is_final or sample in self.finished
        event = self.scheduler.end_sample(request.id, index, num_tokens, self.now)
        if event is None:
            is_unborn = not self.received[sample]
            assert has_ended or is_unborn or request.params.beam_width is not None
            return
        assert not has_ended
        assert event.finish_reason is FinishReason.STOP
        del self.received[sample][num_tokens:]
        self.stopped.add(sample)
        self.take(event)

    def send(self, *, fail_row: int | None = None, refuse: bool = False) -> bool:
        """Schedule and send one step; whether there was one."""
        could_decode = self.decode_ready()
        output = self.scheduler.schedule(self.now)
        if output is None:
            assert self.in_flight or not self.scheduler.has_pending_work(), "stuck"
            return False
        self.check_output(output, could_decode)
        ids = output.decode_request_ids + output.prefill_request_ids
        if refuse:
            self.faulted.update(ids)
        elif fail_row is not None and fail_row < len(ids):
            self.faulted.add(ids[fail_row])
        result, written = self.plane.execute(output.batch, fail_row=fail_row, refuse=refuse)
        if result.refusal is not None:
            self.faulted.update(ids)
        self.in_flight.append(Sent(output, result, written))
        return True

    def commit(self) -> None:
        sent = self.in_flight.popleft()
        for event in self.scheduler.commit(sent.result, self.now):
            self.take(event)
        if sent.result.refusal is not None:
            self.lose_epoch(sent.output.batch.step_id)

    def lose_epoch(self, last_step: int) -> None:
        """Open a new session, with nothing in it."""
        self.in_flight.clear()
        self.scheduler.lose_epoch(last_step)
        self.plane = self.new_plane(last_step)
        stats = self.kv.get_memory_stats()
        assert (stats.used_blocks, stats.cached_blocks) == (0, 0)
        assert self.scheduler.get_stats().num_host_blocks_used == 0
        assert self.scheduler.get_stats().num_kept_states == 0

    def run_steps(self, num_steps: int, depth: int) -> None:
        for _ in range(num_steps):
            while len(self.in_flight) < depth and self.send():
                pass
            if self.in_flight:
                self.commit()

    def take(self, event: RequestOutput) -> None:
        assert event.request_id not in self.final, "a final event comes once, and last"
        sample = event.request_id, event.sample_index
        if event.state in (RequestState.CANCELLED, RequestState.FAILED):  # of all its samples
            assert not event.new_token_ids
            self.final[event.request_id] = event
            return
        assert sample not in self.finished, "a sample ends once"
        self.received[sample].extend(event.new_token_ids)
        assert event.new_token_ids or event.finish_reason is not None
        if event.finish_reason is not None:
            self.finished[sample] = event
        if event.state.is_final:
            self.final[event.request_id] = event

    # --- the end ---

    def finish(self, *, depth: int) -> None:
        """Run until nothing is left, in a bounded number of steps; compare with alone."""
        work = sum(r.max_total_len * (r.params.beam_width or r.params.n) for r in self.requests)
        bound = 50 + 20 * work
        while self.scheduler.has_pending_work():
            bound -= 1
            assert bound > 0, "no progress"
            while len(self.in_flight) < depth and self.send():
                pass
            if self.in_flight:
                self.commit()
            self.check_invariants()
        assert not self.in_flight
        assert self.kv.get_memory_stats().used_blocks == 0
        assert self.scheduler.get_completed() == [
            r for e in self.final for r in self.requests if r.id == e
        ]
        for request in self.requests:
            for index in range(request.params.n):
                self.compare_with_alone(request, index)
        self.check_nothing_is_left()

    def check_nothing_is_left(self) -> None:
        """One more request, and the plane knows no slot and no host block but its own."""
        self.submit([1], 1)
        while self.scheduler.has_pending_work():
            self.send()
            assert len(self.plane.slots) == 1
            self.commit()
        assert self.scheduler.get_stats().num_host_blocks_used == 0
