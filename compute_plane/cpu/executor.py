"""The CPU executor: a step is one compiled walk through a table of operations.

A row's tokens and logits are the same bits alone and in any batch, whole or in chunks, with any
number of threads: every kernel keeps that law, and this file adds no arithmetic of its own. Where
tokens of prompts are computed by other kernels than generated ones (ADR 0009), it is the token's
place in its sequence that decides, never the batch.

It can also run the last layers of a model alone, of which others have run the first
(`compute_plane.cuda.host_layers`): the hidden rows of the tokens are given then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from compute_plane.cpu.adapter_runs import NO_RUNS, adapter_runs
from compute_plane.cpu.decode_steps import CpuDecodeSteps
from compute_plane.cpu.late_tokens import LateTokens, late_tokens
from compute_plane.cpu.latent_records import chunk_heads, largest_group, work_heads
from compute_plane.cpu.logits_records import LOGITS_ROWS
from compute_plane.cpu.model_table import ModelTable
from compute_plane.cpu.pieces import (
    PIECE_TOKENS,
    Piece,
    PieceKind,
    SortedTokens,
    sort_tokens,
)
from compute_plane.cpu.sample_records import SampleRecords
from compute_plane.cpu.state_rows import NO_ROWS, state_rows
from compute_plane.cpu.step_headers import NONE_TAKEN, PieceArrays, StepHeaders
from compute_plane.cpu.step_parts import Parts, kinds_of
from compute_plane.cpu.thread_team import Entry, ThreadTeam
from compute_plane.executor.embeddings import EmbeddedTokens, EmbeddingSums
from compute_plane.executor.interface import (
    CopyKind,
    ExecutionBatch,
    ExecutionOutput,
    Float32Array,
    Float64Array,
)
from compute_plane.executor.logits_groups import LogitsGroup, group_logits, wanted_tokens
from compute_plane.executor.token_layout import PoolShape, TokenLayout, lay_out_tokens
from kernels.cpu.attention_items import attention_items
from kernels.cpu.attention_plan import AttentionShape, plan_attention
from kernels.cpu.catalogue import sample
from kernels.cpu.instruction_set import selected_instruction_set
from kernels.cpu.operands import LOGITS, LOGITS_STRIDE, VOCAB
from kernels.cpu.operation import StepWord
from kernels.cpu.sample_record import SAMPLE_WORDS, sampling_scratch_bytes
from planes.errors import ValidationError

if TYPE_CHECKING:
    from compute_plane.cpu.packed_adapters import PackedAdapters
    from compute_plane.cpu.packed_layers import PackedWeights
    from compute_plane.memory.kv_pool import KvPool
    from compute_plane.memory.state_pool import StatePool
    from compute_plane.model.spec import ModelSpec

Int64Array = npt.NDArray[np.int64]
HiddenRows = Callable[[], Float32Array]
"""Returns the hidden rows of a batch's tokens as the layers before leave them, [T, hidden]."""

DEFAULT_MAX_TOKENS: Final = 16384
MAX_WANTS: Final = 1024
"""Samples drawn from one group of logits rows."""
FEW_PARTS: Final = 3
"""Pieces of a step whose entries are kept."""
NO_SAMPLES: Final = np.zeros((0, SAMPLE_WORDS), dtype=np.int64)


class CpuExecutor:
    """Runs batches of a model on the CPU; a `GPUExecutor`.

    `weights`, `kv_pool`: of `spec`'s heads, and of all its layers or its last ones. `max_tokens`:
    of one batch. `keep_logits`: return the sampled rows' logits, for tests and tools. `states`: of
    the same layers, if some have states. `adapters`: that rows may be computed with. Not
    thread-safe: one thread, the device thread, calls it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: PackedWeights,
        kv_pool: KvPool,
        *,
        num_threads: int,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        keep_logits: bool = False,
        states: StatePool | None = None,
        adapters: PackedAdapters | None = None,
    ) -> None:
        self._weights = weights
        self._adapters = adapters
        self._pool = kv_pool
        self._copies = {
            CopyKind.WITHIN: kv_pool.copy_block,
            CopyKind.SWAP_OUT: kv_pool.swap_out,
            CopyKind.SWAP_IN: kv_pool.swap_in,
        }
        self._spec = spec
        self._states = states
        num_states = 0 if states is None else states.num_states
        self._shape = PoolShape(
            kv_pool.num_blocks,
            kv_pool.block_size,
            spec.vocab_size,
            len(kv_pool.host),
            num_states,
            0 if adapters is None else len(adapters.pairs),
        )
        self._max_tokens = max_tokens
        self._keep_logits = keep_logits
        self._model = ModelTable(
            spec, weights, kv_pool, max_tokens=max_tokens, states=states, adapters=adapters
        )
        operands = {
            LOGITS: self._model.ends.logits.ctypes.data,
            LOGITS_STRIDE: spec.vocab_size,
            VOCAB: spec.vocab_size,
        }
        self._sample = self._model.table.add(sample, StepWord.SAMPLE_CHUNKS, operands)
        self._model.table.fetch_ahead()
        self._model.table.load(ThreadTeam.OPERATIONS, num_threads)
        scratch_bytes = max(self._model.scratch_bytes, sampling_scratch_bytes(spec.vocab_size))
        per_token = 0 if spec.mixture is None else spec.mixture.experts_per_token
        state_parts = 0 if spec.recurrence is None else spec.recurrence.num_parts
        self._headers = StepHeaders(num_threads, scratch_bytes, per_token, state_parts)
        # Almost every step has few pieces and one group of logits: its entries are made once.
        self._ordinary: dict[Parts, Int64Array] = {}
        self._chunk_heads = chunk_heads(spec)
        self._attention = AttentionShape(
            largest_group(spec),
            kv_pool.block_size,
            work_heads(spec),
            num_threads,
            self._model.num_slots,
        )
        self._decode = CpuDecodeSteps(
            self._shape,
            self._headers,
            chunk_heads=self._chunk_heads,
            attention=self._attention,
            most_rows=min(LOGITS_ROWS, PIECE_TOKENS, MAX_WANTS, max_tokens),
            tells_prompts_apart=self._model.tells_prompts_apart,
        )
        self._decode_entries = self._entries_of_decode(PieceKind.GENERATED)
        self._adapted_decode_entries = self._decode_entries
        if adapters is not None:
            self._adapted_decode_entries = self._entries_of_decode(PieceKind.ADAPTED)
        self._team = ThreadTeam(num_threads)

    @property
    def tells_prompts_apart(self) -> bool:
        """Whether keys and values of prompt tokens are computed otherwise than generated ones'."""
        return self._model.tells_prompts_apart

    @property
    def numerics_id(self) -> str:
        """What decides the bits of a result, but for model and sources."""
        layout = self._pool.layout
        return (
            f"cpu/{selected_instruction_set().name}/{self._weights.weight_format}"
            f"/kv-{layout.dtype}-{layout.block_size}{self._spec.way_of_turning}"
        )

    def execute(
        self, batch: ExecutionBatch, hidden_rows: HiddenRows | None = None
    ) -> ExecutionOutput:
        """Run one step. Raises ValidationError, with nothing changed, if the batch is malformed.

        `hidden_rows`: given where the first layers run elsewhere, and called once the batch is
        checked and its blocks are copied. Whatever it raises ends the step.
        """
        if hidden_rows is None and self._weights.embedding is not None and not self._keep_logits:
            answers = self._decode.take(batch)
            if answers is not None:
                is_adapted = len(batch.adapters) > 0
                self._team.run(self._adapted_decode_entries if is_adapted else self._decode_entries)
                return answers.output()
        layout = self._lay_out(batch)
        samples = SampleRecords(batch, self._spec.vocab_size)
        for copy in batch.copies:
            self._copies[copy.kind](copy.source, copy.destination)
        if self._states is not None:
            for state_copy in batch.state_copies:
                self._states.copy(*state_copy)
        tells_apart = self._model.tells_prompts_apart
        tokens = sort_tokens(layout, batch.prompt_lens if tells_apart else None)
        pieces = list(tokens.pieces(PIECE_TOKENS, prompts_first=self._states is not None))
        arrays = self._describe_pieces(batch, tokens.layout, pieces)
        wanted = tokens.places(wanted_tokens(batch, layout))
        wants = EmbeddedTokens.of(batch, layout)
        embedded, late = tokens.places(wants.tokens), None
        # Targets of log-probabilities and a sample behind them would be an item with a gap.
        if self._model.late is not None and not batch.prompt_logprob_rows:
            late = late_tokens(tokens, wanted, embedded)
        parts = Parts(kinds_of(pieces, arrays), None)
        if late is not None:
            wanted, embedded = late.places(wanted), late.places(embedded)
            of_late = self._describe_pieces(
                batch, late.tokens.layout, late.pieces(), late=late, first_header=len(pieces)
            )
            parts = parts._replace(late=kinds_of(late.pieces(), of_late))
            arrays += of_late
        groups = list(group_logits(wanted, LOGITS_ROWS, MAX_WANTS))
        records = [samples.take(group.wanted, group.rows) for group in groups]
        for index, (group, taken) in enumerate(zip(groups, records, strict=True), parts.num_pieces):
            self._headers.describe_logits(index, out_tokens=group.out_tokens, samples=taken)
        self._take_hidden(hidden_rows, tokens)
        if self._keep_logits:
            logits = self._run_keeping_logits(parts, groups, len(batch.sampling))
        else:
            logits = None
            self._team.run(self._entries(parts._replace(num_groups=len(groups))))
        del arrays  # the headers point to them
        output = samples.output(logits)
        if batch.embeddings:
            found = self._embed(wants, embedded, parts.num_pieces + len(groups))
            output = replace(output, embeddings=found)
        if batch.digest_blocks:
            digests = [self._pool.digest(block) for block in batch.digest_blocks]
            output = replace(output, block_digests=digests)
        return output

    def _lay_out(self, batch: ExecutionBatch) -> TokenLayout:
        layout = lay_out_tokens(batch, self._shape)
        if len(layout.token_ids) > self._max_tokens:
            raise ValidationError(
                f"must be at most {self._max_tokens} tokens, got {len(layout.token_ids)}",
                field="query_lens",
            )
        return layout

    def capture_decode_graph(self, batch_size: int) -> None:
        """Do nothing: a CPU has no launches to save."""

    def execute_graph(self, batch: ExecutionBatch) -> ExecutionOutput:
        """Run one step like `execute`."""
        return self.execute(batch)

    def close(self) -> None:
        """End the executor's threads."""
        self._team.close()

    def __enter__(self) -> CpuExecutor:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _take_hidden(self, hidden_rows: HiddenRows | None, tokens: SortedTokens) -> None:
        """Take what other layers computed, if some come before these."""
        if (hidden_rows is None) != (self._weights.embedding is not None):
            raise ValueError("hidden rows are given if the first layers run elsewhere, only then")
        if hidden_rows is not None:
            rows = hidden_rows()
            self._model.hidden[: len(rows)] = rows if tokens.order is None else rows[tokens.order]

    def _describe_pieces(
        self,
        batch: ExecutionBatch,
        layout: TokenLayout,
        pieces: list[Piece],
        *,
        late: LateTokens | None = None,
        first_header: int = 0,
    ) -> list[PieceArrays]:
        """Fill in the headers of the step's pieces; return the arrays they point to.

        `late`: they are of tokens that go on alone.
        """
        kept: list[PieceArrays] = []
        for index, piece in enumerate(pieces, first_header):
            first, end = piece.first, piece.end
            query_lens = batch.query_lens
            if len(pieces) > 1 or late is not None:  # the tokens of each row in this piece
                rows = layout.token_rows[first:end]
                query_lens = np.bincount(rows, minlength=len(query_lens)).astype(np.int32)
            positions = layout.positions[first:end]
            items = attention_items(query_lens, self._attention.group)
            arrays = PieceArrays(
                layout.token_ids[first:end],
                positions,
                layout.kv_slots[first:end],
                layout.block_tables,
                plan_attention(items, positions, layout.block_tables, self._attention),
                NO_ROWS
                if self._states is None
                else state_rows(layout.token_rows[first:end], positions, batch.states),
                NONE_TAKEN if late is None else late.taken[first:end],
                adapter_runs(batch.adapters[layout.token_rows[first:end]])
                if len(batch.adapters)
                else NO_RUNS,
            )
            shift = 0 if late is None else late.first
            self._headers.describe_tokens(index, shift + first, arrays, self._chunk_heads)
            kept.append(arrays)
        return kept

    def _entries(self, parts: Parts) -> Int64Array | list[Entry]:
        """Return the entries of a step: headers of its pieces first, then of its groups."""
        if parts.num_pieces > FEW_PARTS or parts.num_groups > 1:
            return self._all_entries(parts)
        if parts not in self._ordinary:
            self._ordinary[parts] = np.array(self._all_entries(parts), dtype=np.int64)
        return self._ordinary[parts]

    def _all_entries(self, parts: Parts) -> list[Entry]:
        num_headers = parts.num_pieces + parts.num_groups
        headers = [self._headers.address(index) for index in range(num_headers)]
        return self._entries_of(parts, headers)

    def _entries_of(self, parts: Parts, all_headers: Sequence[int]) -> list[Entry]:
        """Return the entries of a step by the addresses of its headers."""
        model, kinds = self._model, parts.kinds
        headers = all_headers[: len(kinds)]
        entries = [(record, header) for header in headers for record in model.before]
        for index, layers in enumerate(zip(*model.layers_of_kinds, strict=True)):
            of_pieces = [layers[kind] for kind in kinds]
            for of_piece, header in zip(of_pieces, headers, strict=True):
                entries += [(record, header) for record in of_piece.write]
            if parts.late is not None and model.late is not None and index == model.late.first:
                kinds, headers = parts.late, all_headers[len(kinds) : parts.num_pieces]
                entries += [(record, header) for header in headers for record in model.late.before]
                of_pieces = [layers[kind] for kind in kinds]
            for of_piece, header in zip(of_pieces, headers, strict=True):
                entries += [(record, header) for record in of_piece.read]
        for header in all_headers[parts.num_pieces :]:
            entries += self._group_entries(header)
        return entries

    def _entries_of_decode(self, kind: PieceKind) -> Int64Array:
        """Return the entries of steps that take the short way."""
        return np.array(
            self._entries_of(Parts((kind,), None, 1), self._decode.headers), dtype=np.int64
        )

    def _group_entries(self, header: int) -> list[Entry]:
        return [(record, header) for record in (*self._model.ends.after, self._sample)]

    def _embed(self, wants: EmbeddedTokens, places: Int64Array, first_header: int) -> Float64Array:
        """Return the hidden states that are wanted of the step that has just run, [E, hidden].

        `places`: where the rows of their tokens are.
        """
        model, sums = self._model, EmbeddingSums(wants, self._spec.hidden_size)
        for number, first in enumerate(range(0, len(places), LOGITS_ROWS), first_header):
            out_tokens = np.ascontiguousarray(places[first : first + LOGITS_ROWS])
            self._headers.describe_logits(number, out_tokens=out_tokens, samples=NO_SAMPLES)
            self._team.run([(model.ends.embed, self._headers.address(number))])
            sums.add(first, model.ends.embedded[: len(out_tokens)])
        return sums.taken()

    def _run_keeping_logits(
        self, parts: Parts, groups: list[LogitsGroup], num_samples: int
    ) -> Float32Array:
        """Run a step group by group, and return the logits of its samples [K, V]."""
        self._team.run(self._all_entries(parts))
        kept = np.zeros((num_samples, self._spec.vocab_size), dtype=np.float32)
        for index, group in enumerate(groups, parts.num_pieces):
            self._team.run(self._group_entries(self._headers.address(index)))
            is_sample = group.wanted < num_samples
            kept[group.wanted[is_sample]] = self._model.ends.logits[group.rows[is_sample]]
        return kept
