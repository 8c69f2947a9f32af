"""What a decode row weighs on the wire between the planes, at a context of so many tokens.

The scheduler and the encoding of the control plane run as they do in it; only the compute plane is
missing, whose sampled tokens nobody reads here.
"""

from __future__ import annotations

from control_plane.core.batch import StepBatch, StepResult
from control_plane.core.generation_params import GenerationParams
from control_plane.core.interface import SchedulerConfig
from control_plane.core.kv_cache import KVCacheManager
from control_plane.core.request import Request
from control_plane.core.scheduler import Scheduler
from control_plane.engine.convert import batch_to_proto
from planes.errors import ExecutionError

ANY_TOKEN = 0
ANY_EPOCH = 1 << 63
"""Epochs have a fixed size on the wire."""


def bytes_of_a_row(context: int, num_rows: int, block_size: int, num_blocks: int) -> float:
    """Return the mean bytes of a decode row, its share of the batch's own fields included.

    The mean is over as many steps as a block has tokens, so over one new block for each row;
    `context` is where they begin. `num_blocks` of the pool: ids of late blocks are longer. Raises
    EngineError if the rows do not fit.
    """
    num_tokens = context + block_size
    scheduler = Scheduler(
        SchedulerConfig(
            max_batch_size=num_rows,
            max_num_seqs=num_rows,
            max_model_len=num_tokens + 1,
            max_total_tokens=num_rows * num_tokens,
            memory_threshold=1.0,
        ),
        KVCacheManager(num_blocks, block_size),
    )
    params = GenerationParams(max_tokens=block_size + 1, temperature=0.0, seed=0, ignore_eos=True)
    for number in range(num_rows):
        scheduler.add_request(Request(number, [ANY_TOKEN] * context, params))
    sizes = []
    while scheduler.has_pending_work():
        output = scheduler.schedule()
        if output is None:
            raise ExecutionError("the scheduler has work but no step")
        batch = output.batch
        if is_decode_of(batch, num_rows):
            sizes.append(_size(batch))
        scheduler.commit(StepResult(batch.step_id, [ANY_TOKEN] * len(batch.sampled_rows)))
        scheduler.get_completed()
    if len(sizes) != block_size:
        raise ExecutionError(
            f"{num_rows} rows of {context} tokens decoded together in {len(sizes)} steps instead "
            f"of {block_size}"
        )
    return sum(sizes) / len(sizes) / num_rows


def is_decode_of(batch: StepBatch, num_rows: int) -> bool:
    """Say whether a step has just so many rows, and all go on from a sampled token."""
    return not batch.starts and list(batch.query_lens) == [1] * num_rows


def _size(batch: StepBatch) -> int:
    step = batch.step_id
    return batch_to_proto(batch, session=1, epoch=ANY_EPOCH, acked_step=max(step - 2, 0)).ByteSize()


def blocks_for(context: int, num_rows: int, block_size: int) -> int:
    """Return a pool in which the rows of `bytes_of_a_row` fit, with a block each to spare."""
    return num_rows * (-(-(context + block_size + 1) // block_size) + 1)
