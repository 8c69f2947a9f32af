"""A draft model: a smaller one of the same vocabulary that guesses what follows a sample.

Once a step has its samples, the draft model reads of each sequence what it lacks and goes on
greedily, a step of its own for each token, until all that is guessed is not likely enough to be
right (`draft_odds`). What it guesses travels to the control plane, which may send it back as drafts
(`compute_plane.executor.drafts`): answers do not depend on it, but for how soon they come.

Its KV pool has blocks of the same numbers and sizes as the engine's (`draft_cache`), and some more:
a sample that begins a block has none before the next batch brings it, so what follows is guessed in
a spare one.

Array letters: N tokens, B blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import numpy as np
import structlog

from compute_plane.errors import DeviceLostError
from compute_plane.executor.draft_cache import DraftCache
from compute_plane.executor.draft_odds import DraftOdds
from compute_plane.executor.interface import (
    BoolArray,
    ExecutionBatch,
    ExecutionOutput,
    GPUExecutor,
    Int32Array,
    SamplingRow,
)

MOST_ROWS: Final = 32
"""Sequences for which tokens are guessed at once: so many spare blocks a pool has."""

FEW_TOKENS: Final = 8
"""Of a row that is computed as generated ones are; more are computed as a prompt is."""

FIRST_REST: Final = 16
"""Steps for which a draft model that failed is not asked."""

TAIL_TOKENS: Final = 16
"""By which a text is known again."""

log = structlog.get_logger()


class KnownText(NamedTuple):
    """The sequence in a slot: its `tokens` [N], blocks of all but the last one at least.

    `is_greedy`: how its tokens are sampled. `most`: drafts that are wanted.
    """

    slot: int
    tokens: Int32Array
    table: Int32Array
    is_greedy: bool
    most: int


class Drafter(Protocol):
    """Who guesses what follows."""

    def guess(self, texts: Sequence[KnownText]) -> list[list[int]]:
        """Return tokens that may follow each text, as many as are wanted or fewer."""
        ...


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """What a draft model must keep to.

    `vocab_size`: tokens that it shares with the engine's model. `num_blocks`: of the engine's pool.
    `max_tokens`: that it computes behind one step before it guesses. `least_chance`: that all
    guesses of a text are right, or it is not guessed on.
    """

    vocab_size: int
    context_length: int
    block_size: int
    num_blocks: int
    max_tokens: int
    least_chance: float


@dataclass(slots=True)
class _Row:
    """A sequence under way: `tokens` with room behind, of which `num_known` are said or guessed.

    `num_computed` of them are in the pool. `guesses`: those behind the text, `likelihoods` theirs.
    `chance`: that all of them are right.
    """

    text: KnownText
    tokens: Int32Array
    table: Int32Array
    most: int
    num_known: int
    guesses: list[int]
    num_computed: int = 0
    likelihoods: list[float] = field(default_factory=list)
    chance: float = 1.0


class _Made(NamedTuple):
    """Guesses behind a text of `num_tokens`, which ended with the bytes `tail`."""

    num_tokens: int
    tail: bytes
    guesses: list[int]
    likelihoods: list[float]


class DraftModel:
    """Guesses with an executor of its own; a `Drafter`. Called by the device thread only.

    A draft model that fails harms nobody: it guesses nothing for a while, twice as long each time.
    """

    def __init__(self, executor: GPUExecutor, limits: DraftLimits) -> None:
        self._executor = executor
        self._limits = limits
        self._cache = DraftCache(
            limits.num_blocks + MOST_ROWS, limits.block_size, limits.context_length
        )
        self._odds = DraftOdds()
        self._made: dict[int, _Made] = {}  # by slot
        self._num_skipped = 0
        self._rest = FIRST_REST

    def guess(self, texts: Sequence[KnownText]) -> list[list[int]]:
        """Return tokens that may follow each text, as many as are wanted or fewer.

        A text of which much is not computed yet gets none; a part is computed each time.
        Raises DeviceLostError.
        """
        found: list[list[int]] = [[] for _ in texts]
        if self._num_skipped > 0:
            self._num_skipped -= 1
            return found
        try:
            self._guess(texts, found)
        except DeviceLostError:
            raise
        except Exception:
            # Whatever it is: the engine's own answers are there, and do not need it.
            log.exception("the draft model failed and rests", steps=self._rest)
            self._num_skipped, self._rest = self._rest, 2 * self._rest
            return [[] for _ in texts]
        self._rest = FIRST_REST
        return found

    def _guess(self, texts: Sequence[KnownText], found: list[list[int]]) -> None:
        """Put into `found` what may follow each text."""
        rows: list[_Row] = []
        for text, guesses in zip(texts, found, strict=True):
            self._look_back(text)
            row = self._row(text, len(rows), guesses) if len(rows) < MOST_ROWS else None
            if row is not None:
                rows.append(row)
        going_on = self._read(rows)
        while going_on:
            going_on = self._go_on(going_on)
        for row in rows:
            num_tokens = row.text.tokens.size
            tail = _tail(row.text.tokens)
            self._made[row.text.slot] = _Made(num_tokens, tail, row.guesses, row.likelihoods)

    def _look_back(self, text: KnownText) -> None:
        """See what became of the guesses made for the text of a slot when it was shorter."""
        made = self._made.pop(text.slot, None)
        if made is None or _tail(text.tokens[: made.num_tokens]) != made.tail:
            return
        said = text.tokens[made.num_tokens :].tolist()
        for token, guess, likelihood in zip(said, made.guesses, made.likelihoods, strict=False):
            is_right = token == guess
            self._odds.note(likelihood, is_greedy=text.is_greedy, is_right=is_right)
            if not is_right:
                return

    def _row(self, text: KnownText, number: int, guesses: list[int]) -> _Row | None:
        """Return what is to be done for a text; None: it is none for this model."""
        limits, num_tokens = self._limits, text.tokens.size
        size = limits.block_size
        most = min(text.most, -num_tokens % size, limits.context_length - num_tokens)
        if most < 1 or num_tokens == 0:
            return None
        table = text.table[: -(-num_tokens // size)]
        if table.size * size < num_tokens:
            table = np.append(table, np.int32(limits.num_blocks + number)).astype(np.int32)
        if table.size * size < num_tokens or int(text.tokens.max()) >= limits.vocab_size:
            return None
        tokens = np.zeros(num_tokens + most, dtype=np.int32)
        tokens[:num_tokens] = text.tokens
        return _Row(text, tokens, table, most, num_tokens, guesses)

    def _read(self, rows: list[_Row]) -> list[_Row]:
        """Compute what is not in the pool, and guess the first token of rows that are through.

        Rows that share blocks, and would write one both, go one after the other: what the first one
        computed is there for the second.
        """
        room = self._limits.max_tokens
        going_on: list[_Row] = []
        waiting = rows
        while waiting and room > 0:
            for row in waiting:
                computed = self._cache.num_computed(row.tokens[: row.num_known], row.table)
                row.num_computed = min(computed, row.num_known - 1)
            parts: list[tuple[_Row, int]] = []
            later: list[_Row] = []
            written: set[int] = set()
            # Short ones first: a long text does not keep those beside it from their drafts.
            for row in sorted(waiting, key=lambda row: row.num_known - row.num_computed):
                count = min(row.num_known - row.num_computed, room)
                blocks = self._written(row, count)
                if written & blocks:
                    later.append(row)
                elif count > 0:
                    parts.append((row, count))
                    written |= blocks
                    room -= count
            going_on += self._run(parts)
            waiting = later
        return going_on

    def _go_on(self, rows: list[_Row]) -> list[_Row]:
        """Guess one more token of each row; where two would write one block, of the first."""
        parts: list[tuple[_Row, int]] = []
        written: set[int] = set()
        for row in rows:
            blocks = self._written(row, 1)
            if not written & blocks:
                parts.append((row, 1))
                written |= blocks
        return self._run(parts)

    def _written(self, row: _Row, count: int) -> set[int]:
        """Return the blocks that the next `count` tokens of a row are in."""
        size, first = self._limits.block_size, row.num_computed
        return set(row.table[first // size : -(-(first + count) // size)].tolist())

    def _run(self, parts: list[tuple[_Row, int]]) -> list[_Row]:
        """Compute the next tokens of rows; return those that a guess was found for and go on.

        A row that comes to no number counts as computed: its text gets no guesses any more.
        """
        if not parts:
            return []
        output = self._executor.execute(_batch(parts))
        sampled = [row for row, count in parts if row.num_computed + count == row.num_known]
        for row, count in parts:
            first, row.num_computed = row.num_computed, row.num_computed + count
            self._cache.note(row.tokens[: row.num_computed], row.table, first)
        failed = {id(parts[number][0]) for number in output.failed_rows}
        return [
            row
            for k, row in enumerate(sampled)
            if id(row) not in failed and self._takes(row, output, k)
        ]

    def _takes(self, row: _Row, output: ExecutionOutput, k: int) -> bool:
        """Take sample k for the guess behind a row if it is likely; whether to go on behind it."""
        likelihood = math.exp(output.sample_logprobs[k].logprob)
        row.chance *= self._odds.of(likelihood, is_greedy=row.text.is_greedy)
        if row.chance < self._limits.least_chance:
            self._odds.forget_some(likelihood, is_greedy=row.text.is_greedy)
            return False
        token = int(output.next_tokens[k])
        if token >= self._limits.vocab_size:
            return False
        row.guesses.append(token)
        row.likelihoods.append(likelihood)
        row.tokens[row.num_known] = token
        row.num_known += 1
        return len(row.guesses) < row.most


def _tail(tokens: Int32Array) -> bytes:
    return tokens[-TAIL_TOKENS:].tobytes()


def _batch(parts: list[tuple[_Row, int]]) -> ExecutionBatch:
    """Return the step that computes the next tokens of rows and samples where none is left."""
    firsts = [row.num_computed for row, _ in parts]
    ends = [row.num_computed + count for row, count in parts]
    spans = list(zip(parts, firsts, ends, strict=True))
    tables = np.zeros((len(parts), max(row.table.size for row, _ in parts)), dtype=np.int32)
    for number, (row, _) in enumerate(parts):
        tables[number, : row.table.size] = row.table
    sampled = [number for number, (row, _) in enumerate(parts) if ends[number] == row.num_known]
    is_prompt: BoolArray = np.array([count > FEW_TOKENS for _, count in parts])
    return ExecutionBatch(
        input_tokens=np.concatenate([row.tokens[first:end] for (row, _), first, end in spans]),
        positions=np.concatenate(
            [np.arange(first, end, dtype=np.int32) for _, first, end in spans]
        ),
        seq_lens=np.array(ends, dtype=np.int32),
        block_tables=tables,
        is_prefill=is_prompt,
        prompt_lens=np.where(is_prompt, ends, 0).astype(np.int32),
        query_lens=np.array([count for _, count in parts], dtype=np.int32),
        sampled_rows=np.array(sampled, dtype=np.int32),
        sampling=[SamplingRow(0.0, 1.0, 0, 0, ends[number], num_logprobs=0) for number in sampled],
    )
