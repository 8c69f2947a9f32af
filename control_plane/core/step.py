"""One step while it is put together, and what is remembered of it until its commit."""

from __future__ import annotations

from collections.abc import Sequence as Series

from control_plane.core.batch import (
    BlockCopy,
    BlockMove,
    EmbeddingRequest,
    PromptLogprobsRequest,
    RowConstraint,
    SlotStart,
    StateCopy,
    StepBatch,
    StepResult,
)
from control_plane.core.interface import SchedulerOutput
from control_plane.core.request import Sequence
from planes.errors import SchedulerError


class Step:
    """The rows of one step: decode rows first, then prefill rows.

    `embedding_size`: numbers of hidden states that are wanted of a row.

    `rows[i]` is the sequence of row i, `sampled[k]` that of sample k: each decode row's, in their
    order, then those of prefill rows. `unsampled`: sequences in it without a sample: a part of a
    prompt is computed, or a slot only started. `fills`: (sequence, index) of the blocks that decode
    rows fill up, to be remembered at the commit, when their last token is known. `drafts`: those of
    decode rows, by row, those of `guessed_rows` a draft model's; `draft_masks`: by constrained row,
    what may follow each of them; `wanted_drafts`: by row, how many are to be guessed behind its
    sample. `holds_back`: no step is to follow before its result.

    `StepComposer` appends decode rows to `rows` and `positions` itself: they are most of its work.
    """

    __slots__ = (
        "_copies",
        "_embeddings",
        "_new_blocks",
        "_prefill_lens",
        "_prefill_sampled_rows",
        "_prompt_logprobs",
        "_starts",
        "draft_masks",
        "drafts",
        "embedding_size",
        "fills",
        "guessed_rows",
        "has_constraints",
        "has_twins",
        "holds_back",
        "num_decode_rows",
        "num_prefill_tokens",
        "num_start_tokens",
        "positions",
        "rows",
        "sampled",
        "step_id",
        "unsampled",
        "wanted_drafts",
    )

    def __init__(self, step_id: int, embedding_size: int = 0) -> None:
        self.step_id = step_id
        self.embedding_size = embedding_size
        self.num_decode_rows = 0
        self.num_prefill_tokens = 0
        self.num_start_tokens = 0
        self.has_twins = False
        self.has_constraints = False
        self.holds_back = False
        self.rows: list[Sequence] = []
        self.positions: list[int] = []
        self.sampled: list[Sequence] = []
        self.unsampled: list[Sequence] = []
        self.fills: list[tuple[Sequence, int]] = []
        self.drafts: dict[int, list[int]] = {}
        self.guessed_rows: set[int] = set()
        self.wanted_drafts: dict[int, int] = {}
        self.draft_masks: dict[int, list[bytes]] = {}
        self._starts: list[SlotStart] = []
        self._copies: list[BlockCopy] = []
        self._new_blocks: list[tuple[int, Series[int]]] = []  # row, its new blocks
        self._prefill_lens: list[int] = []
        self._prefill_sampled_rows: list[int] = []
        self._prompt_logprobs: list[PromptLogprobsRequest] = []
        self._embeddings: list[EmbeddingRequest] = []

    @property
    def num_prefill_rows(self) -> int:
        """Rows that compute given tokens."""
        return len(self.rows) - self.num_decode_rows

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows; a decode row has one."""
        return self.num_decode_rows + self.num_prefill_tokens

    @property
    def num_places(self) -> int:
        """Rows, or samples where a row has several: neither may exceed the batch size."""
        return max(len(self.rows), len(self.sampled))

    @property
    def num_embeddings(self) -> int:
        """Rows whose hidden states are wanted."""
        return len(self._embeddings)

    def tokens_of(self, row: int) -> tuple[int, int]:
        """Return position and number of the tokens that a prefill row computes."""
        return self.positions[row], self._prefill_lens[row - self.num_decode_rows]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in it to send."""
        return not self.rows and not self._starts

    def add_start(self, seq: Sequence, block_ids: Series[int]) -> None:
        """Start the sequence's slot with all its known tokens and its whole block table.

        What the slot of its `origin` has of them is only named.
        """
        request = seq.request
        prefix = None if seq.origin is None else seq.origin.prefix()
        seq.begun_from = 0 if seq.origin is None or prefix is None else seq.origin.stay
        seq.origin = None
        seq.needs_start = False
        seq.is_on_plane = True
        seq.mark()
        num_tokens, num_blocks = (0, 0) if prefix is None else prefix[1:]
        num_prompt_tokens = len(request.input_tokens)
        token_ids = (
            *request.input_tokens[num_tokens:],
            *seq.output_tokens[max(0, num_tokens - num_prompt_tokens) :],
        )
        self.num_start_tokens += len(token_ids)
        self._starts.append(
            SlotStart(
                slot=seq.slot,
                token_ids=token_ids,
                num_prompt_tokens=num_prompt_tokens,
                block_ids=tuple(block_ids[num_blocks:]),
                params=seq.group.params,
                sample_index=seq.sample_index,
                prefix=prefix,
                adapter=request.adapter,
            )
        )

    def add_copy(self, copy: BlockCopy) -> None:
        """Give a slot its own copy of a block that it shared."""
        self._copies.append(copy)

    def add_new_blocks(self, block_ids: Series[int]) -> None:
        """Append blocks to the table of the row that is added next."""
        if block_ids:
            self._new_blocks.append((len(self.rows), block_ids))

    def add_prefill_row(self, seq: Sequence, num_tokens: int, *, samples: bool) -> None:
        """Compute the sequence's next `num_tokens`, and sample after the last if it `samples`.

        One that ends with its prompt gives hidden states instead.
        """
        request = seq.request
        if request.embedding is not None:
            if samples or request.embedding.is_sum:
                self._embeddings.append(EmbeddingRequest(len(self.rows), request.embedding.is_sum))
            self.unsampled.append(seq)
        elif samples:
            self._prefill_sampled_rows.append(len(self.rows))
            self.sampled.append(seq)
        else:
            self.unsampled.append(seq)
        count = request.params.num_prompt_logprobs
        if count is not None and seq.sample_index == 0 and request.awaits_prompt_logprobs:
            self._prompt_logprobs.append(PromptLogprobsRequest(len(self.rows), count))
        is_held = seq.num_computed_tokens + num_tokens < seq.first_end
        self.has_constraints |= seq.constraint is not None or (samples and is_held)
        self.rows.append(seq)
        self.positions.append(seq.num_computed_tokens)
        self._prefill_lens.append(num_tokens)
        self.num_prefill_tokens += num_tokens

    def add_twin(self, seq: Sequence) -> None:
        """Sample for this sequence too after the row added last."""
        self._prefill_sampled_rows.append(len(self.rows) - 1)
        self.sampled.append(seq)
        self.has_twins = True

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
        if result.kept_drafts and (
            len(result.kept_drafts) != len(self.sampled)
            or any(n > len(self.drafts.get(k, ())) for k, n in enumerate(result.kept_drafts))
        ):
            raise SchedulerError(
                f"step {self.step_id} has drafts {self.drafts}, its result keeps "
                f"{result.kept_drafts} of them"
            )
        wanted = self.wanted_drafts
        if any(len(ids) > wanted.get(row, 0) for row, ids in result.next_drafts.items()):
            raise SchedulerError(
                f"step {self.step_id} wants drafts of rows {wanted}, its result has "
                f"{result.next_drafts}"
            )
        self._check_embeddings(result)
        for failure in result.row_failures:
            if not 0 <= failure.row < len(self.rows):
                raise SchedulerError(
                    f"step {self.step_id} has {len(self.rows)} rows, "
                    f"its result names row {failure.row}"
                )
        for logprobs in result.prompt_logprobs:
            if not 0 <= logprobs.row < len(self.rows):
                raise SchedulerError(
                    f"step {self.step_id} has {len(self.rows)} rows, "
                    f"its result has log-probabilities of row {logprobs.row}"
                )

    def _check_embeddings(self, result: StepResult) -> None:
        if not (self._embeddings or result.embeddings):
            return
        failed = {failure.row for failure in result.row_failures}
        asked = [request.row for request in self._embeddings if request.row not in failed]
        given = [entry.row for entry in result.embeddings if entry.row not in failed]
        sizes = {len(entry.values) for entry in result.embeddings}
        if given != asked or not sizes <= {self.embedding_size}:
            raise SchedulerError(
                f"step {self.step_id} wants {self.embedding_size} hidden states of rows {asked}, "
                f"its result has {sorted(sizes)} of rows {given}"
            )

    def output(
        self,
        released: tuple[int, ...],
        swap_out: tuple[BlockMove, ...],
        swap_in: tuple[BlockMove, ...],
        state_copies: tuple[StateCopy, ...],
    ) -> SchedulerOutput:
        """Return the step as it is sent: slots to forget, blocks to move, states to copy."""
        rows, num_decodes = self.rows, self.num_decode_rows
        new_block_counts = [0] * len(rows)
        new_block_ids: list[int] = []
        for row, block_ids in self._new_blocks:
            new_block_counts[row] = len(block_ids)
            new_block_ids.extend(block_ids)
        query_lens = [1] * num_decodes + self._prefill_lens
        draft_counts: list[int] = []
        if self.drafts:
            draft_counts = [len(self.drafts.get(row, ())) for row in range(len(rows))]
            query_lens = [sum(pair) for pair in zip(query_lens, draft_counts, strict=True)]
        wanted = self.wanted_drafts
        request_ids = [seq.request_id for seq in rows]
        return SchedulerOutput(
            batch=StepBatch(
                step_id=self.step_id,
                swap_out=swap_out,
                copies=tuple(self._copies),
                swap_in=swap_in,
                released=released,
                starts=tuple(self._starts),
                slots=[seq.slot for seq in rows],
                query_lens=query_lens,
                positions=self.positions,
                new_block_counts=new_block_counts,
                new_block_ids=new_block_ids,
                sampled_rows=[*range(num_decodes), *self._prefill_sampled_rows],
                sampled_slots=[seq.slot for seq in self.sampled] if self.has_twins else [],
                prompt_logprobs=tuple(self._prompt_logprobs),
                draft_counts=draft_counts,
                draft_ids=[token for _, ids in sorted(self.drafts.items()) for token in ids],
                constraints=self._constraints() if self.has_constraints else (),
                embeddings=tuple(self._embeddings),
                state_copies=state_copies,
                wanted_drafts=[wanted.get(row, 0) for row in range(len(rows))] if wanted else [],
            ),
            decode_request_ids=request_ids[:num_decodes],
            prefill_request_ids=request_ids[num_decodes:],
        )

    def _constraints(self) -> tuple[RowConstraint, ...]:
        """Return what the samples may be; those of one row have all said the same so far."""
        rows = [*range(self.num_decode_rows), *self._prefill_sampled_rows]
        found = []
        for row, seq in dict(zip(rows, self.sampled, strict=True)).items():
            allowed = seq.allowed_tokens()
            if allowed is not None:
                found.append(RowConstraint(row, allowed))
                for num_drafts, mask in enumerate(self.draft_masks.get(row, ()), start=1):
                    found.append(RowConstraint(row, mask, num_drafts))
        return tuple(found)
