"""A model of the compute plane that keeps slots exactly as `compute.proto` says.

Its "KV" is the token id itself, and the next token is a hash of what is read *through the block
table*, so one wrong block, position or slot changes the output.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from control_plane.core.batch import RowFailure, StepBatch, StepResult
from control_plane.core.generation_params import GenerationParams
from control_plane.core.request import FinishReason, Request

VOCABULARY = 11
EOS = frozenset({0})


def next_token(tokens: list[int], seed: int | None) -> int:
    return hash((seed, *tokens)) % VOCABULARY


def run_alone(request: Request) -> tuple[list[int], FinishReason]:
    """What the request must produce, whoever else is there."""
    tokens = list(request.input_tokens)
    for _ in range(request.max_tokens):
        token = next_token(tokens, request.params.seed)
        if token in request.eos_token_ids and not request.params.ignore_eos:
            return tokens[request.num_prompt_tokens :], FinishReason.STOP
        tokens.append(token)
    return tokens[request.num_prompt_tokens :], FinishReason.LENGTH


class ProtocolViolation(AssertionError):
    """A batch that breaks the rules of the wire."""


def must(holds: bool, message: str) -> None:
    if not holds:
        raise ProtocolViolation(message)


@dataclass
class Slot:
    tokens: list[int]
    table: list[int]
    params: GenerationParams
    num_computed: int = 0
    is_poisoned: bool = False


@dataclass
class ModelPlane:
    """Slots and pool of a compute plane; executes a batch when it is sent.

    Batches sent after one that it refused, before that was known, are not run: their session ends.
    """

    num_blocks: int
    block_size: int
    num_slots: int
    last_step: int = 0
    has_refused: bool = False
    slots: dict[int, Slot] = field(default_factory=dict)
    pool: list[list[int | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = [[None] * self.block_size for _ in range(self.num_blocks)]

    def execute(
        self, batch: StepBatch, *, fail_row: int | None = None, refuse: bool = False
    ) -> tuple[StepResult, set[int], set[int]]:
        """The result, the blocks written, and the blocks given to a table by this batch."""
        must(batch.step_id == self.last_step + 1, "steps are numbered without gaps")
        self.last_step = batch.step_id
        if refuse or self.has_refused:
            self.has_refused = True
            return StepResult(batch.step_id, refusal="refused by the test"), set(), set()
        return self._run(batch, fail_row)

    def _run(self, batch: StepBatch, fail_row: int | None) -> tuple[StepResult, set[int], set[int]]:
        for slot_id in batch.released:
            must(slot_id in self.slots, f"slot {slot_id} is released but not known")
            del self.slots[slot_id]
        given: list[int] = []
        for start in batch.starts:
            must(0 <= start.slot < self.num_slots, f"slot {start.slot} is out of range")
            must(
                start.slot not in self.slots,
                f"slot {start.slot} is started while in use",
            )
            must(start.slot in batch.slots, "a started slot has a row")
            self.slots[start.slot] = Slot(
                list(start.token_ids), list(start.block_ids), start.params
            )
            given.extend(start.block_ids)
        started = {start.slot for start in batch.starts}
        rows = self._rows(batch, started, given)
        held = [b for slot in self.slots.values() for b in slot.table]
        must(len(held) == len(set(held)), "a block is in two tables")
        written = self._write(rows)
        failures = []
        sampled = []
        for row, (slot, _, _) in enumerate(rows):
            if slot.is_poisoned or row == fail_row:
                slot.is_poisoned = True
                failures.append(RowFailure(row, "failed in the test"))
        for row in batch.sampled_rows:
            slot, _, end = rows[row]
            must(end == len(slot.tokens), "only after its last token a row is sampled")
            size = self.block_size
            seen = [self.pool[slot.table[i // size]][i % size] for i in range(end)]
            token = next_token(seen, slot.params.seed)
            slot.tokens.append(token)
            sampled.append(-1 if slot.is_poisoned else token)
        for row, (slot, _, end) in enumerate(rows):
            must(row in batch.sampled_rows or end < len(slot.tokens), "a last row is sampled")
        return StepResult(batch.step_id, sampled, tuple(failures)), written, set(given)

    def _rows(
        self, batch: StepBatch, started: set[int], given: list[int]
    ) -> list[tuple[Slot, int, int]]:
        """Slot, first and end position of each row, once its new blocks are in the table."""
        must(len(set(batch.slots)) == len(batch.slots), "a slot has at most one row")
        new_blocks = iter(batch.new_block_ids)
        rows = []
        for slot_id, length, position, count in zip(
            batch.slots,
            batch.query_lens,
            batch.positions,
            batch.new_block_counts,
            strict=True,
        ):
            must(slot_id in self.slots, f"slot {slot_id} of a row is not known")
            must(count == 0 or slot_id not in started, "a started slot has its whole table")
            slot = self.slots[slot_id]
            new = [next(new_blocks) for _ in range(count)]
            given.extend(new)
            slot.table.extend(new)
            end = position + length
            must(length >= 1, "a row has tokens")
            must(position == slot.num_computed, "a row goes on where the one before ended")
            must(end <= len(slot.tokens), "the plane knows the tokens of a row")
            must(len(slot.table) == -(-end // self.block_size), "a table fits its tokens")
            rows.append((slot, position, end))
        must(next(new_blocks, None) is None, "every new block belongs to a row")
        must(all(0 <= b < self.num_blocks for b in given), "blocks are in range")
        must(len(set(given)) == len(given), "a block is given once")
        return rows

    def _write(self, rows: list[tuple[Slot, int, int]]) -> set[int]:
        written: set[int] = set()
        for slot, position, end in rows:
            mine = set()
            for i in range(position, end):
                block = slot.table[i // self.block_size]
                self.pool[block][i % self.block_size] = slot.tokens[i]
                mine.add(block)
            must(not mine & written, "two rows write the same block")
            written |= mine
            slot.num_computed = end
        return written
