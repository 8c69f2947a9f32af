"""Executors by name, and what the plane needs to know of the one it has.

A custom executor is named `module:attribute`: a factory that is called with an `ExecutorContext`
and returns a `GPUExecutor`. Executors are imported only when they are asked for, so that a plane
without a model needs neither Numba nor a model file.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from compute_plane.errors import DeviceUnavailableError, ExecutorLoadError
from compute_plane.executor.interface import GPUExecutor
from compute_plane.memory.sizing import BlockDemand, host_memory, size_in_host_memory
from compute_plane.model.adapter import Adapter
from compute_plane.model.architectures import ARCHITECTURES
from compute_plane.model.spec import ModelSpec
from compute_plane.model.windows import without_windows
from planes.errors import ConfigError, EngineError
from planes.extras import the_extra

if TYPE_CHECKING:
    from compute_plane.device import DeviceDescription
    from compute_plane.model.loader import LoadedModel

MAX_POOL_BYTES_PER_TOKEN: Final = 4
"""Of the simulated executor's pool: one int32 a token."""

COMPUTES_WINDOWS: Final = frozenset({"cpu", "cuda"})
"""Executors in which a layer may have a window; with others contexts end where one would."""

KEEPS_STATES: Final = frozenset({"cpu", "cuda"})
"""Executors in which a layer may have a state in place of keys and values."""

TAKES_ADAPTERS: Final = frozenset({"cpu", "cuda", "simulated"})
"""Executors that compute rows with adapters."""

KNOWS_ALL_LAYERS: Final = frozenset({"cpu", "cuda", "simulated"})
"""Executors that know what Gemma's layers have: of Gemma 2 scores with caps; of Gemma 4 values with
norms, heads of two sizes, another layer's keys, inputs of their own."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ExecutorContext:
    """What a factory may build an executor from.

    `spec`: an executor of one's own gets it without windows, contexts being no longer than those.
    `model`: the loaded model, whose `source` has the weights as they are stored, each decoded by
    `to_float32()`; None if the executor needs none. `dtype`, `kv_cache_dtype`, `instruction_set`:
    as configured, `auto` included. `max_tokens`: of one batch. `kernel_cache`: where machine code
    may be kept. `swap_bytes`: of the host pool that blocks may be swapped to. `max_rows`: of one
    batch. `uses_graphs`: whether decode steps may be captured, where the device has graphs.
    `gpu_memory_limit`: bytes that may be taken on a CUDA device. `max_slots`: sequences that the
    plane remembers. `fills_memory`: the pool is to have as many blocks as fit into
    `gpu_memory_utilization`, a share, of the memory, instead of `num_blocks`; a custom executor is
    never told so. `promised_bytes`: of host memory that others have and may not have filled yet.
    `keep_logits`: whether answers have the samples' logits, for tests and tools. `adapters`: that
    rows may be computed with (`ExecutionBatch.adapters`); a custom executor is never told of any.
    """

    spec: ModelSpec
    model: LoadedModel | None
    block_size: int
    num_blocks: int
    dtype: str
    kv_cache_dtype: str
    instruction_set: str
    device: str
    max_tokens: int
    num_threads: int
    kernel_cache: Path
    swap_bytes: int = 0
    max_rows: int = 1024
    uses_graphs: bool = True
    gpu_memory_limit: int | None = None
    max_slots: int = 1024
    fills_memory: bool = False
    gpu_memory_utilization: float = 0.9
    keep_logits: bool = False
    promised_bytes: int = 0
    adapters: tuple[Adapter, ...] = ()

    @property
    def block_demand(self) -> BlockDemand:
        """How many blocks the pool is to have."""
        return BlockDemand.of(
            None if self.fills_memory else self.num_blocks,
            block_size=self.block_size,
            context_length=self.spec.context_length,
            max_slots=self.max_slots,
        )


@dataclass(frozen=True, slots=True)
class BuiltExecutor:
    """An executor and its numbers for Describe. Sizes are 0 where they are not known.

    `dtype`: what it computes in; empty: what was configured. `num_host_blocks`: of its host pool.
    `num_blocks`: of its pool; None: as many as the context says.
    `tells_prompts_apart`: as in Describe. `device`: what it runs on, where it is not the processor.
    `context_length`: how many positions it computes exactly; None: as many as the model has.
    `gives_embeddings`: whether it gives hidden states. `num_slots`, `num_states`: of a model with
    states, how many sequences and how many states there is room for; 0: it has none.
    """

    name: str
    executor: GPUExecutor
    numerics_id: str
    kv_pool_bytes: int = 0
    weights_bytes: int = 0
    preferred_prefill_chunk: int = 512
    dtype: str = ""
    num_host_blocks: int = 0
    tells_prompts_apart: bool = False
    device: DeviceDescription | None = None
    num_blocks: int | None = None
    context_length: int | None = None
    gives_embeddings: bool = True
    num_slots: int = 0
    num_states: int = 0


def knows_layers(name: str, architecture: str) -> bool:
    """Whether an executor computes what layers of such models have beside those of others."""
    known = ARCHITECTURES.get(architecture)  # not of a made-up model
    is_common = known is None or not (known.norms_values or known.caps_scores)
    return name in KNOWS_ALL_LAYERS or is_common


def build_executor(name: str, context: ExecutorContext) -> BuiltExecutor:
    """Build the executor called `name`. Raises ConfigError families, ExecutorLoadError."""
    context_length = context.spec.context_length
    if context.spec.recurrence is not None and name not in KEEPS_STATES:
        raise ConfigError(
            f"executor: {name} does not run {context.spec.architecture} models, whose layers keep "
            f"states of sequences; {', '.join(sorted(KEEPS_STATES))} does",
            field="executor",
        )
    if not knows_layers(name, context.spec.architecture):
        raise ConfigError(
            f"executor: {name} does not run {context.spec.architecture} models, whose attention "
            "has more than that of others; cpu and cuda do",
            field="executor",
        )
    if context.adapters and name not in TAKES_ADAPTERS:
        raise ConfigError(f"lora: {name} takes no adapters; cpu and cuda do", field="lora")
    if context.spec.recurrence is not None and context.swap_bytes:
        log.warning("nothing is swapped: states of sequences are in no block", field="swap_space")
        context = replace(context, swap_bytes=0)
    if name not in COMPUTES_WINDOWS:
        context = _without_windows(context)
    built = BUILT_IN[name](context) if name in BUILT_IN else _build_custom(name, context)
    if context.spec.context_length < context_length:
        log.warning(
            "contexts are no longer than the model's sliding window",
            max_model_len=context.spec.context_length,
            context_length=context_length,
        )
    return replace(built, context_length=context.spec.context_length)


def _without_windows(context: ExecutorContext) -> ExecutorContext:
    spec = without_windows(context.spec)
    model = None if context.model is None else replace(context.model, spec=spec)
    return replace(context, spec=spec, model=model)


def _build_simulated(context: ExecutorContext) -> BuiltExecutor:
    from compute_plane.executor.simulated import SimulatedExecutor

    num_blocks, num_host_blocks = size_in_host_memory(
        context.block_demand,
        context.swap_bytes,
        context.block_size * MAX_POOL_BYTES_PER_TOKEN,
        utilization=context.gpu_memory_utilization,
        memory=host_memory(),
    )
    executor = SimulatedExecutor(
        num_blocks=num_blocks,
        block_size=context.block_size,
        num_host_blocks=num_host_blocks,
    )
    return BuiltExecutor(
        "simulated",
        executor,
        executor.numerics_id,
        kv_pool_bytes=executor.pool.nbytes,
        num_host_blocks=num_host_blocks,
        num_blocks=num_blocks,
    )


def _build_cpu(context: ExecutorContext) -> BuiltExecutor:
    if context.model is None:
        raise ExecutorLoadError("executor: cpu needs a model", field="executor")
    # Numba, its cache and the instruction set must be settled before any kernel is imported.
    from compute_plane.cpu.build import build_cpu

    return build_cpu(context, context.model)


def _build_cuda(context: ExecutorContext) -> BuiltExecutor:
    if context.model is None:
        raise ExecutorLoadError("executor: cuda needs a model", field="executor")
    try:
        # torch is installed for this executor only.
        from compute_plane.cuda.build import build_cuda
    except ImportError as error:
        raise DeviceUnavailableError(
            f"executor: cuda needs torch, {the_extra('cuda')}: {error}",
            field="executor",
        ) from error
    return build_cuda(context, context.model)


def _build_custom(name: str, context: ExecutorContext) -> BuiltExecutor:
    if context.fills_memory:
        raise ConfigError(
            "max_num_blocks: auto is for the executors of this package; "
            f"{name} must be told a number",
            field="max_num_blocks",
        )
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
    gives_embeddings = bool(getattr(executor, "gives_embeddings", False))
    return BuiltExecutor(name, executor, str(numerics_id), gives_embeddings=gives_embeddings)


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
    "cuda": _build_cuda,
}
