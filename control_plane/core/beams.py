"""The beams of a search as sequences: forked and dropped as the search says."""

from __future__ import annotations

from control_plane.core.beam import Continuation
from control_plane.core.interface import RequestOutput
from control_plane.core.queue import WaitingQueue
from control_plane.core.request import Group, RequestState, Sequence
from control_plane.core.request_table import RequestTable
from control_plane.core.running import RunningSet


class Beams:
    """Lets a search go on once the log-probabilities of all its beams have come.

    Every beam of the next step is the continuation of one of this step by a token. The first of
    several continuations of a beam stays in its sequence; the others become sequences of their own
    that share its blocks, in the places of those beams that have none. A token that the plane
    sampled by itself counts for nothing: each slot is started again with the tokens of its beam.
    """

    __slots__ = ("_queue", "_requests", "_running")

    def __init__(self, requests: RequestTable, running: RunningSet, queue: WaitingQueue) -> None:
        self._requests = requests
        self._running = running
        self._queue = queue

    def advance(self, group: Group) -> list[RequestOutput]:
        """Go on if every beam has its log-probabilities; the events of the end, if it is that."""
        search, request = group.search, group.request
        logprobs = [seq.logprobs for seq in group.beams if seq.logprobs is not None]
        if search is None or len(logprobs) < len(group.beams):
            return []
        if request.state is not RequestState.DECODE:
            request.enter(RequestState.DECODE, self._running.now)
        continuations = search.step(logprobs)
        if not continuations:
            return self._requests.answer(group, search.finished)
        self._reshape(group, continuations)
        return []

    def _reshape(self, group: Group, continuations: list[Continuation]) -> None:
        """Fork and drop sequences so that each continuation has one."""
        parents = {c.parent for c in continuations}
        for index, seq in enumerate(group.beams):
            seq.logprobs = None
            if index not in parents:
                self._requests.drop(seq)
        taken = {seq.sample_index for seq in group.sequences}
        places = (index for index in range(len(continuations)) if index not in taken)
        beams: list[Sequence] = []
        kept: set[int] = set()
        for continuation in continuations:
            parent = group.beams[continuation.parent]
            if continuation.parent in kept:
                beams.append(self._fork(parent, self._requests.sequence(group, next(places))))
            else:
                kept.add(continuation.parent)
                beams.append(parent)
        # Only now that all forks have copied the tokens of their parents.
        for seq, continuation in zip(beams, continuations, strict=True):
            seq.output_tokens.append(continuation.token_id)
            if seq in self._running:
                seq.needs_start = True
                if seq.is_on_plane:  # all is right there but for the token that it sampled
                    num_tokens = seq.num_computed_tokens
                    self._running.set_origin(seq, seq, num_tokens, num_tokens)
                seq.mark()
                self._running.decoding[seq.seq_id] = seq
            else:
                self._queue.add(seq)
        group.beams[:] = beams

    def _fork(self, parent: Sequence, child: Sequence) -> Sequence:
        """Let a new sequence go on from the parent's tokens, in its blocks if there is a slot."""
        child.output_tokens.extend(parent.output_tokens)
        child.was_admitted = True  # the request was, even if there is no slot for this one now
        self._running.fork(parent, child, parent.num_computed_tokens)
        if parent.chain is not None:
            child.chain = parent.chain.fork(child.output_tokens)
        return child
