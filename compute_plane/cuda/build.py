"""Building the CUDA executor: number formats, weights, pools, driver, first step, graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import structlog
import torch

from compute_plane.cuda.block_pools import BlockPools, block_bytes
from compute_plane.cuda.drivers import CpuDriver
from compute_plane.cuda.executor import CudaExecutor
from compute_plane.cuda.reference_operations import ReferenceOperations
from compute_plane.cuda.weights import DTYPES, place_weights
from compute_plane.errors import DeviceUnavailableError
from compute_plane.executor.registry import BuiltExecutor, ExecutorContext
from compute_plane.executor.warm_up import warm_up
from compute_plane.memory.sizing import (
    available_memory_bytes,
    check_pools_fit,
    check_weights_fit,
)

if TYPE_CHECKING:
    from compute_plane.cuda.drivers import Driver
    from compute_plane.cuda.operations import DeviceOperations
    from compute_plane.model.loader import LoadedModel

PREFILL_CHUNK: Final = 512
"""Prompt tokens of a step."""
GRAPH_SHARE: Final = 0.1
"""Of the device memory that is free once weights and pools are there: the most graphs may take."""

log = structlog.get_logger()


def build_cuda(context: ExecutorContext, model: LoadedModel) -> BuiltExecutor:
    """Build the executor on the device of the context.

    On "cpu" it computes with the reference operations: slow, there to develop and test it. Raises
    DeviceUnavailableError and other ConfigError families for what cannot be had here,
    ModelFileError for the file's faults.
    """
    if context.device != "cpu":
        return _build_on_cuda(context, model)
    log.warning(
        "the CUDA executor runs on the CPU with the reference operations: slow, for development "
        "and tests; --executor cpu is the fast one"
    )
    torch.set_num_threads(context.num_threads)
    return build_on(context, model, CpuDriver(), ReferenceOperations())


def _build_on_cuda(context: ExecutorContext, model: LoadedModel) -> BuiltExecutor:
    """Build on the first CUDA device, with the kernels."""
    # These import the compiler, which the CPU does without.
    from compute_plane.cuda.cuda_driver import CudaDriver
    from compute_plane.cuda.devices import describe_cuda, require_cuda
    from compute_plane.cuda.kernel_operations import KernelOperations
    from compute_plane.cuda.launchers import CudaLauncher

    require_cuda()
    device = torch.device("cuda", 0)
    driver = CudaDriver(device)
    launcher = CudaLauncher(device, context.kernel_cache / "cuda")
    name = chosen_dtype(context, device)
    operations = KernelOperations(launcher, context.spec, name, context.block_size)
    built = build_on(context, model, driver, operations)
    return replace(built, device=describe_cuda(device, context.num_threads))


def build_on(
    context: ExecutorContext, model: LoadedModel, driver: Driver, operations: DeviceOperations
) -> BuiltExecutor:
    """Build the executor on a driver's device with a set of operations. Errors as above."""
    spec, device = context.spec, driver.device
    name = chosen_dtype(context, device)
    dtype = DTYPES[name]
    check_weights_fit(spec.num_parameters * dtype.itemsize, _available(driver))
    weights = place_weights(model.load_weights(context.num_threads), dtype, device)
    num_host_blocks = _check_pools(context, driver, block_bytes(spec, dtype, context.block_size))
    pools = BlockPools(
        spec,
        driver,
        dtype=dtype,
        block_size=context.block_size,
        num_blocks=context.num_blocks,
        num_host_blocks=num_host_blocks,
    )
    executor = CudaExecutor(spec, weights, pools, operations, driver, max_tokens=context.max_tokens)
    warm_up(executor, context.block_size)
    if context.uses_graphs and driver.has_graphs:
        capture_graphs(executor, driver, context.max_rows)
    return BuiltExecutor(
        "cuda",
        executor,
        numerics_id(context, device, operations, name),
        kv_pool_bytes=pools.num_bytes,
        weights_bytes=weights.num_bytes,
        preferred_prefill_chunk=PREFILL_CHUNK,
        dtype=name,
        num_host_blocks=num_host_blocks,
    )


def _available(driver: Driver) -> int | None:
    """Return the bytes that weights and pool may take on the device."""
    free = driver.free_bytes()
    return available_memory_bytes() if free is None else free


def _check_pools(context: ExecutorContext, driver: Driver, bytes_of_block: int) -> int:
    """Return the blocks of the host pool. Raises ConfigError for a pool that does not fit."""
    if driver.free_bytes() is None:  # both lie in one memory
        return check_pools_fit(
            context.num_blocks, context.swap_bytes, bytes_of_block, available_memory_bytes()
        )
    check_pools_fit(context.num_blocks, 0, bytes_of_block, _available(driver))
    return check_pools_fit(0, context.swap_bytes, bytes_of_block, available_memory_bytes())


def capture_graphs(executor: CudaExecutor, driver: Driver, max_rows: int) -> None:
    """Capture decode steps within the memory bound, and say which. Raises GraphCaptureError."""
    free = driver.free_bytes()
    max_bytes = int(GRAPH_SHARE * free) if free is not None else available_memory_bytes() or 0
    left_out = executor.graphs.capture_ladder(max_rows, max_bytes)
    log.info(
        "decode graphs",
        captured=list(executor.graphs.captured),
        left_out=left_out,
        max_bytes=max_bytes,
    )


def chosen_dtype(context: ExecutorContext, device: torch.device) -> str:
    """Return the name of the number format of weights and pool.

    `auto` is bfloat16 on a GPU, float32 on a CPU, where 16 bits are emulated. Raises
    DeviceUnavailableError for a pool in another format: keys and values are read as they lie.
    """
    name = context.dtype
    if name == "auto":
        name = "float32" if device.type == "cpu" else "bfloat16"
    kv_dtype = context.kv_cache_dtype
    if kv_dtype not in ("auto", name):
        raise DeviceUnavailableError(
            f"kv_cache_dtype: the executor cuda keeps keys and values in its dtype, {name}; "
            f"got {kv_dtype}",
            field="kv_cache_dtype",
        )
    return name


def numerics_id(
    context: ExecutorContext, device: torch.device, operations: DeviceOperations, dtype: str
) -> str:
    """Return what decides the bits of a step, but for model, sources and the step's other rows.

    A CPU's products are cut into threads, so their number counts.
    """
    where = device.type
    if where == "cpu":
        where = f"cpu-{context.num_threads}"
    else:
        where = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    return (
        f"cuda/{operations.name}/{where}/torch-{torch.__version__}/{dtype}"
        f"/kv-{dtype}-{context.block_size}"
    )
