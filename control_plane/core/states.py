"""States of sequences: copies for those that fork, and states that are kept to be found again.

In some models most layers have a state of fixed size in place of keys and values (ADR 0040). State
i is that of slot i: a row of the slot takes its tokens in, and nothing takes them back. So whoever
goes on from tokens that another has computed needs a copy of the state behind just these tokens.

The copies of a batch run before its rows, one after the other. So a state that a row of a step
makes is copied in the step after it, and what happens to its slot between the two does not matter:
whatever is written there comes later.
"""

from __future__ import annotations

from typing import Final

from control_plane.core.batch import StateCopy
from control_plane.core.prefix_cache import TokenChain
from control_plane.core.request import Sequence

MIN_STATE_TOKENS: Final = 128
"""Tokens that a kept state saves at least: a prompt is cut where one is kept, so it takes a step
more, and each state that is kept takes the place of another."""


class KeptStates:
    """Which states hold what: found by the digest of the full blocks they are behind.

    `ids`: the states there are. One that is added can be found from the next step on, whose batch
    fills it; the one that was used longest ago gives way.
    """

    __slots__ = ("_coming", "_found", "_free", "_ids")

    def __init__(self, ids: range) -> None:
        self._ids = ids
        self._free = list(reversed(ids))
        self._found: dict[bytes, int] = {}  # digest → state, used longest ago first
        self._coming: dict[bytes, int] = {}  # the same, filled by the next step

    def __len__(self) -> int:
        return len(self._found) + len(self._coming)

    def __contains__(self, digest: bytes) -> bool:
        """Whether the state is kept or about to be."""
        return digest in self._found or digest in self._coming

    @property
    def capacity(self) -> int:
        """How many states can be kept."""
        return len(self._ids)

    def can_find(self, digest: bytes) -> bool:
        """Whether the state can be copied in the step that is put together."""
        return digest in self._found

    def use(self, digest: bytes) -> int:
        """Return the state, which can be found, as the one that was used last."""
        state = self._found[digest] = self._found.pop(digest)
        return state

    def add(self, digest: bytes) -> int | None:
        """Return a state to be filled by the next step; None: this step has taken them all."""
        state = self.take()
        if state is not None:
            self._coming[digest] = state
        return state

    def take(self) -> int | None:
        """Return a state that nobody finds before it is `put` back; None: there is none."""
        if self._free:
            return self._free.pop()
        return self._found.pop(next(iter(self._found))) if self._found else None

    def put(self, state: int, digest: bytes | None) -> None:
        """Let a state that was taken be found; None: it holds nothing.

        The copy that fills it must have been sent, or stand before those of whoever finds it.
        """
        if digest is None or digest in self:
            self._free.append(state)
        else:
            self._found[digest] = state

    def begin_step(self) -> None:
        """Let those be found that the step now put together fills."""
        self._found.update(self._coming)
        self._coming.clear()

    def forget_all(self) -> None:
        """Let none be found. Copies into them may be under way; those of later ones come later."""
        self._found.clear()
        self._coming.clear()
        self._free = list(reversed(self._ids))


class SequenceStates:
    """The copies of states that the next steps carry, and what comes from which sequence.

    `kept_states`: those that may be kept; `min_tokens`: that one of them saves at least.

    Each state knows the stays (`Sequence.stay`) that it came through and that have not ended:
    should one fail, nothing that came through it is to be trusted.
    """

    __slots__ = (
        "_answers",
        "_block_size",
        "_due",
        "_later",
        "_min_tokens",
        "_origins",
        "_stays",
        "kept",
        "num_hits",
    )

    def __init__(
        self, kept_states: range, block_size: int, min_tokens: int = MIN_STATE_TOKENS
    ) -> None:
        self.kept = KeptStates(kept_states)
        self._block_size = block_size
        self._min_tokens = min_tokens
        self.num_hits = 0  # sequences that began with a state found
        self.reset()

    def reset(self) -> None:
        """Forget everything: the compute plane has."""
        self.forget_kept()
        self._due: list[StateCopy] = []  # of the step put together now, or else next
        self._later: list[StateCopy] = []  # of the step after it: of states that its rows make
        self._stays: set[int] = set()  # that have not ended
        self._origins: dict[int, frozenset[int]] = {}  # state → stays it came through

    def forget_kept(self) -> None:
        """Let nobody find a state; those of answers under way are kept anew."""
        self.kept.forget_all()
        self._answers: dict[int, tuple[int, int]] = {}  # seq_id → state, behind how many tokens

    def take_copies(self) -> tuple[StateCopy, ...]:
        """Return the copies of the step that is complete now."""
        copies = tuple(self._due)
        self._due, self._later = self._later, []
        self.kept.begin_step()
        return copies

    # Sequences

    def begin(self, seq: Sequence, num_blocks: int) -> None:
        """Let a sequence begin in its slot with the step now put together.

        `num_blocks`: full blocks that it begins behind, as `num_found_blocks` gave them; 0: anew.
        """
        self._enter(seq)
        if seq.chain is not None and num_blocks > 0:
            state = self.kept.use(seq.chain.block(num_blocks - 1).digest)
            self._due.append(StateCopy(state, seq.slot))
            self._origins[seq.slot] = self._origins[state] & self._stays
            self.num_hits += 1

    def fork(self, parent: Sequence, child: Sequence, *, is_behind_row: bool) -> None:
        """Let a sequence begin in its slot with the state of another.

        `is_behind_row`: that which the parent's row in the step now put together makes.
        """
        self._enter(child)
        self._copy_of(parent, child.slot, self._later if is_behind_row else self._due)

    def _enter(self, seq: Sequence) -> None:
        self._stays.add(seq.stay)
        self._origins[seq.slot] = frozenset()

    def _copy_of(self, seq: Sequence, destination: int, copies: list[StateCopy]) -> None:
        copies.append(StateCopy(seq.slot, destination))
        origins = self._origins[seq.slot] | {seq.stay}
        self._origins[destination] = origins & self._stays

    def end(self, seq: Sequence) -> None:
        """Let a sequence leave its slot, and the state kept of its answer be found.

        That is of no use where its last tokens were no part of the answer, or where it failed. A
        sequence leaves when its rows have been committed: the copy was sent, or is due.
        """
        self._stays.discard(seq.stay)
        state, place = self._answers.pop(seq.seq_id, (None, 0))
        if state is not None:
            chain = None if seq.discards or place > seq.num_known_tokens else seq.chain
            self.kept.put(state, None if chain is None else self._digest(chain, place))

    # States that are kept

    def num_found_blocks(self, chain: TokenChain, num_blocks: int) -> int:
        """Return behind how many of the chain's first blocks there is a state; 0: nowhere."""
        for num_found in range(num_blocks, 0, -1):
            if self.kept.can_find(chain.block(num_found - 1).digest):
                return num_found
        return 0

    def places(self, num_prompt_tokens: int, num_used: int, num_found: int) -> tuple[int, ...]:
        """Return behind how many tokens a sequence leaves a state.

        `num_used`: full blocks that it begins behind; `num_found`: those that were found.

        It does where the found ones end: somebody else began with them, so others will. And behind
        the last full block of the prompt, where the next turn of a conversation goes on. The last
        token is left out: it is always computed.
        """
        if self.kept.capacity == 0:
            return ()
        first = num_used * self._block_size
        last = (num_prompt_tokens - 1) // self._block_size * self._block_size
        places = []
        for place in (min(num_found * self._block_size, last), last):
            if place - first >= self._min_tokens:
                places.append(place)
                first = place
        return tuple(places)

    def cut(
        self, chain: TokenChain | None, places: tuple[int, ...], first: int, num_tokens: int
    ) -> int:
        """Return how many tokens of a row that begins at `first` it has if it ends at a place."""
        if chain is None:
            return num_tokens
        for place in places:
            if first < place <= first + num_tokens and not self._is_kept(chain, place):
                return place - first
        return num_tokens

    def keep(self, seq: Sequence) -> None:
        """Keep the state that the row of the sequence just booked makes, if it is of a place."""
        place, chain = seq.num_computed_tokens, seq.chain
        if place not in seq.state_places or chain is None or self._is_kept(chain, place):
            return
        state = self.kept.add(self._digest(chain, place))
        if state is not None:
            self._copy_of(seq, state, self._later)

    def keep_answer(self, seq: Sequence, place: int) -> None:
        """Keep the state behind a decode row just booked, which fills a block.

        Each takes the place of that before, and none is found before the sequence leaves its slot:
        then the next turn of a conversation goes on from the last one. Half of the states may be
        taken so. Not where a prompt's tokens are never those of an answer, nor for beams, which
        come and go.
        """
        chain, held = seq.chain, self._answers.get(seq.seq_id)
        if chain is None or chain.roles_matter or seq.is_beam:
            return
        state = None if held is None else held[0]
        if state is None:
            is_long = place - seq.request.num_prompt_tokens >= self._min_tokens
            if is_long and 2 * len(self._answers) + 2 <= self.kept.capacity:
                state = self.kept.take()
        if state is not None:
            self._answers[seq.seq_id] = state, place
            self._copy_of(seq, state, self._later)

    def _is_kept(self, chain: TokenChain, place: int) -> bool:
        return self._digest(chain, place) in self.kept

    def _digest(self, chain: TokenChain, place: int) -> bytes:
        """Return what names the state behind so many tokens, which fill their blocks."""
        return chain.block(place // self._block_size - 1).digest

    # Failures

    def came_through(self, slot: int, stays: set[int]) -> bool:
        """Whether the state of a slot came through one of these stays, before its own."""
        return not self._origins[slot].isdisjoint(stays)
