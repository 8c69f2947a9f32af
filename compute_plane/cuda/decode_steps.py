"""Decode steps that want nothing but tokens, by the shortest way from the batch to the graph.

Most steps of a busy plane are such: every row computes one token, a graph holds them all, and of
each sample nothing but its token is wanted. What such steps have in common is kept: the host's
columns, which are filled in place, the tensors and views of the device's side, the parameters of
the draws. Left for each step are its tokens, positions, slots and lengths, in one copy to the
device, and the tokens that come back in another.

Whatever is unusual about a batch, and whatever is wrong with it, takes the ordinary way, which says
so (`executor`); the tests hold both against each other.

Array letters: R rows of the graph, S rows, K samples, W width of the batch's block tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from compute_plane.cuda.answers import NOT_FINITE
from compute_plane.cuda.columns import Layout
from compute_plane.cuda.decode_graphs import LADDER
from compute_plane.cuda.decode_inputs import HostRows
from compute_plane.cuda.sampling_columns import needs_of
from compute_plane.executor.interface import ExecutionBatch, ExecutionOutput
from compute_plane.executor.sampling_rows import SamplingRows, are_plain
from kernels.reference.sampling import inverse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from compute_plane.cuda.decode_graphs import DecodeGraphs
    from compute_plane.cuda.decode_inputs import GraphInputs
    from compute_plane.cuda.drivers import Driver, Event
    from compute_plane.cuda.last_samples import LastSamples
    from compute_plane.cuda.operations import DeviceOperations
    from compute_plane.cuda.staging import Berth
    from compute_plane.executor.interface import SamplingRow
    from compute_plane.executor.step import SamplingKey
    from compute_plane.executor.token_layout import PoolShape

Array = npt.NDArray[Any]

MOST_ROWS: Final = LADDER[-1]


@dataclass(frozen=True, slots=True)
class DecodeUnderWay:
    """Such a step that is queued; a `LaunchedStep`. `done`: when its tokens are in the berth."""

    batch: ExecutionBatch
    berth: Berth
    done: Event

    def wait(self) -> None:
        """Wait for the step; from any thread, also once the berth is another step's."""
        self.done.wait()

    def answer(self) -> ExecutionOutput:
        """Wait for the step and return its tokens; once only. Raises DeviceLostError."""
        results = self.berth.collect()
        is_finite = results["is_finite"]
        if is_finite.all():
            return ExecutionOutput(results["tokens"])
        failed = self.batch.sampled_rows[is_finite == 0].tolist()
        return ExecutionOutput(results["tokens"], dict.fromkeys(failed, NOT_FINITE))


@dataclass(frozen=True, slots=True)
class TakenStep:
    """A batch that goes this way: the graph's rows, the slot of the pool that each row writes."""

    batch: ExecutionBatch
    num_graph_rows: int
    kv_slots: Array


@dataclass(frozen=True, slots=True)
class _Results:
    """Where the results of K samples lie on the device, and how: [K] each."""

    layout: Layout
    memory: Tensor
    tokens: Tensor
    is_finite: Tensor


class DecodeSteps:
    """Launches the steps that it takes. `longest`: tokens of a sequence, at most."""

    def __init__(
        self,
        driver: Driver,
        graphs: DecodeGraphs,
        operations: DeviceOperations,
        last: LastSamples,
        shape: PoolShape,
        longest: int,
    ) -> None:
        self._driver = driver
        self._graphs = graphs
        self._operations = operations
        self._last = last
        self._shape = shape
        self._longest = longest
        self._hosts: dict[GraphInputs, HostRows] = {}
        self._results: dict[tuple[Berth, int], _Results] = {}
        self._every: Array = np.arange(MOST_ROWS)

    def take(self, batch: ExecutionBatch) -> TakenStep | None:
        """Return the batch as it goes this way; None: it goes the ordinary one."""
        num_rows = len(batch.query_lens)
        if (
            batch.copies
            or batch.prompt_logprob_rows
            or batch.digest_blocks
            or not 0 < num_rows <= MOST_ROWS
        ):
            return None
        rung = self._graphs.rung(num_rows)
        if (
            rung is None
            or not 0 < len(batch.sampling) <= rung
            or not are_plain(batch.sampling)
            or not self._is_sound(batch, num_rows)
        ):
            return None
        positions, size = batch.positions, self._shape.block_size
        places = positions // size
        kv_slots = batch.block_tables[self._every[:num_rows], places].astype(np.int64) * size
        kv_slots += positions - places * size
        if len(set(kv_slots.tolist())) != num_rows:
            return None
        return TakenStep(batch, rung, kv_slots)

    def launch(self, step: TakenStep, berth: Berth) -> DecodeUnderWay:
        """Queue a step. Raises GraphReplayError, and what the runtime reports."""
        batch, rung = step.batch, step.num_graph_rows
        num_rows, num_samples = len(batch.query_lens), len(batch.sampling)
        inputs = self._graphs.inputs(rung)
        host = self._host_rows(inputs)
        self._fill(host, step)
        sources = batch.input_sources
        in_order, num_awaited = False, 0
        if sources is not None:
            in_order = self._last.are_in_order(sources, self._every[:num_rows])
            if not in_order:
                awaited = np.flatnonzero(sources >= 0)
                num_awaited = len(awaited)
                host.arrays["awaited_tokens"][:num_awaited] = awaited
                host.arrays["awaited_samples"][:num_awaited] = self._last.places(sources[awaited])
        self._upload(inputs, host, batch, berth, is_whole=num_awaited > 0)
        if in_order:
            self._last.put_first(inputs.step.token_ids, num_rows)
        elif num_awaited:
            columns = inputs.columns
            self._last.put(
                columns["token_ids"],
                columns["awaited_tokens"][:num_awaited],
                columns["awaited_samples"][:num_awaited],
            )
        logits = self._graphs.run(rung)
        results = self._results_of(berth, num_samples)
        draws = inputs.draws(num_samples, host.needs)
        self._operations.sample(results.tokens, results.is_finite, logits, draws)
        done = berth.fetch(results.layout, results.memory)
        self._last.keep_in_order(results.tokens)
        return DecodeUnderWay(batch, berth, done)

    def _is_sound(self, batch: ExecutionBatch, num_rows: int) -> bool:
        """Whether all rows decode, and nothing that becomes an address is out of its range."""
        shape, tables = self._shape, batch.block_tables
        tokens, positions, seq_lens = batch.input_tokens, batch.positions, batch.seq_lens
        sampled, sources = batch.sampled_rows, batch.input_sources
        every = (batch.query_lens, tokens, positions, seq_lens, sampled, tables)
        if any(array.dtype != np.int32 for array in every) or tables.ndim != 2:
            return False
        if not (
            len(tokens) == len(positions) == len(seq_lens) == len(tables) == num_rows
            and len(sampled) == len(batch.sampling)
        ):
            return False
        if sources is not None and not (
            sources.shape == (num_rows,)
            and sources.min() >= -1
            and sources.max() < self._last.num_samples
        ):
            return False
        return bool(
            (batch.query_lens == 1).all()
            and (positions + 1 == seq_lens).all()
            and positions.min() >= 0
            and seq_lens.max() <= min(self._longest, tables.shape[1] * shape.block_size)
            # As unsigned numbers: a negative one is too large.
            and tokens.view(np.uint32).max() < shape.vocab_size
            and sampled.view(np.uint32).max() < num_rows
            and tables.view(np.uint32).max() < shape.num_blocks
        )

    def _host_rows(self, inputs: GraphInputs) -> HostRows:
        host = self._hosts.get(inputs)
        if host is None:
            host = self._hosts[inputs] = HostRows(inputs)
        return host

    def _fill(self, host: HostRows, step: TakenStep) -> None:
        """Fill the host's columns in."""
        batch, arrays = step.batch, host.arrays
        num_rows, num_samples = len(batch.query_lens), len(batch.sampling)
        host.resize(num_rows)
        arrays["token_ids"][:num_rows] = batch.input_tokens
        arrays["positions"][:num_rows] = batch.positions
        arrays["decode_lens"][:num_rows] = batch.seq_lens
        arrays["kv_slots"][:num_rows] = step.kv_slots
        sampling = batch.sampling
        keys: object
        rows: Sequence[SamplingRow | SamplingKey]
        if isinstance(sampling, SamplingRows):
            arrays["sample_positions"][:num_samples] = sampling.positions
            keys, rows = sampling.keys, sampling.keys.keys
        else:
            arrays["sample_positions"][:num_samples] = [row.position for row in sampling]
            keys = rows = [row._replace(position=0) for row in sampling]
        staying = (keys, batch.sampled_rows.tobytes())
        if host.staying != staying:
            host.staying = None  # a parameter that no column holds leaves the others half filled in
            arrays["draw_rows"][:num_samples] = batch.sampled_rows
            host.needs = needs_of(rows)
            _fill_draws(arrays, rows)
            host.staying = staying

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
        tables = batch.block_tables
        sends_tables = memory.tables_sent is not tables
        if sends_tables:
            # All of them: a later step with the same tables may be the first to read the last ones.
            tables = np.ascontiguousarray(tables[:, : inputs.step.decode_tables.shape[1]])
            parts.append(tables.reshape(-1).view(np.uint8))
        filled = berth.fill_bytes(parts)
        memory.forget()
        self._driver.copy(memory.columns[first : first + len(filled)], filled)
        if sends_tables:
            inputs.take_tables(tables.shape)
        memory.staying = host.staying
        # What can still be written may be another's next time.
        memory.tables_sent = None if batch.block_tables.flags.writeable else batch.block_tables

    def _results_of(self, berth: Berth, num_samples: int) -> _Results:
        """Return where a step in this berth puts its results."""
        made = self._results.get((berth, num_samples))
        if made is None:
            layout = _results_layout(num_samples)
            memory = berth.device_results(_results_layout(MOST_ROWS).num_bytes)
            memory = memory[: layout.num_bytes]
            tensors = layout.tensors(memory)
            made = _Results(layout, memory, tensors["tokens"], tensors["is_finite"])
            self._results[berth, num_samples] = made
        return made


def _fill_draws(arrays: Mapping[str, Array], rows: Sequence[SamplingRow | SamplingKey]) -> None:
    """Fill in how samples are drawn."""
    every = slice(len(rows))
    arrays["inverse_temperatures"][every] = [
        inverse(row.temperature) if row.temperature else 0.0 for row in rows
    ]
    arrays["top_ks"][every] = [row.top_k for row in rows]
    arrays["top_ps"][every] = [row.top_p for row in rows]
    arrays["min_ps"][every] = [row.min_p for row in rows]
    arrays["sample_indexes"][every] = [row.sample_index for row in rows]
    arrays["seeds"][every] = np.array([row.seed for row in rows], np.uint64).view(np.int64)


def _results_layout(num_samples: int) -> Layout:
    return Layout(dict.fromkeys(("tokens", "is_finite"), (np.int32, (num_samples,))))
