"""Building the CPU executor: instruction set, kernel cache, weights, pool, table, first steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import structlog

from compute_plane.cpu.kernel_cache import numerics_fingerprint, prepare_kernel_cache
from compute_plane.cpu.kernel_notices import KernelNotices
from compute_plane.executor.registry import BuiltExecutor, ExecutorContext
from compute_plane.executor.warm_up import warm_up
from compute_plane.executor.weight_formats import log_conversions
from compute_plane.memory.program_pages import forget_code
from compute_plane.memory.sizing import host_memory, size_host_pool, size_in_host_memory
from kernels.cpu.instruction_set import select_instruction_set, selected_instruction_set

if TYPE_CHECKING:
    from compute_plane.cpu.executor import CpuExecutor
    from compute_plane.cpu.packed_layers import PackedWeights
    from compute_plane.memory.kv_pool import KvPool
    from compute_plane.memory.state_sizing import StateRoom
    from compute_plane.model.loader import LoadedModel

COMPILER: Final = "libllvmlite"
"""The library that compiled or loaded the kernels; not needed any more once they have run."""
AMX_PREFILL_CHUNK: Final = 512
PREFILL_CHUNK: Final = 256
"""Prompt tokens of a step, for which running streams wait: with AMX 512 take 0.13 s, without 0.32;
256 take 0.2, and a prompt of 1024 3 % longer (AMD EPYC, 2 cores, 135 M parameters, 2026-11-22)."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class CpuLayers:
    """The layers of a model on the CPU engine, the last ones if not all.

    `room`: for states, where layers have any. `adapter_bytes`: of adapters.
    """

    executor: CpuExecutor
    weights: PackedWeights
    kv_pool: KvPool
    room: StateRoom | None
    adapter_bytes: int = 0

    @property
    def numerics_id(self) -> str:
        """What decides the bits of a result, but for the model."""
        return f"{self.executor.numerics_id}/{numerics_fingerprint()}"


def build_cpu(context: ExecutorContext, model: LoadedModel) -> BuiltExecutor:
    """Build the CPU executor for a model.

    Raises ConfigError families for what cannot be had here, ModelFileError for the file's faults.
    """
    layers = build_cpu_layers(context, model)
    executor, weights, room = layers.executor, layers.weights, layers.room
    warm_up(executor, context.block_size, has_states=room is not None)
    forget_code(COMPILER)
    return BuiltExecutor(
        "cpu",
        executor,
        layers.numerics_id,
        kv_pool_bytes=layers.kv_pool.num_bytes,
        weights_bytes=weights.num_bytes + layers.adapter_bytes,
        preferred_prefill_chunk=chosen_prefill_chunk(),
        num_host_blocks=len(layers.kv_pool.host),
        num_blocks=layers.kv_pool.num_blocks,
        tells_prompts_apart=executor.tells_prompts_apart,
        dtype=weights.weight_format if context.dtype == "auto" else context.dtype,
        num_slots=0 if room is None else room.num_slots,
        num_states=0 if room is None else room.num_states,
    )


def chosen_prefill_chunk() -> int:
    """Return how many prompt tokens a step should have on the set kernels are compiled for."""
    return AMX_PREFILL_CHUNK if selected_instruction_set().has_amx else PREFILL_CHUNK


def build_cpu_layers(
    context: ExecutorContext,
    model: LoadedModel,
    *,
    first_layer: int = 0,
    bytes_elsewhere: int = 0,
    room_elsewhere: StateRoom | None = None,
) -> CpuLayers:
    """Build the engine for a model's layers from `first_layer` on. Errors as above.

    `bytes_elsewhere`: of a block's other layers, if they run elsewhere: the host pool has room for
    them too. `room_elsewhere`: for the states of those; there are no more here.
    """
    chosen = select_instruction_set(context.instruction_set)
    notices = KernelNotices()
    prepare_kernel_cache(context.kernel_cache, notices)
    # Kernels are made for the instruction set when they are imported.
    from compute_plane.cpu.executor import CpuExecutor
    from compute_plane.cpu.packed_adapters import pack_adapters
    from compute_plane.cpu.packed_weights import pack_weights
    from compute_plane.memory.kv_pool import KvPool, pool_layout
    from compute_plane.memory.state_pool import make_states, room_for_states
    from compute_plane.memory.state_sizing import smaller

    spec = context.spec
    kv_dtype = context.kv_cache_dtype
    if kv_dtype == "auto":
        kv_dtype = "float32" if context.dtype == "float32" else "bfloat16"
    # Before the weights are packed, which takes a while: it refuses what cannot be laid out.
    layout = pool_layout(spec, kv_dtype, context.block_size, first_layer)
    weights = pack_weights(
        spec,
        model.source,
        context.dtype,
        num_threads=context.num_threads,
        first_layer=first_layer,
    )
    adapters = None
    if context.adapters:
        adapters = pack_adapters(context.adapters, weights.parts, context.dtype)
    memory = host_memory()
    if memory is not None:
        memory = replace(memory, free_bytes=max(0, memory.free_bytes - context.promised_bytes))
    room = smaller(room_for_states(spec, context.max_slots, memory, first_layer), room_elsewhere)
    states = None if room is None else make_states(spec, room.num_states, first_layer)
    if states is not None and memory is not None:
        memory = replace(memory, free_bytes=memory.free_bytes - states.num_bytes)
    num_blocks, _ = size_in_host_memory(
        context.block_demand,
        context.swap_bytes,
        layout.block_bytes,
        utilization=context.gpu_memory_utilization,
        memory=memory,
    )
    num_host_blocks = size_host_pool(context.swap_bytes, layout.block_bytes + bytes_elsewhere)
    kv_pool = KvPool(layout, num_blocks, num_host_blocks)
    executor = CpuExecutor(
        spec,
        weights,
        kv_pool,
        num_threads=context.num_threads,
        max_tokens=context.max_tokens,
        keep_logits=context.keep_logits,
        states=states,
        adapters=adapters,
    )
    notices.sum_up()
    log.info(
        "cpu executor",
        instruction_set=chosen.name,
        weight_format=weights.weight_format,
        kv_cache_dtype=kv_dtype,
    )
    log_conversions(weights.conversions)
    if room is not None and states is not None:
        log.info(
            "states of sequences",
            num_slots=room.num_slots,
            num_states=room.num_states,
            state_bytes=states.state_bytes,
        )
    adapter_bytes = 0 if adapters is None else adapters.num_bytes
    return CpuLayers(executor, weights, kv_pool, room, adapter_bytes)
