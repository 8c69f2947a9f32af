"""Constraints that follow a grammar token by token.

A token is taken in at once, some microseconds; what may follow it takes 10 µs to 1 ms, and at most
what the limits of `control_plane.structured.grammars` leave, in the library's own threads without
the interpreter lock where there are several.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from control_plane.core.constraint import Draft
from control_plane.structured.refusals import reason_of

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

    from control_plane.core.constraint import Constraint
    from control_plane.structured.habits import Habits

UInt8Array = npt.NDArray[np.uint8]

MAX_DRAFTING_S: Final = 0.002
"""CPU time behind which a matcher makes no more drafts for a step. Where a single one took so
long, it makes none for `REST_TOKENS` of its text: a hostile form's takes up to 90 ms, seven of a
usual one 0.1 to 0.4."""

REST_TOKENS: Final = 64


class Matcher:
    """A `Constraint` by a grammar. `ignore_eos`: the text ends where nothing else may follow.

    `habits`: of its form. `last_token`: −1 before the first. `drafts`: behind it, None: it was not
    asked for any.
    """

    __slots__ = ("allowed_tokens", "constrainer", "drafts", "error", "grammar", "habits",
                 "ignore_eos", "is_complete", "last_token", "num_resting")  # fmt: skip

    def __init__(
        self,
        grammar: LLMatcher,
        allowed_tokens: bytes,
        constrainer: Matchers,
        habits: Habits,
        *,
        ignore_eos: bool,
    ) -> None:
        self.grammar = grammar
        self.constrainer = constrainer
        self.habits = habits
        self.ignore_eos = ignore_eos
        self.allowed_tokens = allowed_tokens
        self.is_complete = False
        self.error: str | None = None
        self.last_token = -1
        self.drafts: Sequence[Draft] | None = None
        self.num_resting = 0

    def draft(self, most: int) -> Sequence[Draft]:
        """Return what is likely to come, at most `most` tokens."""
        if self.num_resting > 0:
            return ()
        self.drafts = self.constrainer.draft(self, most)
        return self.drafts

    def note(self, tokens: Sequence[int]) -> None:
        """Learn from tokens that came, where drafts are asked for: in crowds it costs nothing."""
        if self.drafts is not None:
            choices = (self.allowed_tokens, *(draft.allowed_tokens for draft in self.drafts))
            for allowed, token in zip(choices, tokens, strict=False):
                self.habits.learn(self.last_token, allowed, token)
                self.last_token = token
        self.last_token = tokens[-1]
        self.drafts = None
        self.num_resting = max(0, self.num_resting - len(tokens))


class Matchers:
    """Makes matchers and advances them together; a `Constrainer`.

    `num_threads`: of the library, for the masks of several rows.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int], num_threads: int) -> None:
        self._num_bytes = -(-vocab_size // 8)
        self._num_words = -(-vocab_size // 32)
        self._num_threads = num_threads
        self._executor: LLExecutor | None = None
        self._eos = np.zeros(self._num_bytes, dtype=np.uint8)
        for token in eos_token_ids:
            self._eos[token // 8] |= 1 << token % 8

    def make(
        self, grammar: LLMatcher, allowed: bytes, habits: Habits, *, ignore_eos: bool
    ) -> Matcher:
        """Return a matcher that begins where `grammar` does, with what may come first."""
        made = Matcher(grammar, b"", self, habits, ignore_eos=ignore_eos)
        self._put(made, np.frombuffer(allowed, dtype=np.uint8))
        return made

    def catch_up(self, matcher: Matcher, tokens: Sequence[int]) -> None:
        """Take in the tokens of a text that is known, and compute only what may follow all."""
        if tokens:
            self.advance([(matcher, tokens)])

    def advance(self, taken: Sequence[tuple[Constraint, Sequence[int]]]) -> None:
        """Take in new tokens, and compute only what may follow all of them."""
        going_on = []
        for matcher, tokens in taken:
            if not isinstance(matcher, Matcher):
                raise TypeError(f"{type(matcher).__name__} is no constraint of this constrainer")
            grammar = matcher.grammar
            matcher.note(tokens)
            if not all(map(grammar.consume_token, tokens)) or grammar.is_error():
                matcher.error = reason_of(grammar.get_error())
            elif grammar.is_stopped():
                matcher.is_complete = True
            else:
                going_on.append(matcher)
        if going_on:
            self._fill(going_on)

    def draft(self, matcher: Matcher, most: int) -> list[Draft]:
        """Return what is likely to come, by a copy: what may not be there is no fault of the text.

        They share a lexer: what one of them takes of its states is taken.
        """
        begun = time.thread_time()
        drafts: list[Draft] = []
        grammar: LLMatcher | None = None
        before, allowed = matcher.last_token, matcher.allowed_tokens
        while len(drafts) < most and time.thread_time() - begun < MAX_DRAFTING_S:
            token = matcher.habits.draft(before, allowed)
            if token is None:
                break
            grammar = grammar or matcher.grammar.deep_copy()
            if not grammar.consume_token(token) or grammar.is_stopped():
                break
            mask = np.zeros(self._num_words, dtype=np.int32)
            grammar.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            bits = mask.view(np.uint8)[: self._num_bytes]
            others = bits & ~self._eos
            if grammar.is_error() or not others.any():
                break
            before, allowed = token, (others if matcher.ignore_eos else bits).tobytes()
            drafts.append(Draft(token, allowed))
        if time.thread_time() - begun >= MAX_DRAFTING_S * max(1, len(drafts)):
            matcher.num_resting = REST_TOKENS
        return drafts

    def _fill(self, matchers: Sequence[Matcher]) -> None:
        """Compute what may follow."""
        masks = np.zeros((len(matchers), self._num_words), dtype=np.int32)
        if len(matchers) == 1:
            matchers[0].grammar.unsafe_compute_mask_ptr(masks.ctypes.data, masks.nbytes)
        else:
            if self._executor is None:
                from llguidance import LLExecutor

                self._executor = LLExecutor(self._num_threads)
            self._executor.unsafe_compute_mask_ptr(
                [(matcher.grammar, place) for place, matcher in enumerate(matchers)],
                masks.ctypes.data,
                4 * self._num_words,
                len(matchers),
            )
        for matcher, mask in zip(matchers, masks, strict=True):
            if matcher.grammar.is_error():
                matcher.error = reason_of(matcher.grammar.get_error())
            else:
                self._put(matcher, mask.view(np.uint8)[: self._num_bytes])

    def _put(self, matcher: Matcher, allowed: UInt8Array) -> None:
        """Note what may follow; a text behind which only an end may is complete."""
        others = allowed & ~self._eos
        matcher.allowed_tokens = (others if matcher.ignore_eos else allowed).tobytes()
        if not others.any():
            matcher.is_complete = matcher.grammar.is_accepting()
            if not matcher.is_complete:
                matcher.error = "no token may follow"
