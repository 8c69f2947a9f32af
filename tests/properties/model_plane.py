"""A model of the compute plane that keeps slots exactly as `compute.proto` says.

Its "KV" is the token id itself, with the role it was computed in and the tenant it belongs to; the
next token is a hash of what is read *through the block table*. What a row reads is also compared
with what it should read, so a wrong block, position, slot, copy or move is found where it happens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from control_plane.core.batch import (
    BlockCopy,
    RowFailure,
    SlotPrefix,
    StepBatch,
    StepResult,
    TokenLogprobs,
)
from control_plane.core.generation_params import GenerationParams
from tests.properties.toy_constraint import Rule, bits, chosen
from tests.properties.toy_model import VOCABULARY, next_logprobs, next_token


class Cell(NamedTuple):
    """One token's KV. `is_prompt`, `adapter`: how it was computed. `salt`: whose it is."""

    token: int
    is_prompt: bool
    salt: str
    adapter: int = 0


Block = list[Cell | None]

NO_NUMBER = Cell(-1, False, "")


class ProtocolViolation(AssertionError):
    """A batch that breaks the rules of the wire."""


def must(holds: bool, message: str) -> None:
    if not holds:
        raise ProtocolViolation(message)


@dataclass
class Slot:
    tokens: list[int]
    num_prompt: int
    table: list[int]
    params: GenerationParams
    sample_index: int
    adapter: int = 0
    num_computed: int | None = None  # None: the first row may begin anywhere
    is_poisoned: bool = False


NOTHING_BEGUN = Slot([], 0, [], GenerationParams(), 0)


class Row(NamedTuple):
    slot_id: int
    slot: Slot
    first: int
    end: int


@dataclass
class ModelPlane:
    """Slots and pools of a compute plane; executes a batch when it is sent.

    Batches sent after one that it refused, before that was known, are not run: their session ends.
    """

    num_blocks: int
    block_size: int
    num_slots: int
    num_host_blocks: int = 0
    last_step: int = 0
    salt_of: Callable[[int | None], str] = lambda _: ""
    roles_matter: bool = True
    rules: dict[int | None, Rule] = field(default_factory=dict)  # by the seeds of requests
    adapters: dict[int | None, int] = field(default_factory=dict)  # by them, too
    has_refused: bool = False
    slots: dict[int, Slot] = field(default_factory=dict)
    pool: list[Block] = field(default_factory=list)
    host: list[Block | None] = field(default_factory=list)
    num_copies: int = 0

    def __post_init__(self) -> None:
        self.pool = [[None] * self.block_size for _ in range(self.num_blocks)]
        self.host = [None] * self.num_host_blocks

    def execute(
        self, batch: StepBatch, *, fail_row: int | None = None, refuse: bool = False
    ) -> tuple[StepResult, set[int]]:
        """The result, and the blocks written."""
        must(batch.step_id == self.last_step + 1, "steps are numbered without gaps")
        self.last_step = batch.step_id
        if refuse or self.has_refused:
            self.has_refused = True
            return StepResult(batch.step_id, refusal="refused by the test"), set()
        return self._run(batch, fail_row)

    def _run(self, batch: StepBatch, fail_row: int | None) -> tuple[StepResult, set[int]]:
        self._move_blocks(batch)
        for slot_id in batch.released:
            must(slot_id in self.slots, f"slot {slot_id} is released but not known")
        released = {slot_id: self.slots.pop(slot_id) for slot_id in batch.released}
        for start in batch.starts:
            must(0 <= start.slot < self.num_slots, f"slot {start.slot} is out of range")
            before = self.slots.get(start.slot)
            must(
                before is None or before.params == start.params,
                f"slot {start.slot} is started while another request uses it",
            )
            adapter = self.adapters.get(start.params.seed, 0)
            must(start.adapter == adapter, "a slot is started with the adapter of its request")
            begun = self._begun(start.prefix, released)
            self.slots[start.slot] = Slot(
                [*begun.tokens, *start.token_ids],
                start.num_prompt_tokens,
                [*begun.table, *start.block_ids],
                start.params,
                start.sample_index,
                start.adapter,
                is_poisoned=begun.is_poisoned,
            )
        drafts = self._lay_drafts(batch)
        rows = self._rows(batch, {start.slot for start in batch.starts})
        written = self._write(rows)
        for number in self._poison(rows, fail_row):
            rows[number].slot.is_poisoned = True
        failures = [
            RowFailure(number, "failed in the test")
            for number, row in enumerate(rows)
            if row.slot.is_poisoned
        ]
        for row in rows:
            if not row.slot.is_poisoned:
                self._check_reads(row)
        constraints = {(row, num): allowed for row, allowed, num in batch.constraints}
        must(len(constraints) == len(batch.constraints), "a sample has at most one constraint")
        kept = self._keep_drafts(rows, drafts, constraints)
        rows = [row._replace(end=row.end - len(drafts[n]) + kept[n]) for n, row in enumerate(rows)]
        logprobs = self._logprobs(batch, rows)
        behind = {row: allowed for (row, num), allowed in constraints.items() if num == kept[row]}
        sampled = self._sample(batch, rows, behind)
        for number, row in enumerate(rows):
            if number not in batch.sampled_rows and not row.slot.is_poisoned:
                must(row.end < len(row.slot.tokens), "a row that computes all it has is sampled")
        result = StepResult(
            batch.step_id,
            sampled,
            tuple(failures),
            sample_logprobs=logprobs,
            kept_drafts=[kept[row] for row in batch.sampled_rows] if any(kept) else [],
            next_drafts=self._guess(batch, rows) if batch.wanted_drafts else {},
        )
        return result, written

    def _guess(self, batch: StepBatch, rows: list[Row]) -> dict[int, list[int]]:
        """What a draft model would guess behind the samples: some right, some wrong, some none."""
        must(len(batch.wanted_drafts) == len(rows), "each row wants drafts or none")
        guessed: dict[int, list[int]] = {}
        for number, (row, most) in enumerate(zip(rows, batch.wanted_drafts, strict=True)):
            slot = row.slot
            if most == 0:
                continue
            must(batch.sampled_rows.count(number) == 1, "drafts are wanted of a row sampled once")
            must(not batch.sampled_slots or row.slot_id in batch.sampled_slots, "for its own slot")
            if slot.is_poisoned:
                continue
            rule, output = self.rules.get(slot.params.seed), slot.tokens[slot.num_prompt :]
            must(rule is None or rule.allowed(output) is None, "what follows may be anything")
            tokens = list(slot.tokens)
            for _ in range(min(most, hash(tuple(tokens)) % 6)):
                token = next_token(tokens, slot.num_prompt, slot.params.seed, slot.sample_index)
                is_wrong = hash(tuple(tokens)) % 5 == 0
                tokens.append((token + is_wrong) % VOCABULARY)
            guessed[number] = tokens[len(slot.tokens) :]
        return guessed

    def _begun(self, prefix: SlotPrefix | None, released: dict[int, Slot]) -> Slot:
        """What a started slot has of another one."""
        if prefix is None:
            return NOTHING_BEGUN
        slot = self.slots.get(prefix.slot) or released.get(prefix.slot)
        must(slot is not None, f"slot {prefix.slot} of a prefix is not known")
        assert slot is not None
        is_there = prefix.num_tokens <= len(slot.tokens) and prefix.num_blocks <= len(slot.table)
        must(slot.is_poisoned or is_there, "the slot has the prefix")
        tokens, table = slot.tokens[: prefix.num_tokens], slot.table[: prefix.num_blocks]
        return replace(slot, tokens=tokens, table=table)

    def _move_blocks(self, batch: StepBatch) -> None:
        """Swap out, copy, swap in; in this order."""
        hosts = [move.destination for move in batch.swap_out]
        must(len(set(hosts)) == len(hosts), "a host block takes one block")
        for source, destination in batch.swap_out:
            self.host[destination] = list(self.pool[source])
        destinations = [copy.destination for copy in batch.copies]
        must(len(set(destinations)) == len(destinations), "a block takes one copy")
        for copy in batch.copies:
            self._copy(copy)
        devices = [move.destination for move in batch.swap_in]
        must(len(set(devices)) == len(devices), "a block takes one from the host")
        must(not set(devices) & set(destinations), "a block takes a copy or one from the host")
        for source, destination in batch.swap_in:
            saved = self.host[source]
            must(saved is not None, "what is swapped in was swapped out")
            assert saved is not None
            self.pool[destination] = list(saved)

    def _copy(self, copy: BlockCopy) -> None:
        self.num_copies += 1
        must(copy.slot in self.slots, f"slot {copy.slot} of a copy is not known")
        table = self.slots[copy.slot].table
        must(table[copy.logical_index] == copy.source, "the slot holds the source of its copy")
        must(copy.source != copy.destination, "a copy is another block")
        must(copy.destination not in table, "a copy goes into a block of its own")
        self.pool[copy.destination] = list(self.pool[copy.source])
        table[copy.logical_index] = copy.destination

    def _rows(self, batch: StepBatch, started: set[int]) -> list[Row]:
        """The rows, once their new blocks are in the tables."""
        must(len(set(batch.slots)) == len(batch.slots), "a slot has at most one row")
        new_blocks = iter(batch.new_block_ids)
        rows = []
        for slot_id, length, position, count in zip(
            batch.slots, batch.query_lens, batch.positions, batch.new_block_counts, strict=True
        ):
            must(slot_id in self.slots, f"slot {slot_id} of a row is not known")
            must(count == 0 or slot_id not in started, "a started slot has its whole table")
            slot = self.slots[slot_id]
            slot.table.extend(next(new_blocks) for _ in range(count))
            end = position + length
            must(length >= 1, "a row has tokens")
            must(
                position == slot.num_computed or slot.num_computed is None,
                "a row goes on where the one before ended",
            )
            must(end <= len(slot.tokens) or slot.is_poisoned, "the plane knows the tokens of a row")
            must(len(slot.table) == -(-end // self.block_size), "a table fits its tokens")
            must(all(0 <= b < self.num_blocks for b in slot.table), "blocks are in range")
            must(len(set(slot.table)) == len(slot.table), "a table holds a block once")
            rows.append(Row(slot_id, slot, position, end))
        must(next(new_blocks, None) is None, "every new block belongs to a row")
        return rows

    def _lay_drafts(self, batch: StepBatch) -> list[list[int]]:
        """The drafts of each row, behind the tokens of its slot."""
        ids = iter(batch.draft_ids)
        counts = batch.draft_counts or [0] * len(batch.slots)
        drafts = [[next(ids) for _ in range(count)] for count in counts]
        must(next(ids, None) is None, "every draft belongs to a row")
        for number, slot_id in enumerate(batch.slots):
            if drafts[number]:
                slot = self.slots[slot_id]
                must(
                    batch.query_lens[number] == 1 + len(drafts[number]), "one token and its drafts"
                )
                must(batch.sampled_rows.count(number) == 1, "a row with drafts is sampled once")
                if not slot.is_poisoned:
                    must(batch.positions[number] + 1 == len(slot.tokens), "drafts follow the last")
                slot.tokens += drafts[number]
        return drafts

    def _keep_drafts(
        self,
        rows: list[Row],
        drafts: list[list[int]],
        constraints: dict[tuple[int, int], bytes],
    ) -> list[int]:
        """How many drafts of each row are right; the slots forget the others."""
        kept = [0] * len(rows)
        num_constraints = Counter(row for row, _ in constraints)
        for number, (row, guesses) in enumerate(zip(rows, drafts, strict=True)):
            must(num_constraints[number] in (0, 1 + len(guesses)), "each sample has a constraint")
            if not guesses:
                continue
            slot = row.slot
            first = len(slot.tokens) - len(guesses)
            for guess in guesses if not slot.is_poisoned else ():
                tokens = slot.tokens[: first + kept[number]]
                token = self._next_token(slot, tokens, constraints.get((number, kept[number])))
                if token != guess:
                    break
                kept[number] += 1
            del slot.tokens[first + kept[number] :]
            slot.num_computed = row.first + 1 + kept[number]
        return kept

    def _write(self, rows: list[Row]) -> set[int]:
        written: dict[int, int] = {}  # block → entry of a table
        for row in rows:
            slot = row.slot
            must(written.keys().isdisjoint(self._blocks(row)), "two rows write the same block")
            for i in range(row.first, row.end):
                block = slot.table[i // self.block_size]
                written[block] = i // self.block_size
                self.pool[block][i % self.block_size] = self._cell(slot, i)
            slot.num_computed = row.end
        for _, slot, _, end in rows:
            for index in range(-(-end // self.block_size)):
                place = written.get(slot.table[index], index)
                must(place == index, "a block stands at one place of all tables")
        return set(written)

    def _blocks(self, row: Row) -> set[int]:
        """The blocks a row writes."""
        size = self.block_size
        return set(row.slot.table[row.first // size : -(-row.end // size)])

    def _cell(self, slot: Slot, position: int) -> Cell:
        if position >= len(slot.tokens):  # only a poisoned slot lacks tokens
            return NO_NUMBER
        is_prompt = position < slot.num_prompt or not self.roles_matter
        salt = self.salt_of(slot.params.seed)
        return Cell(slot.tokens[position], is_prompt, salt, slot.adapter)

    def _poison(self, rows: list[Row], fail_row: int | None) -> set[int]:
        """The rows that come to no number: by themselves, or by what they read of others."""
        bad: set[int] = set()
        has_spread = True
        while has_spread:
            has_spread = False
            for number, row in enumerate(rows):
                if number not in bad and (
                    number == fail_row
                    or row.slot.is_poisoned
                    or NO_NUMBER in self._history(row.slot, row.end)
                ):
                    bad.add(number)
                    has_spread = True
                    for i in range(row.first, row.end):
                        block = row.slot.table[i // self.block_size]
                        self.pool[block][i % self.block_size] = NO_NUMBER
        return bad

    def _history(self, slot: Slot, end: int) -> list[Cell | None]:
        size = self.block_size
        return [self.pool[slot.table[i // size]][i % size] for i in range(end)]

    def _check_reads(self, row: Row) -> None:
        """What a row reads must be its own tokens, computed as it would compute them."""
        for i, cell in enumerate(self._history(row.slot, row.end)):
            must(cell is not None, f"token {i} of slot {row.slot_id} was never computed")
            must(cell == self._cell(row.slot, i), f"token {i} of slot {row.slot_id} is another's")

    def _logprobs(self, batch: StepBatch, rows: list[Row]) -> dict[int, TokenLogprobs]:
        """Of the samples that ask for them and come to a number."""
        logprobs = {}
        for sample, number in enumerate(batch.sampled_rows):
            row = rows[number]
            count = row.slot.params.num_logprobs
            if count is not None and not row.slot.is_poisoned:
                history = self._history(row.slot, row.end)
                tokens = [cell.token for cell in history if cell is not None]
                logprobs[sample] = next_logprobs(tokens, row.slot.params.seed, count)
        return logprobs

    def _next_token(self, slot: Slot, tokens: list[int], allowed: bytes | None) -> int:
        """What a slot says behind `tokens`, under a constraint that must be of this very place."""
        seed, output = slot.params.seed, tokens[slot.num_prompt :]
        token = next_token(tokens, slot.num_prompt, seed, slot.sample_index)
        rule = self.rules.get(seed)
        permitted = None if rule is None else rule.allowed(output)
        if permitted is None:
            must(allowed is None, "others have no constraint")
        else:
            must(allowed == bits(permitted), "the constraint is of this very place")
        return chosen(token, permitted)

    def _sample(
        self, batch: StepBatch, rows: list[Row], constraints: dict[int, bytes]
    ) -> list[int]:
        """Append a token to the slot of each sample; −1 where the row failed."""
        targets = batch.sampled_slots or [batch.slots[row] for row in batch.sampled_rows]
        must(len(set(targets)) == len(targets), "a slot takes at most one sample")
        must(len(targets) == len(batch.sampled_rows), "every sample has a slot")
        sampled = []
        must(constraints.keys() <= set(batch.sampled_rows), "constraints are of sampled rows")
        ends = {row.slot_id: row.end for row in rows}
        for number, slot_id in zip(batch.sampled_rows, targets, strict=True):
            row = rows[number]
            must(slot_id in self.slots, f"slot {slot_id} of a sample is not known")
            target = self.slots[slot_id]
            if row.slot.is_poisoned:
                target.is_poisoned = True
            if slot_id != row.slot_id:
                must(slot_id not in ends, "a twin has no row of its own")
                num_blocks = -(-row.end // self.block_size)
                must(
                    target.table[:num_blocks] == row.slot.table[:num_blocks],
                    "a twin begins with the same blocks",
                )
                target.num_computed = row.end
            if target.is_poisoned:
                sampled.append(-1)
                continue
            must(row.end == len(target.tokens), "only after its last token a row is sampled")
            tokens = [cell.token for cell in self._history(target, row.end) if cell is not None]
            sampled.append(self._next_token(target, tokens, constraints.get(number)))
        for slot_id, token in zip(targets, sampled, strict=True):
            if not self.slots[slot_id].is_poisoned:
                self.slots[slot_id].tokens.append(token)
        return sampled
