"""Not-finite logits of the real CPU executor, from the KV pool to the controller."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from compute_plane.executor.registry import BuiltExecutor, ExecutorContext
from compute_plane.executor.simulated import VOCAB_SIZE
from compute_plane.memory.kv_pool import KvPool
from protos.hetero.compute.v1 import compute_pb2
from tests.compute_plane.executor.tiny_llama import pool_for, tiny_executor, tiny_spec
from tests.compute_plane.executor.tiny_weights import tiny_weights
from tests.compute_plane.rpc.plane_harness import Harness, start

SPEC = replace(tiny_spec(), vocab_size=VOCAB_SIZE)
TEXTS = [b"good", b"bad.", b"fine"]


class CpuHarness(Harness):
    """A plane with a tiny random model; tests may spoil its pool."""

    kv_pool: KvPool

    def _build(self, name: str, context: ExecutorContext) -> BuiltExecutor:
        self.kv_pool = pool_for(SPEC, context.num_blocks, context.block_size)
        self.cpu = tiny_executor(SPEC, tiny_weights(SPEC), self.kv_pool, num_threads=1)
        return BuiltExecutor(name, self.cpu, "cpu/test")

    def close(self) -> None:
        self.channel.close()
        self.plane.stop()


@pytest.fixture
def cpu_plane() -> Iterator[CpuHarness]:
    with tempfile.TemporaryDirectory() as directory:
        harness = CpuHarness(Path(directory))
        yield harness
        harness.close()


def prefill(*slots: int) -> dict:
    """Rows that compute the texts of some slots; slot s has the blocks 2s and 2s + 1."""
    return {
        "starts": [start(slot, TEXTS[slot], [2 * slot, 2 * slot + 1]) for slot in slots],
        "slots": slots,
        "query_lens": [4] * len(slots),
        "positions": [0] * len(slots),
        "sampled_rows": range(len(slots)),
    }


def decode(position: int) -> dict:
    return {
        "slots": [0, 1, 2],
        "query_lens": [1] * 3,
        "positions": [position] * 3,
        "sampled_rows": [0, 1, 2],
    }


@pytest.mark.parametrize("spoilt", [np.nan, np.inf])
def test_a_row_without_finite_logits_fails_alone_and_poisons_its_slot(
    cpu_plane: CpuHarness, spoilt: float
) -> None:
    controller = cpu_plane.open()
    expected = [
        controller.run(**prefill(0, 1, 2)),
        controller.run(**decode(4)),
        controller.run(**decode(5)),
    ]
    controller = cpu_plane.open()
    assert controller.run(**prefill(0, 1, 2)) == expected[0]
    cpu_plane.kv_pool.data.view(np.float32)[2] = spoilt  # the first block of slot 1

    reasons = []
    for position in (4, 5):
        output = controller.execute_one(controller.batch(**decode(position)))
        (failure,) = output.row_failures
        reasons.append((failure.row, failure.reason))
        sound = [output.sampled_token_ids[row] for row in (0, 2)]
        assert sound == expected[position - 3][::2]
    assert reasons == [
        (1, compute_pb2.ROW_FAILURE_REASON_NOT_FINITE),
        (1, compute_pb2.ROW_FAILURE_REASON_POISONED),
    ]
    assert controller.run(**prefill(1)) == expected[0][1:2]  # `starts` heals the slot
