"""Building the CUDA executor: number formats, weights, pools, driver, first step, graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import structlog
import torch

from compute_plane.cuda.block_pools import (
    EIGHT_BITS,
    KV_DTYPES,
    MOST_IN_EIGHT_BITS,
    BlockPools,
)
from compute_plane.cuda.decode_graphs import batch_sizes
from compute_plane.cuda.drivers import CpuDriver
from compute_plane.cuda.executor import CudaExecutor
from compute_plane.cuda.expert_products import waits_for_experts
from compute_plane.cuda.experts import DeviceExperts
from compute_plane.cuda.host_layers_build import (
    build_with_host_layers,
    bytes_beside_states,
    num_device_layers,
)
from compute_plane.cuda.planned_adapters import plan_adapters
from compute_plane.cuda.pool_size import room_for_states, size_pools
from compute_plane.cuda.reference_operations import ReferenceOperations
from compute_plane.cuda.state_pool import state_bytes
from compute_plane.cuda.weight_plan import WeightPlan, plan_weights
from compute_plane.device import cuda_index, require_cuda
from compute_plane.errors import DeviceUnavailableError
from compute_plane.executor.registry import BuiltExecutor, ExecutorContext
from compute_plane.executor.warm_up import warm_up
from compute_plane.executor.weight_formats import log_conversions
from compute_plane.memory.sizing import available_memory_bytes, check_weights_fit
from compute_plane.model import layout
from compute_plane.model.architectures import ARCHITECTURES
from compute_plane.model.tensor import TensorFormat

if TYPE_CHECKING:
    from compute_plane.cuda.drivers import Driver
    from compute_plane.cuda.operations import DeviceOperations
    from compute_plane.cuda.weights import DeviceWeights
    from compute_plane.model.loader import LoadedModel

PREFILL_CHUNK: Final = 512
"""Prompt tokens of a step."""

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
    plan = planned_weights(context, model, torch.device("cpu"))
    return build_on(context, model, plan, CpuDriver(), ReferenceOperations(context.spec.activation))


def _build_on_cuda(context: ExecutorContext, model: LoadedModel) -> BuiltExecutor:
    """Build on a CUDA device, with the kernels."""
    # These import the compiler, which the CPU does without.
    from compute_plane.cuda.cuda_driver import CudaDriver
    from compute_plane.cuda.devices import describe_cuda
    from compute_plane.cuda.kernel_operations import KernelOperations
    from compute_plane.cuda.launchers import CudaLauncher

    require_cuda(context.device)
    device = torch.device("cuda", cuda_index(context.device))
    driver = CudaDriver(device, context.gpu_memory_limit)
    launcher = CudaLauncher(device, context.kernel_cache / "cuda")
    plan = planned_weights(context, model, device)
    try:
        operations = KernelOperations(
            launcher,
            context.spec,
            plan.dtype,
            context.block_size,
            plan.quantized,
            chosen_kv_dtype(context, plan.dtype),
            has_dense=plan.has_dense,
            experts=plan.experts,
        )
        built = build_on(context, model, plan, driver, operations)
    except torch.OutOfMemoryError as error:
        raise DeviceUnavailableError(
            f"device: {device} ran out of memory while the executor was built (a smaller "
            f"--gpu-memory-utilization leaves more of it): {' '.join(str(error).split())}",
            field="device",
        ) from error
    return replace(built, device=describe_cuda(device, context.num_threads))


def planned_weights(
    context: ExecutorContext, model: LoadedModel, device: torch.device
) -> WeightPlan:
    """Plan the model's weights for a device, and its adapters.

    Raises UnsupportedModelError for adapters that change what they cannot change here.
    """
    dtype = chosen_dtype(context, device)
    plan = plan_weights(context.spec, model.source, dtype, context.dtype)
    if not context.adapters:
        return plan
    return replace(plan, adapters=plan_adapters(plan, context.adapters))


def build_on(
    context: ExecutorContext,
    model: LoadedModel,
    plan: WeightPlan,
    driver: Driver,
    operations: DeviceOperations,
) -> BuiltExecutor:
    """Build the executor on a driver's device with a set of operations. Errors as above."""
    spec, device = context.spec, driver.device
    kv_dtype = chosen_kv_dtype(context, plan.dtype)
    pool_dtype = KV_DTYPES[kv_dtype]
    num_layers = num_device_layers(context, driver, plan, operations, pool_dtype)
    if num_layers < spec.num_layers:
        return build_with_host_layers(
            context,
            model,
            plan,
            driver,
            operations,
            pool_dtype=pool_dtype,
            num_layers=num_layers,
            numerics_id=numerics_id(context, device, operations, plan),
        )
    check_weights_fit(plan.num_bytes, _available(driver))
    weights = plan.place(device, context.num_threads)
    log.info("weights", format=plan.weight_format, dtype=plan.dtype, num_bytes=weights.num_bytes)
    if plan.adapters is not None:
        names = [adapter.name for adapter in context.adapters]
        log.info("adapters", names=names, num_bytes=plan.adapters.num_bytes)
    log_conversions(weights.conversions)
    beside = bytes_beside_states(context, driver, plan, operations, pool_dtype)
    room = room_for_states(context, driver, beside)
    num_slots, num_states = (0, 0) if room is None else (room.num_slots, room.num_states)
    if room is not None:  # a row goes on from its slot's state
        context = replace(context, max_rows=min(context.max_rows, num_slots))
    bytes_of_states = num_states * state_bytes(spec)
    sizes = size_pools(
        context, driver, weights, operations, pool_dtype, bytes_of_states=bytes_of_states
    )
    pools = BlockPools(
        spec,
        driver,
        dtype=pool_dtype,
        block_size=context.block_size,
        num_blocks=sizes.num_blocks,
        num_host_blocks=sizes.num_host_blocks,
        num_states=num_states,
    )
    log.info(
        "kv pool",
        kv_cache_dtype=kv_dtype,
        num_blocks=sizes.num_blocks,
        num_bytes=pools.num_bytes,
        num_host_blocks=sizes.num_host_blocks,
    )
    if room is not None:
        log.info(
            "states of sequences",
            num_slots=num_slots,
            num_states=num_states,
            state_bytes=state_bytes(spec),
        )
    executor = CudaExecutor(
        spec,
        weights,
        pools,
        operations,
        driver,
        max_tokens=context.max_tokens,
        keep_logits=context.keep_logits,
    )
    warm_up(executor, context.block_size, has_states=room is not None)
    if context.uses_graphs and driver.has_graphs:
        most_rows = most_rows_without_waiting(weights, operations, context.max_rows)
        if most_rows:
            capture_graphs(executor, most_rows, sizes.graph_bytes)
    graphs = "-".join(map(str, executor.graphs.captured)) or "none"
    return BuiltExecutor(
        "cuda",
        executor,
        f"{numerics_id(context, device, operations, plan)}/graphs-{graphs}",
        kv_pool_bytes=pools.num_bytes,
        weights_bytes=weights.num_bytes,
        preferred_prefill_chunk=PREFILL_CHUNK,
        dtype=plan.weight_format if plan.is_quantised else plan.dtype,
        num_host_blocks=sizes.num_host_blocks,
        num_blocks=sizes.num_blocks,
        num_slots=num_slots,
        num_states=num_states,
    )


def _available(driver: Driver) -> int | None:
    """Return the bytes that weights may take on the device."""
    free = driver.free_bytes()
    return available_memory_bytes() if free is None else free


def most_rows_without_waiting(
    weights: DeviceWeights, operations: DeviceOperations, max_rows: int
) -> int:
    """Return up to how many rows a step waits for nothing, so that it can be a graph.

    Says so where that is fewer than `max_rows`; 0 if every step does: where experts are multiplied
    one by one, it waits for what rows each has.
    """
    experts = [
        layer.feedforward
        for layer in weights.layers
        if isinstance(layer.feedforward, DeviceExperts)
    ]
    most_rows = 0
    for size in batch_sizes(max_rows):
        if any(waits_for_experts(size, own, operations, weights.dtype) for own in experts):
            log.warning(
                "no decode graphs of more rows: experts of this dtype or format are multiplied "
                "one by one there",
                most_rows=most_rows,
                dtype=str(weights.dtype).removeprefix("torch."),
            )
            return most_rows
        most_rows = size
    return max_rows


def capture_graphs(executor: CudaExecutor, max_rows: int, max_bytes: int) -> None:
    """Capture decode steps within the memory bound, and say which. Raises GraphCaptureError."""
    left_out = executor.graphs.capture_ladder(max_rows, max_bytes)
    log.info(
        "decode graphs",
        captured=list(executor.graphs.captured),
        left_out=left_out,
        max_bytes=max_bytes,
    )


def chosen_dtype(context: ExecutorContext, device: torch.device) -> str:
    """Return the name of the number format of a step.

    `auto` is float32 on a CPU, where 16 bits are emulated. On a GPU it is float16 for a model that
    is stored so, even if most of it is quantised (a GGUF file never says so: its norms are
    float32), and bfloat16 for all others, and for all models whose hidden states float16 cannot
    hold. Raises DeviceUnavailableError for those in float16.
    """
    architecture = ARCHITECTURES[context.spec.architecture]
    if context.dtype == "float16" and architecture.exceeds_float16:
        raise DeviceUnavailableError(
            f"dtype: {architecture.title} models have hidden states that float16 cannot hold; "
            "bfloat16 and float32 can",
            field="dtype",
        )
    if context.dtype != "auto":
        return context.dtype
    if device.type == "cpu":
        return "float32"
    if architecture.exceeds_float16:
        return "bfloat16"
    model = context.model
    is_half = model and model.source.tensor(layout.FINAL_NORM).format is TensorFormat.F16
    return "float16" if is_half else "bfloat16"


def chosen_kv_dtype(context: ExecutorContext, dtype: str) -> str:
    """Return the name of the number format of keys and values, for steps in `dtype`.

    `auto` is the same one. Raises DeviceUnavailableError for another one of 16 bits or more: those
    are read as they lie.
    """
    name = dtype if context.kv_cache_dtype == "auto" else context.kv_cache_dtype
    if context.spec.latents is not None and name in EIGHT_BITS.values():
        raise DeviceUnavailableError(
            f"kv_cache_dtype: the executor cuda keeps latents in what it computes in, {dtype}; "
            f"got {name}",
            field="kv_cache_dtype",
        )
    largest = max(heads.head_dim for heads in context.spec.kinds_of_heads)
    if largest > MOST_IN_EIGHT_BITS and name in EIGHT_BITS.values():
        raise DeviceUnavailableError(
            f"kv_cache_dtype: the executor cuda keeps heads of {largest} elements in what it "
            f"computes in, {dtype}; got {name}",
            field="kv_cache_dtype",
        )
    if name not in (dtype, *EIGHT_BITS.values()):
        raise DeviceUnavailableError(
            "kv_cache_dtype: the executor cuda keeps keys and values in "
            f"{', '.join(EIGHT_BITS.values())} or what it computes in, {dtype}; got {name}",
            field="kv_cache_dtype",
        )
    return name


def numerics_id(
    context: ExecutorContext, device: torch.device, operations: DeviceOperations, plan: WeightPlan
) -> str:
    """Return what decides the bits of a step, but for model, sources and the step's other rows.

    A CPU's products are cut into threads, so their number counts. So do the sizes of the graphs
    that are captured, for a padded step is another product; they are added where they are known.
    """
    where = device.type
    if where == "cpu":
        where = f"cpu-{context.num_threads}"
    else:
        where = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    return (
        f"cuda/{operations.name}/{where}/torch-{torch.__version__}/{plan.dtype}"
        f"/{plan.weight_format}/kv-{chosen_kv_dtype(context, plan.dtype)}-{context.block_size}"
        f"{context.spec.way_of_turning}"
    )
