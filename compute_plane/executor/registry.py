"""Executors by name, and what the plane needs to know of the one it has.

A custom executor is named `module:attribute`: a factory that is called with an `ExecutorContext`
and returns a `GPUExecutor`. Executors are imported only when they are asked for, so that a plane
without a model needs neither Numba nor a model file.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import structlog

from compute_plane.errors import ExecutorLoadError
from compute_plane.executor.interface import ExecutionBatch, GPUExecutor, SamplingRow
from compute_plane.memory.sizing import (
    available_memory_bytes,
    check_pool_fits,
    check_weights_fit,
    kv_block_bytes,
)
from compute_plane.model.spec import ModelSpec
from planes.errors import EngineError

if TYPE_CHECKING:
    from compute_plane.model.loader import LoadedModel

MAX_POOL_BYTES_PER_TOKEN: Final = 4
"""Of the simulated executor's pool: one int32 a token."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ExecutorContext:
    """What a factory may build an executor from.

    `model`: the loaded model, whose `load_weights()` decodes the weights; None if the executor
    needs none. `kernel_cache`: where machine code may be kept.
    """

    spec: ModelSpec
    model: LoadedModel | None
    block_size: int
    num_blocks: int
    dtype: str
    device: str
    num_threads: int
    kernel_cache: Path


@dataclass(frozen=True, slots=True)
class BuiltExecutor:
    """An executor and its numbers for Describe. Sizes are 0 where they are not known."""

    name: str
    executor: GPUExecutor
    numerics_id: str
    kv_pool_bytes: int = 0
    weights_bytes: int = 0
    preferred_prefill_chunk: int = 512


def build_executor(name: str, context: ExecutorContext) -> BuiltExecutor:
    """Build the executor called `name`. Raises ConfigError families, ExecutorLoadError."""
    if name in BUILT_IN:
        return BUILT_IN[name](context)
    return _build_custom(name, context)


def _build_simulated(context: ExecutorContext) -> BuiltExecutor:
    from compute_plane.executor.simulated import SimulatedExecutor

    check_pool_fits(
        context.num_blocks,
        context.block_size * MAX_POOL_BYTES_PER_TOKEN,
        available_memory_bytes(),
    )
    executor = SimulatedExecutor(num_blocks=context.num_blocks, block_size=context.block_size)
    return BuiltExecutor(
        "simulated", executor, executor.numerics_id, kv_pool_bytes=executor.pool.nbytes
    )


def _build_cpu(context: ExecutorContext) -> BuiltExecutor:
    if context.model is None:
        raise ExecutorLoadError("executor: cpu needs a model", field="executor")
    # Where Numba keeps machine code must be settled before any kernel is imported.
    from compute_plane.executor.kernel_cache import prepare_kernel_cache

    cache = prepare_kernel_cache(context.kernel_cache)
    if not any(cache.iterdir()):
        log.info("compiling kernels; later starts find them compiled", directory=str(cache))
    from compute_plane.executor.cpu import CpuExecutor
    from compute_plane.memory.kv_pool import KvPool

    spec = context.spec
    check_weights_fit(spec.num_parameters, available_memory_bytes())
    weights = context.model.load_weights(context.num_threads)
    block_bytes = kv_block_bytes(spec, context.block_size)
    check_pool_fits(context.num_blocks, block_bytes, available_memory_bytes())
    kv_pool = KvPool(
        num_blocks=context.num_blocks,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        block_size=context.block_size,
        head_dim=spec.head_dim,
    )
    executor = CpuExecutor(spec, weights, kv_pool, num_threads=context.num_threads)
    warm_up(executor, context.block_size)
    return BuiltExecutor(
        "cpu",
        executor,
        # The fingerprint names the kernels' sources, their compiler and the CPU; BLAS may sum in
        # another order with another number of threads.
        f"{executor.numerics_id}/{cache.name}/threads-{context.num_threads}",
        kv_pool_bytes=kv_pool.num_bytes,
        weights_bytes=weights.num_bytes,
    )


def _build_custom(name: str, context: ExecutorContext) -> BuiltExecutor:
    factory = _import_factory(name)
    try:
        executor = factory(context)
    except EngineError:
        raise
    except Exception as error:
        # A user's own code: whatever it raises means that there is no executor.
        log.exception("the executor's factory failed", executor=name)
        raise ExecutorLoadError(
            f"executor: {name} failed: {type(error).__name__}: {error}", field="executor"
        ) from error
    if not isinstance(executor, GPUExecutor):
        raise ExecutorLoadError(
            f"executor: {name} must return an object with execute, capture_decode_graph and "
            f"execute_graph, got {type(executor).__name__}",
            field="executor",
        )
    numerics_id = getattr(executor, "numerics_id", None) or f"custom/{name}"
    return BuiltExecutor(name, executor, str(numerics_id))


def _import_factory(name: str) -> Callable[[ExecutorContext], object]:
    module_name, _, attribute = name.partition(":")
    try:
        target: object = importlib.import_module(module_name)
        for part in attribute.split("."):
            target = getattr(target, part)
    except Exception as error:
        # Importing runs a user's own code, which may raise anything.
        raise ExecutorLoadError(
            f"executor: {name} cannot be imported: {type(error).__name__}: {error}",
            field="executor",
        ) from error
    if not callable(target):
        raise ExecutorLoadError(
            f"executor: {name} must be callable, got {type(target).__name__}", field="executor"
        )
    return target


BUILT_IN: Final[dict[str, Callable[[ExecutorContext], BuiltExecutor]]] = {
    "simulated": _build_simulated,
    "cpu": _build_cpu,
}


def warm_up(executor: GPUExecutor, block_size: int) -> None:
    """Run two tiny steps, greedy and drawn, so that everything is compiled before the first batch.

    They write the first block, which nobody holds yet.
    """
    num_tokens = min(2, block_size)
    for temperature in (0.0, 1.0):
        executor.execute(
            ExecutionBatch(
                input_tokens=np.zeros(num_tokens, dtype=np.int32),
                positions=np.arange(num_tokens, dtype=np.int32),
                seq_lens=np.array([num_tokens], dtype=np.int32),
                block_tables=np.zeros((1, 1), dtype=np.int32),
                is_prefill=np.ones(1, dtype=np.bool_),
                query_lens=np.array([num_tokens], dtype=np.int32),
                sampled_rows=np.zeros(1, dtype=np.int32),
                sampling=[SamplingRow(temperature, 0.9, 0, 0, num_tokens)],
                prompt_logprob_rows=[0],
                prompt_logprob_targets=[np.zeros(num_tokens - 1, dtype=np.int32)],
            )
        )
