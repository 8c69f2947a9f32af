"""Which tokens of which sequence the next step computes.

One rule, no phases: each step lets `num_computed_tokens` of a running sequence catch up with its
`num_tokens`. *Decode* is the row whose only missing token is the newest one; everything else, a
prompt or a preempted sequence that goes on, is *prefill*.
"""

from __future__ import annotations

from control_plane.core.arrivals import Arrivals
from control_plane.core.drafting import Drafting
from control_plane.core.giving_way import GivingWay
from control_plane.core.interface import SchedulerConfig
from control_plane.core.kv_interface import KVCacheManagerProtocol
from control_plane.core.queue import WaitingQueue
from control_plane.core.request import Sequence
from control_plane.core.request_table import RequestTable
from control_plane.core.running import RunningSet
from control_plane.core.step import Step

# A step that reserves room for prefill keeps one row and this part of its tokens for it.
_RESERVED_TOKEN_DIVISOR = 4
QUICK_START_TOKENS = 1 << 18
"""Tokens that slots are started with in a step, about: to send so many takes some 25 ms, for which
everybody waits."""
MOST_START_TOKENS = 1 << 22
"""The same where a start that is put off costs more: what a message may hold."""


class StepComposer:
    """Puts steps together, within the limits of `config`."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManagerProtocol,
        running: RunningSet,
        queue: WaitingQueue,
        requests: RequestTable,
        drafting: Drafting,
    ) -> None:
        self._config = config
        self._kv = kv_cache
        self._block_size = kv_cache.block_size
        num_blocks = kv_cache.get_memory_stats().total_blocks
        self._threshold_blocks = int(config.memory_threshold * num_blocks)
        self._running = running
        self._arrivals = Arrivals(kv_cache, running)
        self._giving_way = GivingWay(kv_cache, running)
        self._queue = queue
        self._requests = requests
        self._drafting = drafting
        self._steps_without_prefill = 0

    def compose(self, step_id: int) -> Step:
        """Put the next step together; it may be empty.

        Decode rows come first, those served longest ago first among them; then prefill in order,
        within what is left of the step. If decoding filled `prefill_patience` steps, a row and
        some tokens are kept for prefill, until it had a row. Where it fills all rows, there are
        more of them, and tokens for the others, prefill has one at once, as if there were a stream
        less.
        """
        running = self._running
        running.begin_step()
        self._arrivals.begin_step()
        max_rows = self._config.max_batch_size
        max_tokens = self._config.max_total_tokens
        step = Step(step_id, self._config.embedding_size)
        candidates = list(running.decoding.values())
        if len(candidates) > max_rows:  # among equals those served longest ago stay first
            candidates.sort(key=lambda seq: seq.request.priority)
        has_prefill_work = len(running.prefilling) > 0 or len(self._queue) > 0
        patience = self._config.prefill_patience
        share = -(-max_tokens // _RESERVED_TOKEN_DIVISOR)
        fills_rows = len(candidates) >= max_rows > patience and max_tokens - share >= max_rows - 1
        if has_prefill_work and (fills_rows or self._steps_without_prefill >= patience):
            num_seen = self._book_decodes(step, candidates, max_rows - 1, max_tokens - share)
        else:
            num_seen = self._book_decodes(step, candidates, max_rows, max_tokens)
        if has_prefill_work or len(running.prefilling) > 0 or self._queue.has_next:
            is_full = self._token_budget(step) == 0
            self._book_prefills(step)
            self._admit(step)
            if step.num_prefill_rows > 0:
                self._steps_without_prefill = 0
            else:
                if is_full:  # else memory was short, and waiting gives no right to others' blocks
                    self._steps_without_prefill += 1
                # What was reserved, if anything, found no use.
                self._book_decodes(step, candidates[num_seen:], max_rows, max_tokens)
        else:
            self._steps_without_prefill = 0
            self._drafting.add(step)
        if running.states is not None:
            for seq, index in step.fills:
                running.states.keep_answer(seq, (index + 1) * self._block_size)
        return step

    def _book_decodes(
        self, step: Step, candidates: list[Sequence], max_rows: int, max_tokens: int
    ) -> int:
        """Book rows for `candidates` until the step has `max_rows` or `max_tokens`.

        Returns how many of them were looked at. The loop runs once for every token there is, so
        it does by itself what `_book` does, and leaves to `_make_ready` what is rare.
        """
        running, rows, positions, fills = self._running, step.rows, step.positions, step.fills
        block_size = self._block_size
        last_place = block_size - 1
        num_before = len(rows)
        room = max(0, min(max_rows, max_tokens) - num_before)
        in_turn = candidates
        if any(seq.request.adapter for seq in candidates) and self._kv.can_allocate(room):
            # Neighbours with one adapter share in reading it; who is served is the same. Where
            # blocks are short, who takes them is for the order to say.
            served = sorted(candidates[:room], key=lambda seq: seq.request.adapter)
            candidates = [*served, *candidates[room:]]
        num_seen = 0
        for seq in candidates if room > 0 else ():
            position = seq.num_computed_tokens
            place = position % block_size
            num_seen += 1
            if (place == 0 or seq.is_special) and not self._make_ready(step, seq):
                continue
            if place == last_place and seq.chain is not None:
                fills.append((seq, position // block_size))
            rows.append(seq)
            positions.append(position)
            seq.num_computed_tokens = position = position + 1
            seq.num_in_flight += 1
            seq.num_pending_tokens += 1
            if position == seq.max_computed_tokens:
                running.drain(seq)  # its last token is on the way
            room -= 1
            if room == 0:
                break
        booked = rows[num_before:] if num_before else rows
        step.num_decode_rows = len(rows)
        step.sampled.extend(booked)
        running.num_kv_tokens += len(booked)
        if len(booked) < len(candidates):  # who was not served stands before those who were
            decoding = running.decoding
            if in_turn is not candidates:
                has_row = {seq.seq_id for seq in booked}
                booked = [seq for seq in in_turn if seq.seq_id in has_row]
            for seq in booked:
                if decoding.pop(seq.seq_id, None) is not None:
                    decoding[seq.seq_id] = seq
        return num_seen

    def _make_ready(self, step: Step, seq: Sequence) -> bool:
        """Give a decode row what it lacks: a block, a tail of its own, a started slot.

        False: it has no row in this step. A constrained one has none before its newest token is
        known.
        """
        running = self._running
        is_constrained = seq.constraint is not None
        if seq.seq_id not in running.decoding or (is_constrained and seq.num_pending_tokens):
            return False  # it was preempted by a row before, or waits for its token
        position = seq.num_computed_tokens
        step.has_constraints |= is_constrained or position + 1 < seq.first_end
        new_block_ids: tuple[int, ...] = ()
        if position % self._block_size == 0:
            new_block_ids = running.grow_by_one(seq)
            if not new_block_ids:
                return False
            if not seq.is_special:  # nothing else is ever missing, nearly always
                step.add_new_blocks(new_block_ids)
                return True
        elif seq.shares_tail:
            owned = running.own_tail(seq, step.step_id)
            if owned is False:
                if not seq.is_on_plane:  # now, and copied in the next step
                    self._start(step, seq)
                    step.unsampled.append(seq)  # it is in the step, though without a row
                    seq.num_in_flight += 1
                return False
            if owned is not True:
                step.add_copy(owned)
        seq.shares_tail = False
        if seq.needs_start:
            self._start(step, seq)
        else:
            step.add_new_blocks(new_block_ids)
        seq.mark()
        if seq.is_beam:
            del running.decoding[seq.seq_id]
        return True

    def _start(self, step: Step, seq: Sequence) -> None:
        """Let the step start the sequence's slot."""
        step.add_start(seq, self._kv.get_block_table(seq.seq_id) or ())

    def _book_prefills(self, step: Step) -> None:
        """Book the next chunk of each sequence under way, in their order.

        A waiting one that comes before is started first: the rest of a long prompt takes all tokens
        of many steps.
        """
        for seq in sorted(self._running.prefilling.values(), key=lambda s: s.order):
            self._admit(step, before=seq)
            budget = self._token_budget(step)
            if budget == 0:
                return
            if seq.seq_id not in self._running.prefilling:  # preempted by a row before
                continue
            if not self._takes(step, seq):
                return
            num_missing = seq.num_tokens - seq.num_computed_tokens
            num_tokens = self._cut(
                seq, seq.state_places, seq.num_computed_tokens, min(num_missing, budget)
            )
            new_block_ids = self._running.grow(seq, seq.num_computed_tokens + num_tokens)
            if new_block_ids is None:
                return
            step.add_new_blocks(new_block_ids)
            self._book_prefill(step, seq, num_tokens, samples=num_tokens == num_missing)

    def _admit(self, step: Step, before: Sequence | None = None) -> None:
        """Start waiting sequences, in order, while rows, tokens, slots and memory last.

        `before`: only those that come before this one. Where the first has no room, those of lower
        priorities give way, one after the other.
        """
        running, queue, arrivals = self._running, self._queue, self._arrivals
        if not self._is_next(before) or running.is_preempting:  # nobody passes the preempted
            return
        if self._token_budget(step) == 0:
            return
        projected_blocks = arrivals.projected_blocks()
        while self._is_next(before):
            budget = self._token_budget(step)
            seq = queue.peek()
            if budget == 0:
                return
            lacks_slot = running.slots.num_free == 0
            if lacks_slot and not self._giving_way.less_urgent(seq):
                return
            if not self._takes(step, seq) or not self._has_room_for_start(step, seq):
                return
            arrival = arrivals.look_up(seq)
            if arrival is None:
                return
            num_tokens = self._cut(
                seq, arrival.state_places, arrival.num_computed, min(arrival.num_missing, budget)
            )
            num_wanted = (
                running.blocks_for(seq.num_known_tokens + 1)
                - arrival.num_in_use
                + len(seq.group.unborn)
            )
            num_lacking = arrivals.num_lacking(arrival, num_tokens)
            if seq.group.num_running < len(running):
                num_beyond = projected_blocks + num_wanted - self._threshold_blocks
                num_lacking = max(num_lacking, num_beyond)
            if lacks_slot or num_lacking > 0:
                if not self._giving_way.make_way(seq, num_lacking):
                    return
                projected_blocks = arrivals.projected_blocks()
                continue
            projected_blocks += num_wanted
            queue.pop()
            table = running.admit(seq, arrival, num_tokens)
            step.add_start(seq, table)
            self._book_prefill(step, seq, num_tokens, samples=num_tokens == arrival.num_missing)

    def _cut(self, seq: Sequence, places: tuple[int, ...], first: int, num_tokens: int) -> int:
        """Return how many of so many tokens a row has that ends where a state is to be left."""
        states = self._running.states
        if states is None or not places:
            return num_tokens
        return states.cut(seq.chain, places, first, num_tokens)

    def _is_next(self, before: Sequence | None) -> bool:
        """Whether a sequence waits that comes before this one; None: whether any does."""
        queue = self._queue
        return queue.has_next and (before is None or queue.peek().order < before.order)

    def _takes(self, step: Step, seq: Sequence) -> bool:
        """Whether the result of a step has room for what a sequence wants of it."""
        return seq.request.embedding is None or step.num_embeddings < self._config.max_embeddings

    def _has_room_for_start(self, step: Step, seq: Sequence, *, is_dear: bool = False) -> bool:
        """Whether a step may start a sequence: the first, and others while the message is small.

        `is_dear`: if it is put off, its tokens are computed anew. Beams that are started in every
        step leave room for the first of the others.
        """
        if step.num_start_tokens == 0:
            return True
        is_first = step.num_prefill_rows == 0
        most = MOST_START_TOKENS if is_dear or is_first else QUICK_START_TOKENS
        return step.num_start_tokens + seq.num_known_tokens <= most

    def _token_budget(self, step: Step) -> int:
        """Return how many tokens one more row of prefill may have in the step."""
        config = self._config
        if step.num_places >= config.max_batch_size:
            return 0
        budget = config.max_total_tokens - step.num_tokens
        if config.max_prefill_tokens is not None:
            budget = min(budget, config.max_prefill_tokens - step.num_prefill_tokens)
        return budget

    def _book_prefill(self, step: Step, seq: Sequence, num_tokens: int, *, samples: bool) -> None:
        """Put a row into the step; its blocks are allocated."""
        running = self._running
        step.add_prefill_row(seq, num_tokens, samples=samples)
        first = seq.num_computed_tokens
        seq.num_computed_tokens += num_tokens
        seq.num_in_flight += 1
        running.num_kv_tokens += num_tokens
        running.remember(seq, first)
        if seq.state_places and running.states is not None:
            running.states.keep(seq)
        if not samples:
            return
        if seq.request.embedding is not None:  # this was the last row of it
            running.drain(seq)
            return
        seq.num_pending_tokens += 1
        if seq.num_computed_tokens == seq.max_computed_tokens:
            running.drain(seq)  # its last token is on the way
        elif seq.is_beam:
            del running.prefilling[seq.seq_id]
        else:
            del running.prefilling[seq.seq_id]
            running.decoding[seq.seq_id] = seq
        if seq.group.unborn:
            self._bear_twins(step, seq)

    def _bear_twins(self, step: Step, seq: Sequence) -> None:
        """Begin the other samples of a request whose prompt is computed by the row added last.

        Their first token is sampled from the same logits. Those for whom the step has no place or
        the plane no slot wait in the queue.
        """
        running, group = self._running, seq.group
        num_tokens = seq.num_computed_tokens
        for twin in self._requests.bear(group):
            table = None
            has_room = running.start_prefixes or self._has_room_for_start(
                step, twin, is_dear=seq.chain is None
            )
            if has_room and step.num_places < self._config.max_batch_size:
                table = running.fork(seq, twin, num_tokens, num_sent=step.positions[-1])
            if table is None:
                self._queue.add(twin)
                continue
            if seq.chain is not None:
                twin.chain = seq.chain.fork(twin.output_tokens)
            step.add_start(twin, table)
            step.add_twin(twin)
            twin.num_in_flight = twin.num_pending_tokens = 1
            if num_tokens == twin.max_computed_tokens:
                running.drain(twin)
            else:
                running.decoding[twin.seq_id] = twin
