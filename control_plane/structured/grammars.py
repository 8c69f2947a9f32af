"""Grammars: compiled off the event loop, within bounds, and only once somebody asks.

The library (llguidance) is imported, and the tree of the vocabulary built, with the first request
that wants a structure. Compiling happens on one thread of its own, one grammar at a time: its stack
is large, because the library descends into grammars recursively and would end the process where the
stack does; sizes of texts (`StructuredOutputs.validate`) bound how deep that is.

A grammar's text is not trusted. The limits below bound compiling and every step, in the library's
own units; it fetches nothing from a network.
"""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import structlog

from control_plane.core.structured_outputs import (
    FIELD,
    MAX_REGEX_CHARACTERS,
    StructuredOutputs,
)
from control_plane.errors import QueueFullError
from control_plane.structured.matcher import Matchers, first_line
from control_plane.structured.vocabulary import Vocabulary
from planes.errors import ValidationError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    from control_plane.core.constraint import Constraint
    from control_plane.core.request import Request
    from control_plane.text.tokenizer import Tokenizer

STACK_BYTES: Final = 512 << 20
"""Of the compiling thread; touched only as far as a grammar is deep. 9000 rules, each naming the
next, were compiled within it; 8 MiB end at 3000."""

MAX_CACHED: Final = 32
"""Compiled grammars that are kept, the latest ones."""

WHITESPACE: Final = r"[ \n\r\t]{1,16}"
"""Between the parts of JSON: enough to indent, and no end of it for a model that goes astray."""

LIMITS: Final = {
    "initial_lexer_fuel": 1_000_000,  # some 20 ms
    "step_lexer_fuel": 100_000,  # some 7 ms
    "step_max_items": 20_000,  # some 1 ms
    "max_lexer_states": 10_000,  # 1 to 2 kB each
    "max_grammar_size": 200_000,
}

MAX_ITEMS_IN_ROW: Final = {"grammar": 400}
"""How many ways to read a text are followed at once, by kind; 2000 for others. Only a grammar of a
caller's own may have more the longer its text is, and the time of a step grows with the cube:
`s: s s | s s s | "a" | ` took 25 ms at 400, and 2 s at 2000."""

MAX_WAITING: Final = 1024
"""Requests that wait to be constrained; each takes milliseconds, a hostile one up to a second."""

OPTIONS: Final = "x-guidance"
"""Under this name a schema tells the library how to compile it."""

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
        self._compiled: OrderedDict[StructuredOutputs, tuple[LLMatcher, bytes]] = OrderedDict()

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
            self._vocabulary, self._matchers = self._prepare()
        grammar, allowed = self._compile(wanted, self._vocabulary)
        made = tuple(
            self._matchers.make(grammar.deep_copy(), allowed, ignore_eos=params.ignore_eos)
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
                f"continued does not follow {FIELD}: {made[0].error}", field="continued"
            )
        return made

    def _prepare(self) -> tuple[LLTokenizer, Matchers]:
        """Do what is done once."""
        vocabulary = Vocabulary(
            self._tokenizer, vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids
        ).make(self._eos_token_ids)
        num_threads = len(os.sched_getaffinity(0))
        _log.info("structured outputs are ready", vocab_size=self._vocab_size)
        return vocabulary, Matchers(self._vocab_size, self._eos_token_ids, num_threads)

    def _compile(
        self, wanted: StructuredOutputs, vocabulary: LLTokenizer
    ) -> tuple[LLMatcher, bytes]:
        """Return a matcher at the beginning of a text, to copy, and what may come first."""
        known = self._compiled.get(wanted)
        if known is not None:
            self._compiled.move_to_end(wanted)
            return known
        from llguidance import LLMatcher, LLParserLimits

        try:
            grammar = _grammar(wanted)
            limits = _limits(LLParserLimits, wanted.kind)
            matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
            error = matcher.get_error() if matcher.is_error() else ""
            allowed = b"" if error else matcher.compute_bitmask()
            error = error or (matcher.get_error() if matcher.is_error() else "")
        except ValueError as refusal:
            error = str(refusal)
        if error:
            raise wanted.wrong(wanted.kind, f"is not supported: {first_line(error)}")
        self._compiled[wanted] = matcher, allowed[: -(-self._vocab_size // 8)]
        if len(self._compiled) > MAX_CACHED:
            self._compiled.popitem(last=False)
        return self._compiled[wanted]


def _limits(make: type[LLParserLimits], kind: str) -> LLParserLimits:
    return make(
        verbose_errors=False,
        max_items_in_row=MAX_ITEMS_IN_ROW.get(kind),
        **LIMITS,  # type: ignore[arg-type] # those are numbers
    )


def _grammar(wanted: StructuredOutputs) -> str:
    """Return a grammar as the library reads it. Raises ValueError, ValidationError."""
    from llguidance import LLMatcher

    if wanted.grammar is not None:
        return LLMatcher.grammar_from_lark(wanted.grammar)
    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice:
        spelled = " | ".join(json.dumps(text, ensure_ascii=False) for text in wanted.choice)
        spelled = spelled.replace("\x7f", r"\u007f")  # which Lark's notation does not take as it is
        return LLMatcher.grammar_from_lark(f"start: {spelled}")
    schema = wanted.json if isinstance(wanted.json, str) else '{"type": "object"}'
    options = _check_patterns(schema)
    if isinstance(options, dict) and options.get("whitespace_flexible") is False:
        return LLMatcher.grammar_from_json_schema(schema)  # a pattern would be used all the same
    return LLMatcher.grammar_from_json_schema(
        schema, defaults={"whitespace_flexible": True, "whitespace_pattern": WHITESPACE}
    )


def _check_patterns(schema: str) -> object:
    """Refuse a schema whose regular expressions together are longer than one may be alone.

    Options of the library count as well, some are patterns: 12 000 characters of white space took
    0.8 s. The time that the library takes for one grows with the square of its length: 0.3 s for
    4000 characters. Returns those options. Raises ValueError for what is no JSON.
    """
    try:
        root = json.loads(schema)
        options = root.get(OPTIONS) if isinstance(root, dict) else None
        size = 0 if options is None else len(json.dumps(options))
    except RecursionError:
        raise ValueError("objects and lists are nested too deep") from None
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting.extend(value)
        if not isinstance(value, dict):
            continue
        waiting.extend(value.values())
        pattern, properties = value.get("pattern"), value.get("patternProperties")
        size += len(pattern) if isinstance(pattern, str) else 0
        size += sum(map(len, properties)) if isinstance(properties, dict) else 0
    if size > MAX_REGEX_CHARACTERS:
        raise ValueError(
            f"its patterns must have at most {MAX_REGEX_CHARACTERS} characters, they have {size}"
        )
    return options
