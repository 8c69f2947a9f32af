"""Constraints that follow a grammar token by token.

A token is taken in at once, some microseconds; what may follow it takes 10 µs to 1 ms, and at most
what the limits of `control_plane.structured.grammars` leave, in the library's own threads without
the interpreter lock where there are several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from control_plane.structured.refusals import reason_of

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

    from control_plane.core.constraint import Constraint

UInt8Array = npt.NDArray[np.uint8]


class Matcher:
    """A `Constraint` by a grammar. `ignore_eos`: the text ends where nothing else may follow."""

    __slots__ = ("allowed_tokens", "constrainer", "error", "grammar", "ignore_eos", "is_complete")

    def __init__(
        self, grammar: LLMatcher, allowed_tokens: bytes, constrainer: Matchers, *, ignore_eos: bool
    ) -> None:
        self.grammar = grammar
        self.constrainer = constrainer
        self.ignore_eos = ignore_eos
        self.allowed_tokens = allowed_tokens
        self.is_complete = False
        self.error: str | None = None


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

    def make(self, grammar: LLMatcher, allowed: bytes, *, ignore_eos: bool) -> Matcher:
        """Return a matcher that begins where `grammar` does, with what may come first."""
        made = Matcher(grammar, b"", self, ignore_eos=ignore_eos)
        self._put(made, np.frombuffer(allowed, dtype=np.uint8))
        return made

    def catch_up(self, matcher: Matcher, tokens: Sequence[int]) -> None:
        """Take in the tokens of a text that is known, and compute only what may follow all."""
        for token in tokens[:-1]:
            if not matcher.grammar.consume_token(token) or matcher.grammar.is_error():
                matcher.error = reason_of(matcher.grammar.get_error())
                return
        self.advance([(matcher, token) for token in tokens[-1:]])

    def advance(self, taken: Sequence[tuple[Constraint, int]]) -> None:
        """Take in one token each."""
        going_on = []
        for matcher, token in taken:
            if not isinstance(matcher, Matcher):
                raise TypeError(f"{type(matcher).__name__} is no constraint of this constrainer")
            grammar = matcher.grammar
            if not grammar.consume_token(token) or grammar.is_error():
                matcher.error = reason_of(grammar.get_error())
            elif grammar.is_stopped():
                matcher.is_complete = True
            else:
                going_on.append(matcher)
        if going_on:
            self._fill(going_on)

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
