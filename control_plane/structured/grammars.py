"""Grammars: compiled off the event loop, within bounds, and only once somebody asks.

The library (llguidance) is imported, NumPy too, which would be a sixth of a control plane's start,
and the tree of the vocabulary built, with the first request that wants a structure. Compiling
happens on one thread of its own, one grammar at a time: its stack is large, because the library
descends into grammars recursively and would end the process where the stack does; sizes of texts
(`StructuredOutputs.validate`) bound how deep that is.

A grammar's text is not trusted. The limits below bound compiling and every step, in the library's
own units; it fetches nothing from a network.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import structlog

from control_plane.core.structured_outputs import FIELD, StructuredOutputs
from control_plane.core.tool_calls import ToolCalls
from control_plane.errors import QueueFullError
from control_plane.structured.grammar_texts import grammar_of, grammars_of_tool
from control_plane.structured.refusals import NO_TOKENS, NameRefusedError, reason_of
from control_plane.structured.vocabulary import Vocabulary
from planes.errors import ValidationError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from control_plane.core.constraint import Constraint
    from control_plane.core.request import Request
    from control_plane.structured.habits import Habits
    from control_plane.structured.matcher import Matchers
    from control_plane.text.tokenizer import Tokenizer

STACK_BYTES: Final = 512 << 20
"""Of the compiling thread; touched only as far as a grammar is deep. 9000 rules, each naming the
next, were compiled within it; 8 MiB end at 3000."""

MAX_CACHED: Final = 32
"""Forms of which the grammar's text is kept, the latest ones; and habits."""

LIMITS: Final = {
    "initial_lexer_fuel": 1_000_000,  # some 20 ms
    "step_lexer_fuel": 200_000,  # some 14 ms; half of it ends `([a-z]{1,20} ?){1,100}`
    "step_max_items": 20_000,  # some 1 ms
    "max_lexer_states": 10_000,  # 1 to 2 kB each
    "max_grammar_size": 200_000,
}

MAX_ITEMS_IN_ROW: Final = {"grammar": 400}
"""How many ways to read a text are followed at once, by kind; 2000 for others. Only a grammar of a
caller's own may have more the longer its text is, and the time of a step grows with the cube:
`s: s s | s s s | "a" | ` took 25 ms at 400, and 2 s at 2000."""

MAX_TOOLS_CPU_S: Final = 3.0
"""For the schemas of all tools that an answer may call; 128 with ten properties each take 0.15, in
the format that needs most grammars and on a slow processor that others share 1.3."""

MAX_WAITING: Final = 1024
"""Requests that wait to be constrained; each takes milliseconds, a hostile one up to 3 s."""

_log = structlog.get_logger(__name__)


class Grammars:
    """What constrains the samples of one model's requests.

    `vocab_size`: width of the logits. `eos_token_ids`: any of them ends a text.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._num_waiting = 0
        # What follows belongs to the compiling thread.
        self._vocabulary: LLTokenizer | None = None
        self._matchers: Matchers | None = None
        self._texts: OrderedDict[StructuredOutputs | ToolCalls, str] = OrderedDict()
        self._habits: OrderedDict[tuple[StructuredOutputs | ToolCalls, str], Habits] = OrderedDict()

    def constrain(self, request: Request) -> Future[tuple[Constraint, ...]]:
        """Begin to make a constraint for each sample of a request, behind the tokens it has.

        Raises QueueFullError where too many wait already. The future raises ValidationError for a
        structure that is none, is not supported or is too much, and for tokens that do not follow
        it; a request that is given up before its turn costs nothing.
        """
        with self._lock:
            if self._num_waiting >= MAX_WAITING:
                raise QueueFullError(f"{MAX_WAITING} requests wait for {FIELD} already")
            pool = self._pool or self._start()
            self._num_waiting += 1
            made = pool.submit(self._constrain, request)
        made.add_done_callback(self._note_done)
        return made

    def _start(self) -> ThreadPoolExecutor:
        """Start the compiling thread, which a pool does with the first thing it is given."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        before = threading.stack_size(STACK_BYTES)
        try:
            self._pool.submit(lambda: None)
        finally:
            threading.stack_size(before)
        return self._pool

    def _note_done(self, _made: Future[tuple[Constraint, ...]]) -> None:
        with self._lock:
            self._num_waiting -= 1

    # --- on the compiling thread ---

    def _constrain(self, request: Request) -> tuple[Constraint, ...]:
        params = request.params
        wanted = params.structured_outputs
        if wanted is None:
            return ()
        if self._matchers is None or self._vocabulary is None:
            self._vocabulary, self._matchers = self._prepare(wanted.name)
        grammar, allowed = self._compile(wanted, self._vocabulary)
        habits = self._habits_of(wanted, request.cache_scope)
        made = tuple(
            self._matchers.make(grammar.deep_copy(), allowed, habits, ignore_eos=params.ignore_eos)
            for _ in range(params.n)
        )
        if made[0].is_complete or made[0].error is not None:
            raise wanted.wrong(wanted.kind, "allows no text")
        known = request.output_tokens
        if known and known[-1] in request.eos_token_ids:
            known = known[:-1]
        self._matchers.catch_up(made[0], known)
        if made[0].error is not None:
            raise ValidationError(
                f"continued does not follow {wanted.name}: {made[0].error}", field="continued"
            )
        return made

    def _prepare(self, asked_by: str) -> tuple[LLTokenizer, Matchers]:
        """Do what is done once. `asked_by`: the parameter that wants it."""
        from control_plane.structured.matcher import Matchers

        vocabulary = Vocabulary(
            self._tokenizer,
            vocab_size=self._vocab_size,
            eos_token_ids=self._eos_token_ids,
            asked_by=asked_by,
        ).make(self._eos_token_ids)
        num_threads = len(os.sched_getaffinity(0))
        _log.info("structured outputs are ready", vocab_size=self._vocab_size)
        return vocabulary, Matchers(self._vocab_size, self._eos_token_ids, num_threads)

    def _habits_of(self, wanted: StructuredOutputs | ToolCalls, salt: str) -> Habits:
        """Return what answers of this form have taught; time tells no other tenant of it."""
        from control_plane.structured.habits import Habits

        habits = self._habits.setdefault((wanted, salt), Habits())
        self._habits.move_to_end((wanted, salt))
        if len(self._habits) > MAX_CACHED:
            self._habits.popitem(last=False)
        return habits

    def _compile(
        self, wanted: StructuredOutputs | ToolCalls, vocabulary: LLTokenizer
    ) -> tuple[LLMatcher, bytes]:
        """Return a matcher at the beginning of a text, to copy, and what may come first.

        For one request alone. A matcher and its copies have one lexer, which grows with all that
        any of them reads, and gives up for all of them where one reads too much.
        """
        text = self._texts.get(wanted)
        if text is None and isinstance(wanted, ToolCalls):
            _check_tools(wanted, vocabulary)
        try:
            text = text or grammar_of(wanted)
            matcher, allowed = _compiled(vocabulary, text, wanted.kind)
        except ValueError as refusal:
            raise wanted.wrong(wanted.kind, f"is not supported: {refusal}") from None
        self._texts[wanted] = text
        self._texts.move_to_end(wanted)
        if len(self._texts) > MAX_CACHED:
            self._texts.popitem(last=False)
        return matcher, allowed[: -(-self._vocab_size // 8)]


def _compiled(vocabulary: LLTokenizer, grammar: str, kind: str) -> tuple[LLMatcher, bytes]:
    """Return a matcher at the beginning of a text, and what may come first. Raises ValueError."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        verbose_errors=False,
        max_items_in_row=MAX_ITEMS_IN_ROW.get(kind),
        **LIMITS,  # type: ignore[arg-type] # those are numbers
    )
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
    allowed = b"" if matcher.is_error() else matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(reason_of(matcher.get_error(), has_places=kind == "grammar"))
    if not _may_begin(matcher, allowed):
        raise ValueError(NO_TOKENS)
    return matcher, allowed


def _may_begin(matcher: LLMatcher, allowed: bytes) -> bool:
    """Whether a text may begin with a token that is allowed.

    Where the library sees but one, it may have left out a byte in front of it, which no token has.
    """
    if int.from_bytes(allowed).bit_count() != 1:
        return True
    place = next(place for place, bits in enumerate(allowed) if bits)
    return matcher.deep_copy().consume_token(8 * place + allowed[place].bit_length() - 1)


def _check_tools(calls: ToolCalls, vocabulary: LLTokenizer) -> None:
    """Raise ValidationError for the first tool whose schema is not supported, and for too much.

    By themselves first: what the library's limits leave to one schema, 50 ms, many may have.
    """
    begun, known = time.thread_time(), set[str]()
    for tool in calls.tools:
        try:
            for grammar in grammars_of_tool(calls, tool, known):
                _compiled(vocabulary, grammar, "json")
        except NameRefusedError as refusal:
            place = f"{tool.place.removesuffix('parameters')}name"
            raise ValidationError(f"{place} {tool.name!r}: {refusal}", field=place) from None
        except ValueError as refusal:
            raise ValidationError(
                f"{tool.place} is not supported: {refusal}", field=tool.place
            ) from None
        if time.thread_time() - begun > MAX_TOOLS_CPU_S:
            raise ValidationError(
                f"tools must not take more than {MAX_TOOLS_CPU_S:g} s to compile for {calls.name}",
                field="tools",
            )
