"""One step while it is put together, and what is remembered of it until its commit."""

from __future__ import annotations

from collections.abc import Collection

from control_plane.core.batch import SlotStart, StepBatch, StepResult
from control_plane.core.interface import SchedulerOutput
from control_plane.core.request import Sequence
from planes.errors import SchedulerError


class Step:
    """The rows of one step: columns to fill, later the record to commit against.

    `rows[i]` is the sequence of row i, `sampled[k]` that of sample k. `started`: sequences whose
    slot the step starts. `released`: slots it tells the compute plane to forget.
    """

    __slots__ = (
        "_new_block_counts",
        "_new_block_ids",
        "_positions",
        "_query_lens",
        "_sampled_rows",
        "_slots",
        "_starts",
        "num_decode_rows",
        "num_tokens",
        "released",
        "rows",
        "sampled",
        "started",
        "step_id",
    )

    def __init__(self, step_id: int) -> None:
        self.step_id = step_id
        self.num_tokens = 0
        self.num_decode_rows = 0
        self.rows: list[Sequence] = []
        self.sampled: list[Sequence] = []
        self.started: list[Sequence] = []
        self.released: tuple[int, ...] = ()
        self._starts: list[SlotStart] = []
        self._slots: list[int] = []
        self._query_lens: list[int] = []
        self._positions: list[int] = []
        self._new_block_counts: list[int] = []
        self._new_block_ids: list[int] = []
        self._sampled_rows: list[int] = []

    @property
    def num_prefill_rows(self) -> int:
        """Rows that compute given tokens."""
        return len(self.rows) - self.num_decode_rows

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of those rows; a decode row has one."""
        return self.num_tokens - self.num_decode_rows

    def add_start(self, seq: Sequence, block_ids: Collection[int]) -> None:
        """Start the sequence's slot with all its known tokens and its whole block table."""
        request = seq.request
        self.started.append(seq)
        self._starts.append(
            SlotStart(
                slot=seq.slot,
                token_ids=(*request.input_tokens, *request.output_tokens),
                num_prompt_tokens=request.num_prompt_tokens,
                block_ids=tuple(block_ids),
                params=request.params,
            )
        )

    def add_row(
        self, seq: Sequence, num_tokens: int, new_block_ids: Collection[int], *, samples: bool
    ) -> None:
        """Compute the sequence's next `num_tokens`, and sample after the last if it `samples`."""
        if samples:
            self._sampled_rows.append(len(self.rows))
            self.sampled.append(seq)
        self.rows.append(seq)
        self.num_tokens += num_tokens
        self._slots.append(seq.slot)
        self._query_lens.append(num_tokens)
        self._positions.append(seq.num_computed_tokens)
        self._new_block_counts.append(len(new_block_ids))
        if new_block_ids:
            self._new_block_ids.extend(new_block_ids)

    def check_result(self, result: StepResult) -> None:
        """Raise SchedulerError unless `result` has the shape of this step's."""
        if result.step_id != self.step_id:
            raise SchedulerError(
                f"result of step {result.step_id}, but step {self.step_id} is the next to commit"
            )
        if result.refusal is not None:
            return
        if len(result.sampled_token_ids) != len(self.sampled):
            raise SchedulerError(
                f"step {self.step_id} has {len(self.sampled)} samples, "
                f"its result {len(result.sampled_token_ids)}"
            )
        for failure in result.row_failures:
            if not 0 <= failure.row < len(self.rows):
                raise SchedulerError(
                    f"step {self.step_id} has {len(self.rows)} rows, "
                    f"its result names row {failure.row}"
                )

    def output(self, released: tuple[int, ...]) -> SchedulerOutput:
        """Return the step as it is sent, listing `released` too."""
        self.released = released
        request_ids = [seq.request.id for seq in self.rows]
        return SchedulerOutput(
            batch=StepBatch(
                step_id=self.step_id,
                released=released,
                starts=tuple(self._starts),
                slots=self._slots,
                query_lens=self._query_lens,
                positions=self._positions,
                new_block_counts=self._new_block_counts,
                new_block_ids=self._new_block_ids,
                sampled_rows=self._sampled_rows,
            ),
            decode_request_ids=request_ids[: self.num_decode_rows],
            prefill_request_ids=request_ids[self.num_decode_rows :],
        )
