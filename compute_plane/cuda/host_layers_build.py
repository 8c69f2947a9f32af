"""Building the executor of a model whose last layers run on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import structlog
import torch

from compute_plane.cpu.build import build_cpu_layers
from compute_plane.cuda.block_pools import BlockPools, block_bytes, layer_bytes
from compute_plane.cuda.host_layers import HostLayersExecutor
from compute_plane.cuda.host_layers_plan import (
    GIB,
    DeviceBytes,
    device_bytes,
    first_layers,
    first_weights,
    in_gib,
    layers_within,
)
from compute_plane.cuda.largest_step import (
    StepSizes,
    bytes_of_histories,
    bytes_of_scratch,
    bytes_of_tables,
    run_largest_step,
)
from compute_plane.cuda.pool_size import GRAPH_SHARE, STATES_COUNTED, bytes_of_ladder
from compute_plane.cuda.state_pool import state_bytes
from compute_plane.cuda.weights import DTYPES
from compute_plane.errors import DeviceUnavailableError
from compute_plane.executor.registry import BuiltExecutor, ExecutorContext
from compute_plane.executor.warm_up import warm_up
from compute_plane.executor.weight_formats import describe_formats, log_conversions
from compute_plane.memory.sizing import Memory, available_memory_bytes, check_pools_fit
from compute_plane.memory.state_sizing import StateRoom, size_states
from planes.errors import ConfigError

if TYPE_CHECKING:
    from compute_plane.cuda.drivers import Driver
    from compute_plane.cuda.operations import DeviceOperations
    from compute_plane.cuda.weight_plan import WeightPlan
    from compute_plane.cuda.weights import DeviceWeights
    from compute_plane.model.loader import LoadedModel

log = structlog.get_logger()


def num_device_layers(
    context: ExecutorContext,
    driver: Driver,
    weights: WeightPlan,
    operations: DeviceOperations,
    pool_dtype: torch.dtype,
) -> int:
    """Return how many layers of the model run on the device: all without a limit.

    `weights`: of the whole model. A limit beyond what the device has left means that. Where the
    pool sizes itself, all run there if the smallest pool finds room beside them, and a state and
    as much again, if the model has any. Raises ConfigError if not one layer fits.
    """
    limit, num_layers = _limit(context, driver), context.spec.num_layers
    if limit is None:
        return num_layers
    least = _least_blocks(context)
    what = context, driver, weights, operations, pool_dtype
    whole = _needs(*what, least, STATES_COUNTED).whole
    if whole <= limit:
        return num_layers
    if context.spec.kv_sources or context.spec.layer_input_size:
        # What layers on the host would read is on the device.
        raise ConfigError(
            "gpu_memory_limit: models whose layers share keys and values, or have inputs of their "
            f"own, run on the device as a whole, which takes at least {in_gib(whole)} GiB, got "
            f"{limit / GIB:.3g}",
            field="gpu_memory_limit",
        )
    room = room_within_the_limit(context, driver)
    num_states = 1 if room is None else room.num_states
    needs = _needs(*what, context.num_blocks, num_states)
    return min(layers_within(needs, limit), num_layers - 1)


def bytes_beside_states(
    context: ExecutorContext,
    driver: Driver,
    weights: WeightPlan,
    operations: DeviceOperations,
    pool_dtype: torch.dtype,
) -> int:
    """Return what states leave within the limit for a step and the blocks there must be.

    0 where there is no limit: what is left is found out then.
    """
    if context.gpu_memory_limit is None or context.spec.recurrence is None:
        return 0
    num_blocks = _least_blocks(context)
    needs = _needs(context, driver, weights, operations, pool_dtype, num_blocks, num_states=0)
    return needs.whole - weights.num_bytes


def _least_blocks(context: ExecutorContext) -> int:
    return context.block_demand.least if context.fills_memory else context.num_blocks


def _limit(context: ExecutorContext, driver: Driver) -> int | None:
    """Return how many bytes of the device there are; None: nobody said."""
    limit, free = context.gpu_memory_limit, driver.free_bytes()
    return limit if limit is None or free is None else min(limit, free)


def room_within_the_limit(context: ExecutorContext, driver: Driver) -> StateRoom | None:
    """Return the room for states of a model that is cut; None: it has none, or there is no limit.

    As if all its layers had their states on the device, where some do. Raises ConfigError as
    `size_states` does.
    """
    limit = _limit(context, driver)
    if limit is None or context.spec.recurrence is None:
        return None
    memory = Memory(limit, limit)
    return size_states(state_bytes(context.spec), context.max_slots, memory, is_limited=True)


def _needs(
    context: ExecutorContext,
    driver: Driver,
    weights: WeightPlan,
    operations: DeviceOperations,
    pool_dtype: torch.dtype,
    num_blocks: int,
    num_states: int = 1,
) -> DeviceBytes:
    """Return what the model takes with so many blocks and states."""
    spec, block_size = context.spec, context.block_size
    pool_bytes = num_blocks * block_bytes(spec, pool_dtype, block_size)
    sizes, graph_bytes = StepSizes.of(context), 0
    if context.uses_graphs and driver.has_graphs:
        graph_bytes = min(
            bytes_of_ladder(context, operations),
            int(pool_bytes * GRAPH_SHARE / (1 - GRAPH_SHARE)),  # `pool_size` gives no more
        )
    return device_bytes(
        spec,
        weights,
        item_bytes=DTYPES[weights.dtype].itemsize,
        layer_bytes=layer_bytes(spec, pool_dtype, block_size, num_blocks),
        max_tokens=context.max_tokens,
        num_states=num_states,
        more_bytes=bytes_of_tables(spec, sizes) + bytes_of_scratch(spec, sizes, operations),
        whole_bytes=bytes_of_histories(spec, sizes) + graph_bytes,
    )


def build_with_host_layers(
    context: ExecutorContext,
    model: LoadedModel,
    plan: WeightPlan,
    driver: Driver,
    operations: DeviceOperations,
    *,
    pool_dtype: torch.dtype,
    num_layers: int,
    numerics_id: str,
) -> BuiltExecutor:
    """Build the executor that runs the first `num_layers` on a driver's device, the others here.

    `plan`: of the whole model's weights on the device. `pool_dtype`, `numerics_id`: of the device's
    part; the host's keeps keys and values in what the context says for it. Raises ConfigError
    families for what cannot be had here, ModelFileError for the file's faults.
    """
    if context.dtype == "float16":
        raise DeviceUnavailableError(
            "dtype: layers on the host, beyond --gpu-memory-limit, compute in float32 or bfloat16, "
            "got float16",
            field="dtype",
        )
    context = replace(context, fills_memory=False)
    spec, last_layer = first_layers(context.spec, num_layers), context.spec.num_layers - 1
    bytes_of_block = block_bytes(spec, pool_dtype, context.block_size)
    host = build_cpu_layers(
        context,
        model,
        first_layer=num_layers,
        bytes_elsewhere=bytes_of_block,
        room_elsewhere=room_within_the_limit(context, driver),
    )
    num_slots, num_states = 0, 0
    if host.room is not None:
        num_slots, num_states = host.room.num_slots, host.room.num_states
    plan = first_weights(plan, num_layers)
    weights = plan.place(driver.device, context.num_threads)
    log_conversions(weights.conversions)
    _check_pool_fits(
        replace(context, spec=spec), driver, weights, operations, pool_dtype, num_states
    )
    pools = BlockPools(
        spec,
        driver,
        dtype=pool_dtype,
        block_size=context.block_size,
        num_blocks=context.num_blocks,
        num_host_blocks=len(host.kv_pool.host),
        num_states=num_states,
    )
    executor = HostLayersExecutor(
        spec, weights, pools, operations, driver, host.executor, max_tokens=context.max_tokens
    )
    warm_up(executor, context.block_size, has_states=num_states > 0)
    elements = plan.elements + host.weights.elements
    weight_format = describe_formats(elements)
    is_quantised = any(target.block_elements > 1 for _, target in elements)
    log.info(
        "layers are cut at the memory limit, decode graphs are off",
        device=str(driver.device),
        device_layers=f"0-{num_layers - 1}",
        host_layers=f"{num_layers}-{last_layer}",
        gpu_memory_limit=context.gpu_memory_limit,
        weight_format=weight_format,
        kv_cache_dtype=str(pool_dtype).removeprefix("torch."),
        device_bytes=weights.num_bytes + pools.num_bytes,
        host_bytes=host.weights.num_bytes + host.kv_pool.num_bytes,
    )
    return BuiltExecutor(
        "cuda",
        executor,
        f"{numerics_id}/layers-{num_layers}/{host.numerics_id}",
        kv_pool_bytes=pools.num_bytes + host.kv_pool.num_bytes,
        weights_bytes=weights.num_bytes + host.weights.num_bytes,
        dtype=weight_format if is_quantised else plan.dtype,
        num_blocks=pools.num_blocks,
        num_host_blocks=len(host.kv_pool.host),
        tells_prompts_apart=host.executor.tells_prompts_apart,
        num_slots=num_slots,
        num_states=num_states,
    )


def _check_pool_fits(
    context: ExecutorContext,
    driver: Driver,
    weights: DeviceWeights,
    operations: DeviceOperations,
    pool_dtype: torch.dtype,
    num_states: int,
) -> None:
    """Run the largest step of the device's part, and check that it leaves room for the pool.

    And for the states.

    `context`: with the device's part for a model. Raises ConfigError, naming `gpu_memory_limit`
    where what was counted was not enough.
    """
    spec, block_size = context.spec, context.block_size
    bytes_of_block = block_bytes(spec, pool_dtype, block_size)
    bytes_of_states = num_states * state_bytes(spec)
    driver.release_unused()  # what loading the weights has left
    if driver.free_bytes() is None:  # both lie in one memory
        available = available_memory_bytes()
        left = None if available is None else available - bytes_of_states
        check_pools_fit(context.num_blocks, 0, bytes_of_block, left)
        return
    and_states = f" and {num_states} states of sequences" if num_states else ""
    words = (
        f"beside {spec.num_layers} layers and a step of {context.max_tokens} tokens: more, or "
        "fewer --max-num-blocks or --max-tokens-per-batch"
    )
    try:
        run_largest_step(
            spec,
            weights,
            operations,
            driver,
            StepSizes.of(context),
            pool_dtype=pool_dtype,
            has_head=False,
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"gpu_memory_limit: the pool finds no room {words}", field="gpu_memory_limit"
        ) from error
    wanted = context.num_blocks * bytes_of_block + bytes_of_states
    missing = wanted - (driver.free_bytes() or 0)
    if missing > 0:
        raise ConfigError(
            f"gpu_memory_limit: the pool of {context.num_blocks} blocks{and_states} lacks "
            f"{missing} bytes {words}",
            field="gpu_memory_limit",
        )
