"""How many blocks the pools get: what states, the largest step and the decode graphs leave.

On a device that says how much memory it has, the largest step is run before there is a pool, and
what is free after it is free indeed. Where the device is the processor, its memory is the host's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch

from compute_plane.cuda.block_pools import block_bytes
from compute_plane.cuda.decode_graphs import batch_sizes, bytes_of_graphs
from compute_plane.cuda.largest_step import StepSizes, run_largest_step
from compute_plane.cuda.state_pool import state_bytes
from compute_plane.memory.sizing import (
    MIB,
    Memory,
    PoolBudget,
    available_memory_bytes,
    check_pools_fit,
    choose_num_blocks,
    host_memory,
    size_in_host_memory,
)
from compute_plane.memory.state_sizing import SHARE_OF_FREE, StateRoom, size_states
from planes.errors import ConfigError

if TYPE_CHECKING:
    from compute_plane.cuda.drivers import Driver
    from compute_plane.cuda.operations import DeviceOperations
    from compute_plane.cuda.weights import DeviceWeights
    from compute_plane.executor.registry import ExecutorContext

GRAPH_SHARE: Final = 0.1
"""Of the memory that is left for pool and graphs: the most graphs may take."""
STATES_COUNTED: Final = SHARE_OF_FREE
"""For so many there is room within a limit that a model is not cut at: one, for they get a part of
what is free."""


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Blocks of both pools, and the bytes that are set aside for decode graphs."""

    num_blocks: int
    num_host_blocks: int
    graph_bytes: int


def size_pools(
    context: ExecutorContext,
    driver: Driver,
    weights: DeviceWeights,
    operations: DeviceOperations,
    pool_dtype: torch.dtype,
    *,
    bytes_of_states: int = 0,
) -> PoolSizes:
    """Size the pools once the weights are placed. Raises ConfigError for what does not fit.

    `bytes_of_states`: which will be taken beside.
    """
    bytes_of_block = block_bytes(context.spec, pool_dtype, context.block_size)
    driver.release_unused()  # what loading the weights has left
    if driver.free_bytes() is None:
        num_blocks, num_host_blocks = size_in_host_memory(
            context.block_demand,
            context.swap_bytes,
            bytes_of_block,
            utilization=context.gpu_memory_utilization,
            memory=_left_by(bytes_of_states),
        )
        return PoolSizes(num_blocks, num_host_blocks, graph_bytes=0)  # a processor has none
    num_host_blocks = check_pools_fit(
        0, context.swap_bytes, bytes_of_block, available_memory_bytes()
    )
    _run_largest_step(context, driver, weights, operations, pool_dtype)
    budget = pool_budget(context, driver, operations, weights.num_bytes, bytes_of_states)
    num_blocks = choose_num_blocks(context.block_demand, budget, bytes_of_block)
    return PoolSizes(num_blocks, num_host_blocks, budget.aside_bytes - bytes_of_states)


def room_for_states(
    context: ExecutorContext, driver: Driver, bytes_beside: int = 0
) -> StateRoom | None:
    """Return the room for states once the weights are placed; None: the model has none.

    `bytes_beside`: which are to be left within a limit for a step and the blocks. Raises
    ConfigError as `size_states` does.
    """
    if context.spec.recurrence is None:
        return None
    driver.release_unused()
    bytes_of_state = state_bytes(context.spec)
    free = driver.free_bytes()
    memory = host_memory()
    if free is not None:
        total = int(_share(context) * driver.total_bytes())
        left_alone = driver.total_bytes() - total
        free = max(0, free - left_alone)
        # As many as `num_device_layers` has counted are there, whatever the allocator rounds up.
        counted = min(free, STATES_COUNTED * bytes_of_state)
        memory = Memory(total, max(counted, free - bytes_beside))
    is_limited = free is not None and context.gpu_memory_limit is not None
    return size_states(bytes_of_state, context.max_slots, memory, is_limited=is_limited)


def pool_budget(
    context: ExecutorContext,
    driver: Driver,
    operations: DeviceOperations,
    weights_bytes: int,
    bytes_of_states: int = 0,
) -> PoolBudget:
    """Return what the pool may take, once the largest step was run.

    A limit on the device's memory (`gpu_memory_limit`) stands for the share of it.
    """
    total, free = driver.total_bytes(), driver.free_bytes() or 0
    share = _share(context)
    limit, used = int(share * total), total - free
    aside = 0
    if context.uses_graphs and driver.has_graphs:
        most = max(0, int(GRAPH_SHARE * (limit - used - bytes_of_states)))
        aside = min(bytes_of_ladder(context, operations), most)
    words = (
        f"of {total // MIB} MiB a share of {share:g} may be taken (--gpu-memory-utilization), "
        f"{used // MIB} MiB are taken once a step of {context.max_tokens} tokens was run "
        f"(--max-tokens-per-batch; weights: {weights_bytes // MIB} MiB), {aside // MIB} MiB are "
        "for decode graphs (--no-cuda-graph)"
    )
    if bytes_of_states:
        words += f", {bytes_of_states // MIB} MiB for states of sequences"
    return PoolBudget(
        limit_bytes=limit, used_bytes=used, aside_bytes=aside + bytes_of_states, words=words
    )


def bytes_of_ladder(context: ExecutorContext, operations: DeviceOperations) -> int:
    """Return what the decode graphs of a plane take together, at most."""
    spec, sizes = context.spec, batch_sizes(context.max_rows)
    scratch_bytes = operations.decode_scratch_bytes(sizes[-1], spec.context_length)
    return bytes_of_graphs(spec, sizes, context.block_size, scratch_bytes)


def _share(context: ExecutorContext) -> float:
    """Return the share of the device's memory, or of the limit, that may be taken."""
    return context.gpu_memory_utilization if context.gpu_memory_limit is None else 1.0


def _left_by(num_bytes: int) -> Memory | None:
    """Return the host's memory once so many bytes are taken."""
    memory = host_memory()
    return memory and replace(memory, free_bytes=memory.free_bytes - num_bytes)


def _run_largest_step(
    context: ExecutorContext,
    driver: Driver,
    weights: DeviceWeights,
    operations: DeviceOperations,
    pool_dtype: torch.dtype,
) -> None:
    try:
        run_largest_step(
            context.spec,
            weights,
            operations,
            driver,
            StepSizes.of(context),
            pool_dtype=pool_dtype,
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"max_tokens_per_batch: a step of {context.max_tokens} tokens finds no room beside "
            f"weights of {weights.num_bytes // MIB} MiB on a device of "
            f"{driver.total_bytes() // MIB} MiB: a smaller number takes less",
            field="max_tokens_per_batch",
        ) from error
