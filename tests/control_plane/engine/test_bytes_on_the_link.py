from __future__ import annotations

import pytest

from control_plane.core.batch import StepResult
from control_plane.core.generation_params import GenerationParams
from control_plane.core.kv_cache import KVCacheManager
from control_plane.core.request import Request
from control_plane.core.scheduler import Scheduler, SchedulerConfig
from control_plane.engine.convert import batch_to_proto

NUM_STEPS = 32
"""Two blocks long, so that new blocks count with the share they have."""


def bytes_of_decoding(context: int, num_rows: int) -> float:
    """The mean size of a decode step on the wire, with `num_rows` rows of that context."""
    config = SchedulerConfig(
        max_batch_size=num_rows, max_num_seqs=num_rows, max_model_len=8192, max_total_tokens=200000
    )
    scheduler = Scheduler(config, KVCacheManager(num_rows * 300, 16, prefix_cache=False))
    params = GenerationParams(max_tokens=NUM_STEPS + 2, seed=1, ignore_eos=True)
    for number in range(num_rows):
        scheduler.add_request(Request(number, [65] * context, params))
    sizes = []
    for _ in range(NUM_STEPS + 1):
        output = scheduler.schedule()
        assert output is not None
        batch = output.batch
        assert batch.num_rows == num_rows
        wire = batch_to_proto(batch, session=1, epoch=2**63, acked_step=batch.step_id - 1)
        sizes.append(len(wire.SerializeToString()))
        scheduler.commit(StepResult(batch.step_id, [66] * num_rows))
    assert sizes[0] > context  # the tokens and blocks of the prompt travel once
    return sum(sizes[1:]) / NUM_STEPS


@pytest.mark.parametrize("num_rows", [1, 32])
def test_a_decode_step_does_not_grow_with_the_context(num_rows):
    short, long = bytes_of_decoding(64, num_rows), bytes_of_decoding(4096, num_rows)
    assert long <= 1.2 * short
