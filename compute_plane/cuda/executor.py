"""The CUDA executor: a batch in, queued on the device, its answer out.

    check → host columns → one copy → copies of blocks and states
          → layers → logits → samples → one copy → answer

Steps in which every row decodes, without an adapter, take a shorter way to the same: their layers
and logits are one graph (`decode_steps`).

`launch` does everything up to the copy back and returns at once; `StepUnderWay.answer` waits.
`execute` is one after the other. On torch's CPU device the same code runs with
`reference_operations`, each call done when it returns: that is how it is tested without a GPU.

Rows may give other bits in another batch: the products of more than a few rows are a library's
(`dense_kernels`). What depends on a row alone are the others, attention, normalisation and the
choice of the token from given logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from compute_plane.cuda.answers import answer
from compute_plane.cuda.batch_layout import BatchLayout
from compute_plane.cuda.block_pools import plan_copies
from compute_plane.cuda.columns import Layout
from compute_plane.cuda.decode_graphs import LADDER, DecodeGraphs
from compute_plane.cuda.decode_steps import DecodeSteps
from compute_plane.cuda.decode_under_way import DecodeUnderWay, TakenStep
from compute_plane.cuda.embeddings import embedding_columns, run_embeddings
from compute_plane.cuda.last_samples import LastSamples
from compute_plane.cuda.model import DecoderModel
from compute_plane.cuda.sampling_columns import SamplingPlan, plan_sampling
from compute_plane.cuda.sampling_step import results_layout, run_group
from compute_plane.cuda.staging import Berth, StagingRing
from compute_plane.executor.interface import (
    MAX_STEPS_UNDER_WAY,
    ExecutionBatch,
    ExecutionOutput,
)
from compute_plane.executor.logits_groups import wanted_tokens
from compute_plane.executor.token_layout import PoolShape

if TYPE_CHECKING:
    from compute_plane.cuda.block_pools import BlockPools
    from compute_plane.cuda.drivers import Driver, Event
    from compute_plane.cuda.operations import DeviceOperations
    from compute_plane.cuda.step_times import TimedStep
    from compute_plane.cuda.weights import DeviceWeights
    from compute_plane.model.spec import ModelSpec

DEFAULT_MAX_TOKENS: Final = 16384


@dataclass(frozen=True, slots=True)
class StepUnderWay:
    """A step that is queued; a `LaunchedStep`. `done`: when its results are in the berth."""

    batch: ExecutionBatch
    plan: SamplingPlan
    berth: Berth
    vocab_size: int
    block_digests: Sequence[int]
    done: Event
    timed: TimedStep

    @property
    def ended_ns(self) -> int | None:
        """When it was over, once it has been waited for."""
        return self.timed.ended_ns

    def wait(self) -> None:
        """Wait for the step; from any thread, also once the berth is another step's."""
        self.done.wait()

    def answer(self) -> ExecutionOutput:
        """Wait for the step and return what it produced; once only. Raises DeviceLostError."""
        results = self.berth.collect()
        return answer(self.batch, self.plan, results, self.vocab_size, self.block_digests)


class CudaExecutor:
    """Runs batches of a model on one device; a `PipelinedExecutor`.

    `weights`, `pools`: of `spec`'s layers and heads, of one dtype, on the driver's device.
    `max_tokens`: of one batch. `keep_logits`: return the samples' logits, for tests and tools. Not
    thread-safe: one thread, the device thread, calls it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: DeviceWeights,
        pools: BlockPools,
        operations: DeviceOperations,
        driver: Driver,
        *,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        keep_logits: bool = False,
    ) -> None:
        self._spec = spec
        self._pools = pools
        self._operations = operations
        self._driver = driver
        self._max_tokens = max_tokens
        self._keep_logits = keep_logits
        self._shape = PoolShape(
            pools.num_blocks,
            pools.block_size,
            spec.vocab_size,
            len(pools.host),
            pools.num_states,
            0 if weights.adapters is None else weights.adapters.num_adapters,
        )
        longest = min(spec.context_length, pools.num_blocks * pools.block_size)
        with driver.computing():  # which reads what is made here
            # With its padding a graph may have more rows than a batch may have tokens.
            most_tokens = max(max_tokens, LADDER[-1])
            self._model = DecoderModel(spec, weights, pools, operations, longest, most_tokens)
        self._longest = longest
        table_width = -(-longest // pools.block_size)
        self._graphs = DecodeGraphs(driver, self._model, table_width=table_width, longest=longest)
        self._last = LastSamples(spec.vocab_size)
        self._ring = StagingRing(driver, MAX_STEPS_UNDER_WAY)
        self._decode = DecodeSteps(
            driver, self._graphs, operations, pools, self._ring, self._last, self._shape,
            keep_logits=keep_logits,
        )  # fmt: skip

    @property
    def graphs(self) -> DecodeGraphs:
        """The captured decode steps."""
        return self._graphs

    def execute(self, batch: ExecutionBatch) -> ExecutionOutput:
        """Run one step. Raises ValidationError, with nothing changed, if the batch is malformed."""
        return self.launch(batch).answer()

    def execute_graph(self, batch: ExecutionBatch) -> ExecutionOutput:
        """Run one step like `execute`, which takes a graph wherever there is one that fits."""
        return self.execute(batch)

    def capture_decode_graph(self, batch_size: int) -> None:
        """Capture the decode step of `batch_size` rows, where the device has graphs.

        Raises GraphCaptureError.
        """
        self._graphs.capture(batch_size)

    def launch(self, batch: ExecutionBatch) -> StepUnderWay | DecodeUnderWay:
        """Queue one step, of which tokens may be samples of the step launched before.

        Raises ValidationError, with nothing changed, if the batch is malformed; ExecutionError if
        too many steps are under way; DeviceLostError.
        """
        taken = self._decode.take(batch)
        if taken is not None:
            return self._launch_decode(taken)
        layout = BatchLayout(
            batch,
            self._shape,
            max_tokens=self._max_tokens,
            tile_tokens=self._operations.tile_tokens,
        )
        layout.check_lengths(self._longest)
        wanted = layout.places(wanted_tokens(batch, layout.tokens))
        late = None
        if self._model.first_late is not None and not batch.embeddings:
            late = layout.late_tokens(wanted)
            if late is not None:
                wanted = np.searchsorted(late, wanted)
        plan = plan_sampling(batch, wanted, self._spec.vocab_size)
        copies = plan_copies(batch.copies)
        columns = {
            **layout.columns(late),
            **plan.columns,
            **self._last.columns(batch, layout, plan),
            **embedding_columns(batch, layout),
            "block_pairs": copies.pairs,
        }
        berth = self._ring.take()
        try:
            with self._driver.computing():
                inputs = self._ring.upload(berth, Layout.of(columns), columns, layout.rooms)
                self._last.fill_in(inputs)
                self._pools.run(copies, inputs["block_pairs"], self._operations)
                if self._pools.states is not None:
                    self._pools.states.run(batch.state_copies)
                timed = self._ring.times.begin(None)
                done = self._compute(layout, plan, inputs, berth, len(batch.embeddings), timed)
            digests = [self._pools.digest(block) for block in batch.digest_blocks]
        except BaseException:  # whatever it is: a berth that is not freed is lost
            berth.abandon()
            raise
        return StepUnderWay(batch, plan, berth, self._spec.vocab_size, digests, done, timed)

    def _launch_decode(self, taken: TakenStep) -> DecodeUnderWay:
        """Queue a step that goes the short way (`decode_steps`)."""
        berth = self._ring.take()
        try:
            with self._driver.computing():
                return self._decode.launch(taken, berth)
        except BaseException:  # as in `launch`
            berth.abandon()
            raise

    def _compute(
        self,
        layout: BatchLayout,
        plan: SamplingPlan,
        inputs: dict[str, torch.Tensor],
        berth: Berth,
        num_embeddings: int,
        timed: TimedStep,
    ) -> Event:
        """Queue layers, logits, samples and the copy of the results; return when they are there."""
        spec, step = self._spec, layout.tensors(inputs)
        results_of = results_layout(
            plan,
            spec.vocab_size,
            keep_logits=self._keep_logits,
            embeddings=(num_embeddings, spec.hidden_size),
        )
        buffer = self._driver.device_buffer(results_of.num_bytes)
        results = results_of.tensors(buffer)
        hidden = self._model.run(step)
        for group in plan.groups:
            logits = self._model.logits(hidden, inputs["out_tokens"][group.out_tokens])
            run_group(group, logits, inputs, results, self._operations)
        run_embeddings(self._model, hidden, inputs, results)
        done = berth.fetch(results_of, buffer, timed)
        self._last.keep(results["tokens"], plan)
        return done
