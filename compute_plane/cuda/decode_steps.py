"""Steps in which every row decodes, by the shortest way from the batch to the graph that holds it.

Most steps of a busy plane are such. What they have in common is kept: the host's columns, which are
filled in place, the tensors and views of the device's side, what the samples want (`decode_wants`).
Left for each step are its tokens, positions, slots and lengths, in one copy to the device, and what
the samples gave in another. Log-probabilities, penalties and biases cost a run of steps their
launches, and what is sent once.

What no graph holds, adapters, log-probabilities of prompts, and whatever is wrong with a batch are
left to the ordinary way, which says what is wrong (`executor`); the tests hold both against each
other.

Array letters: R rows of the graph, S rows, K samples, W width of the batch's block tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from compute_plane.cuda.columns import ALIGNMENT, Layout
from compute_plane.cuda.decode_graphs import LADDER
from compute_plane.cuda.decode_inputs import HostRows
from compute_plane.cuda.decode_under_way import DecodeUnderWay, TakenStep
from compute_plane.cuda.decode_wants import NOT_RAGGED, DecodeWants, Ragged, keys_of
from compute_plane.cuda.masks import have_masks
from compute_plane.cuda.operands import MAX_LOGPROBS
from compute_plane.cuda.sampling_step import GroupWork, results_layout
from compute_plane.cuda.state_pool import OwnStates
from compute_plane.cuda.table_updates import known_after, update_tables
from compute_plane.executor.decode_checks import DecodeChecks
from compute_plane.executor.sampling_rows import SamplingRows
from compute_plane.executor.token_layout import check_copies
from planes.errors import ValidationError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from compute_plane.cuda.block_pools import BlockPools
    from compute_plane.cuda.decode_graphs import DecodeGraphs
    from compute_plane.cuda.decode_inputs import GraphInputs
    from compute_plane.cuda.drivers import Driver
    from compute_plane.cuda.last_samples import LastSamples
    from compute_plane.cuda.operations import DeviceOperations
    from compute_plane.cuda.staging import Berth, StagingRing
    from compute_plane.executor.interface import ExecutionBatch
    from compute_plane.executor.token_layout import PoolShape

Array = npt.NDArray[Any]

MOST_ROWS: Final = LADDER[-1]
MAX_WORKS: Final = 1024
"""Of tensors that are kept made, by what they depend on."""
RESULT_BYTES: Final = 4 * MOST_ROWS * (3 + 2 * MAX_LOGPROBS) + 5 * ALIGNMENT
"""Results of that many samples with log-probabilities take no more."""


@dataclass(slots=True)
class _Work:
    """What is done with the logits, and where its results lie on the device, and how.

    `again`: what queues it once more with `logits`, as `DeviceOperations.repeated` has it.
    """

    layout: Layout
    memory: Tensor
    tokens: Tensor
    group: GroupWork
    again: Callable[[], None] | None = None
    logits: Tensor | None = None


class DecodeSteps:
    """Launches the steps that it takes. `keep_logits`: as in `CudaExecutor`."""

    def __init__(
        self,
        driver: Driver,
        graphs: DecodeGraphs,
        operations: DeviceOperations,
        pools: BlockPools,
        ring: StagingRing,
        last: LastSamples,
        shape: PoolShape,
        *,
        keep_logits: bool,
    ) -> None:
        self._driver = driver
        self._graphs = graphs
        self._operations = operations
        self._pools = pools
        self._own_states = OwnStates(shape.num_states)
        self._ring = ring
        self._last = last
        self._shape = shape
        self._checks = DecodeChecks(shape, graphs.longest, last, MOST_ROWS)
        self._keep_logits = keep_logits
        self._hosts: dict[GraphInputs, HostRows] = {}
        self._works: dict[object, _Work] = {}
        self._keys: object = None
        self._wants: DecodeWants | None = None
        self._ragged: Ragged | None = None
        self._sent: Mapping[str, Tensor] = {}

    def take(self, batch: ExecutionBatch) -> TakenStep | None:
        """Return the batch as it goes this way; None: it goes the ordinary one."""
        num_rows, num_samples = len(batch.query_lens), len(batch.sampling)
        most = max(num_rows, num_samples)
        if batch.prompt_logprob_rows or not (num_rows and num_samples) or most > MOST_ROWS:
            return None
        if batch.embeddings or batch.adapters.size or have_masks(batch.sampling):
            return None
        rung = self._graphs.rung(most)
        kv_slots = None if rung is None else self._checks.kv_slots(batch)
        if rung is None or kv_slots is None or not self._own_states.has(batch):
            return None
        try:
            check_copies(batch.copies, self._shape)
            wants = self._wants_of(batch)
            ragged = self._ragged_of(wants, batch)
        except ValidationError:
            return None
        return TakenStep(batch, rung, kv_slots, wants, ragged)

    def launch(self, step: TakenStep, berth: Berth) -> DecodeUnderWay:
        """Queue a step. Raises GraphReplayError, and what the runtime reports."""
        batch, rung, wants = step.batch, step.num_graph_rows, step.wants
        inputs = self._graphs.inputs(rung)
        ragged = self._send(step, berth)
        if self._pools.states is not None:
            self._pools.states.run(batch.state_copies)
        host = self._host_rows(inputs)
        self._fill(host, step, ragged)
        num_awaited, in_order = self._fill_awaited(host, batch)
        num_grown = self._fill_histories(host, step, ragged)
        self._upload(inputs, host, batch, berth, is_whole=num_awaited > 0)
        columns = inputs.columns
        if in_order:
            self._last.put_first(self._driver, inputs.step.token_ids, len(batch.query_lens))
        elif num_awaited:
            self._last.put(
                columns["token_ids"],
                columns["awaited_tokens"][:num_awaited],
                columns["awaited_samples"][:num_awaited],
            )
        if num_grown:
            tokens = columns["token_ids"].index_select(0, columns["history_rows"][:num_grown])
            self._sent["history"].index_copy_(0, columns["history_ends"][:num_grown], tokens)
        logits = self._graphs.run(rung)
        timed = self._ring.times.begin(rung)
        work = self._work(inputs, berth, wants)
        self._run(work, logits)
        done = berth.fetch(work.layout, work.memory, timed)
        if wants.is_in_order:
            self._last.keep_in_order(work.tokens)
        else:
            self._last.keep(work.tokens, wants.plan)
        digests = [self._pools.digest(block) for block in batch.digest_blocks]
        self._ragged = ragged
        return DecodeUnderWay(batch, wants, berth, self._shape.vocab_size, digests, done, timed)

    def _host_rows(self, inputs: GraphInputs) -> HostRows:
        host = self._hosts.get(inputs)
        if host is None:
            host = self._hosts[inputs] = HostRows(inputs)
        return host

    def _wants_of(self, batch: ExecutionBatch) -> DecodeWants:
        """Return the plan of a step's samples, the same one while their keys are the same."""
        sampling = batch.sampling
        keys = sampling.keys if isinstance(sampling, SamplingRows) else keys_of(sampling)
        if self._wants is None or keys != self._keys:
            self._wants = DecodeWants.of(keys_of(sampling), self._shape.vocab_size)
            self._keys = keys
        return self._wants

    def _ragged_of(self, wants: DecodeWants, batch: ExecutionBatch) -> Ragged | None:
        """Return what a step must send beside its columns; None: it is all there."""
        if not (len(wants.adjusted) or batch.copies):
            return NOT_RAGGED
        last = self._ragged
        if (
            last is not None
            and last.upload == self._ring.num_uploads
            and last.is_continued_by(wants, batch)
        ):
            return None
        return Ragged.of(wants, batch, self._shape.vocab_size)

    def _send(self, step: TakenStep, berth: Berth) -> Ragged:
        """Queue the copy of what has no fixed length, and of blocks; return what is there."""
        ragged, self._ragged = step.ragged or self._ragged, None
        if ragged is None:
            raise ValueError("a step that sends nothing goes on from one that has")
        if step.ragged is None:
            ragged.grow()
        elif ragged is not NOT_RAGGED:
            self._sent = self._ring.upload(berth, Layout.of(ragged.arrays), ragged.arrays)
            ragged.upload, ragged.arrays = self._ring.num_uploads, {}
            self._pools.run(ragged.copies, self._sent["block_pairs"], self._operations)
        return ragged

    def _fill(self, host: HostRows, step: TakenStep, ragged: Ragged) -> None:
        """Fill the host's columns in, but for what `_fill_awaited` and `_fill_histories` do."""
        batch, arrays, wants = step.batch, host.arrays, step.wants
        num_rows, sampling = len(batch.query_lens), batch.sampling
        host.resize(num_rows)
        arrays["token_ids"][:num_rows] = batch.input_tokens
        arrays["positions"][:num_rows] = batch.positions
        arrays["decode_lens"][:num_rows] = batch.seq_lens
        arrays["kv_slots"][:num_rows] = step.kv_slots
        if self._pools.states is not None:
            host.fill_states(batch.states, batch.positions)
        positions = (
            sampling.positions
            if isinstance(sampling, SamplingRows)
            else np.array([row.position for row in sampling], dtype=np.int64)
        )
        if not wants.is_in_order:
            positions = positions[wants.plan.sample_order]
        arrays["sample_positions"][: len(sampling)] = positions
        staying = (wants, batch.sampled_rows.tobytes(), ragged)
        if host.staying != staying:
            host.staying = None  # a parameter that no column holds leaves the others half filled in
            wants.fill(arrays, batch.sampled_rows, ragged)
            host.staying = staying

    def _fill_awaited(self, host: HostRows, batch: ExecutionBatch) -> tuple[int, bool]:
        """Fill in which tokens are samples of the step before; return how many are listed.

        And whether, instead, the rows await the first samples, one after the other.
        """
        sources = batch.input_sources
        if sources is None:
            return 0, False
        if self._last.is_in_order and self._checks.awaits_first(sources):
            return 0, True
        awaited = np.flatnonzero(sources >= 0)
        host.arrays["awaited_tokens"][: len(awaited)] = awaited
        host.arrays["awaited_samples"][: len(awaited)] = self._last.places(sources[awaited])
        return len(awaited), False

    def _fill_histories(self, host: HostRows, step: TakenStep, ragged: Ragged) -> int:
        """Fill in how long histories are; return how many get a token on the device.

        The last token of one that was sent by now is missing only where it is awaited.
        """
        batch, wants, num_adjusted = step.batch, step.wants, len(ragged.lengths)
        if not num_adjusted:
            return 0
        arrays = host.arrays
        arrays["history_lengths"][:num_adjusted] = ragged.lengths
        rows = batch.sampled_rows[wants.plan.adjusted_order]
        grows = ragged.lengths > 0
        if step.ragged is not None:
            if batch.input_sources is None:
                return 0
            grows &= batch.input_sources[rows] >= 0
        which = np.flatnonzero(grows)
        arrays["history_rows"][: len(which)] = rows[which]
        arrays["history_ends"][: len(which)] = ragged.starts[which] + ragged.lengths[which] - 1
        return len(which)

    def _upload(
        self,
        inputs: GraphInputs,
        host: HostRows,
        batch: ExecutionBatch,
        berth: Berth,
        *,
        is_whole: bool,
    ) -> None:
        """Queue the copy of what is new; all of it if `is_whole`."""
        memory = inputs.memory
        is_whole |= memory.staying is not host.staying
        first = 0 if is_whole else inputs.first_moving
        parts = [host.bytes[first:]]
        tables, known = batch.block_tables, memory.tables_known
        used = batch.positions // self._shape.block_size + 1
        update = update_tables(known, tables, used, inputs.step.decode_tables.shape[1])
        if update is not None:
            parts += update.parts
        source, begin, num_bytes = berth.fill_bytes(parts)
        memory.forget()
        self._driver.copy_part(memory.columns, first, source, begin, num_bytes)
        if update is not None:
            inputs.take_tables(update.num_entries, update.rows, update.width)
        memory.staying = host.staying
        memory.tables_known = known_after(tables, used)

    def _run(self, work: _Work, logits: Tensor) -> None:
        """Queue what is done with a graph's logits; the same again if they lie where they did."""
        group = work.group
        if not group.is_repeatable:
            group.run(logits, self._sent, self._operations)
        elif work.again is not None and work.logits is logits:
            work.again()
        else:
            first = partial(group.run, logits, {}, self._operations)
            work.again, work.logits = self._operations.repeated(first), logits

    def _work(self, inputs: GraphInputs, berth: Berth, wants: DecodeWants) -> _Work:
        """Return what a step in this berth does with the logits."""
        key = inputs, berth, wants.shape
        made = self._works.get(key)
        if made is None:
            layout = results_layout(
                wants.plan, self._shape.vocab_size, keep_logits=self._keep_logits
            )
            memory = berth.device_results(max(layout.num_bytes, RESULT_BYTES))[: layout.num_bytes]
            results = layout.tensors(memory)
            group = GroupWork.of(wants.group, inputs.columns, results)
            if len(self._works) == MAX_WORKS:
                self._works.clear()
            made = self._works[key] = _Work(layout, memory, results["tokens"], group)
        return made
