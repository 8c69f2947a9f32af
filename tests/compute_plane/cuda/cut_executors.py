"""The executor of a tiny model cut between torch's CPU device and the CPU engine."""

from __future__ import annotations

from dataclasses import replace

import torch

from compute_plane.cpu.executor import CpuExecutor
from compute_plane.cpu.packed_weights import pack_weights
from compute_plane.cuda.block_pools import BlockPools
from compute_plane.cuda.drivers import CpuDriver, Driver
from compute_plane.cuda.host_layers import HostLayersExecutor
from compute_plane.cuda.host_layers_plan import first_layers, first_weights
from compute_plane.cuda.operations import DeviceOperations
from compute_plane.cuda.reference_operations import ReferenceOperations
from compute_plane.cuda.weight_plan import plan_weights
from compute_plane.memory.kv_pool import KvPool, pool_layout
from compute_plane.memory.state_pool import make_states
from compute_plane.model.spec import ModelSpec
from tests.compute_plane.executor.tiny_llama import NUM_STATES, tiny_spec
from tests.compute_plane.executor.tiny_sources import ArraySource
from tests.compute_plane.executor.tiny_weights import tiny_weights

SPEC = replace(tiny_spec(), num_layers=4)
NUM_BLOCKS, BLOCK_SIZE = 60, 4


def cut_executor(
    num_device_layers: int = 2,
    driver: Driver | None = None,
    *,
    model: ModelSpec = SPEC,
    dtype: torch.dtype = torch.float32,
    num_host_blocks: int = 0,
    operations: DeviceOperations | None = None,
) -> HostLayersExecutor:
    """Return the executor over two pools of NaN, as previous owners might have left them.

    States, too.
    """
    driver = driver or CpuDriver()
    spec = first_layers(model, num_device_layers)
    pools = BlockPools(
        spec, driver, dtype=dtype, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS,
        num_host_blocks=num_host_blocks,
        num_states=NUM_STATES if model.recurrence is not None else 0,
    )  # fmt: skip
    if pools.states is not None:
        pools.states.device.fill_(float("nan"))
    pools.device.fill_(float("nan"))
    pools.host.fill_(float("nan"))
    source = ArraySource(model, tiny_weights(model), None)
    plan = plan_weights(model, source, str(dtype).removeprefix("torch."))
    weights = first_weights(plan, num_device_layers).place(driver.device)
    layout = pool_layout(model, "float32", BLOCK_SIZE, num_device_layers)
    host_pool = KvPool(layout, NUM_BLOCKS, num_host_blocks)
    host_pool.data[:] = 0xFF
    states = make_states(model, NUM_STATES, num_device_layers)
    if states is not None:
        states.data[:] = 0xFF
    packed = pack_weights(model, source, first_layer=num_device_layers)
    host = CpuExecutor(
        model, packed, host_pool, num_threads=1, keep_logits=True, max_tokens=512, states=states
    )
    return HostLayersExecutor(
        spec,
        weights,
        pools,
        operations or ReferenceOperations(spec.activation),
        driver,
        host,
        max_tokens=512,
    )
