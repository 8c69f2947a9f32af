"""A model whose first layers run on a device and whose last ones run on the host (ADR 0016).

    device   check → columns → copies → embedding → layers 0 … k − 1 ─┐ float32 rows,
    host     check → copies ─────────────────────── layers k … L − 1 ◀┘ one copy
                                                    → logits → samples → answer

The host's part is the CPU engine, walking through a table that begins at layer k. Both parts have a
KV pool with the same block ids, each of its own layers, and states by the same numbers; whatever
happens to a block or a state happens to both halves of it.

A step is one after the other: the host waits for the device's rows, and the next step for the
host's answer. So there is no `launch`, and nothing to gain by graphs: a layer takes the host many
times as long as its launches take.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor

from compute_plane.cuda.batch_layout import BatchLayout
from compute_plane.cuda.block_pools import plan_copies
from compute_plane.cuda.columns import Layout
from compute_plane.cuda.model import DecoderModel
from compute_plane.cuda.staging import StagingRing
from compute_plane.executor.interface import ExecutionBatch, ExecutionOutput, Float32Array
from compute_plane.executor.token_layout import PoolShape
from compute_plane.memory.block_digest import block_digest

if TYPE_CHECKING:
    from compute_plane.cpu.executor import CpuExecutor
    from compute_plane.cuda.block_pools import BlockPools
    from compute_plane.cuda.drivers import Driver
    from compute_plane.cuda.layer_products import Hidden
    from compute_plane.cuda.operations import DeviceOperations
    from compute_plane.cuda.weights import DeviceWeights
    from compute_plane.model.spec import ModelSpec

ROWS: Final = "hidden_rows"


def rows_for_the_host(hidden: Hidden) -> Tensor:
    """Queue the sums of both parts of the hidden states; return their bytes, float32 [T, hidden].

    That is what the host goes on in: nothing is rounded on the way.
    """
    return hidden.sums().view(-1).view(torch.uint8)


class HostLayersExecutor:
    """Runs batches of a model on a device and on the host; a `GPUExecutor`.

    `spec`: the device's part (`host_layers_plan.first_layers`), of which `weights` and `pools` are.
    `host`: the layers behind it, with as many blocks on both of its pools and as many states; it is
    closed with this executor. `max_tokens`: of one batch. Not thread-safe: one thread, the device
    thread, calls it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: DeviceWeights,
        pools: BlockPools,
        operations: DeviceOperations,
        driver: Driver,
        host: CpuExecutor,
        *,
        max_tokens: int,
    ) -> None:
        self._pools = pools
        self._operations = operations
        self._driver = driver
        self._host = host
        self._max_tokens = max_tokens
        self._shape = PoolShape(
            pools.num_blocks,
            pools.block_size,
            spec.vocab_size,
            len(pools.host),
            pools.num_states,
        )
        self._longest = min(spec.context_length, pools.num_blocks * pools.block_size)
        with driver.computing():  # which reads what is made here
            self._model = DecoderModel(spec, weights, pools, operations, self._longest, max_tokens)
        self._ring = StagingRing(driver, 1)

    def execute(self, batch: ExecutionBatch) -> ExecutionOutput:
        """Run one step. Raises ValidationError, with nothing changed, if the batch is malformed.

        Raises DeviceLostError as well.
        """
        layout = BatchLayout(
            batch,
            self._shape,
            max_tokens=self._max_tokens,
            tile_tokens=self._operations.tile_tokens,
        )
        layout.check_lengths(self._longest)
        output = self._host.execute(batch, lambda: self._hidden_rows(batch, layout))
        if batch.digest_blocks:
            output = replace(output, block_digests=self._digests(batch, output))
        return output

    def capture_decode_graph(self, batch_size: int) -> None:
        """Do nothing: the host's part of a step leaves nothing to save."""

    def execute_graph(self, batch: ExecutionBatch) -> ExecutionOutput:
        """Run one step like `execute`."""
        return self.execute(batch)

    def close(self) -> None:
        """End the host's threads."""
        self._host.close()

    def _hidden_rows(self, batch: ExecutionBatch, layout: BatchLayout) -> Float32Array:
        """Run the device's part; return what it leaves of each token as sent, [T, hidden]."""
        copies = plan_copies(batch.copies)
        columns = {**layout.columns(), "block_pairs": copies.pairs}
        berth = self._ring.take()
        try:
            with self._driver.computing():
                inputs = self._ring.upload(berth, Layout.of(columns), columns, layout.rooms)
                self._pools.run(copies, inputs["block_pairs"], self._operations)
                if self._pools.states is not None:
                    self._pools.states.run(batch.state_copies)
                hidden = self._model.run(layout.tensors(inputs))
                rows_of = Layout({ROWS: (np.float32, tuple(hidden.residual.shape))})
                berth.fetch(rows_of, rows_for_the_host(hidden))
            rows: Float32Array = berth.collect()[ROWS]
        except BaseException:  # whatever it is: a berth that is not freed is lost
            berth.abandon()
            raise
        return rows[layout.places(np.arange(len(rows)))]

    def _digests(self, batch: ExecutionBatch, output: ExecutionOutput) -> list[int]:
        """Return a digest of both halves of each block."""
        return [
            block_digest(np.array([self._pools.digest(block), of_host], dtype=np.uint64))
            for block, of_host in zip(batch.digest_blocks, output.block_digests, strict=True)
        ]
