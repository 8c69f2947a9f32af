"""The composition root: from a configuration to a plane that serves."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

import structlog

from compute_plane.adapter_sources import AdapterSource
from compute_plane.config import ComputePlaneConfig
from compute_plane.device import choose_placement, describe_device
from compute_plane.drafting import build_drafter, check_draft_model
from compute_plane.errors import PlaneDraining
from compute_plane.executor import simulated
from compute_plane.executor.batch_checks import SlotLimits, features_of
from compute_plane.executor.device_thread import DeviceThread
from compute_plane.executor.interface import PipelinedExecutor
from compute_plane.executor.registry import BuiltExecutor, ExecutorContext, build_executor
from compute_plane.executor.sessions import SessionLedger
from compute_plane.executor.slots import SlotTable
from compute_plane.facts import (
    BATCHES_IN_TURN,
    MAX_BATCHES_IN_FLIGHT,
    PlaneAssets,
    PlaneFacts,
    software_version,
)
from compute_plane.model.adapter import Adapter
from compute_plane.model.adapter_files import load_adapter
from compute_plane.model.loader import LoadedModel, load_model
from compute_plane.model.source import ModelLocation, locate_model
from compute_plane.rpc.server import PlaneServer, check_address
from compute_plane.rpc.servicer import ComputeServicer
from planes.address import Address
from planes.errors import ConfigError
from planes.tls import ServerTls
from planes.transport import MAX_PLANE_MESSAGE_BYTES

SIMPLE_ASSETS: Final = PlaneAssets(
    tokenizer_json=None,
    vocab_size=simulated.VOCAB_SIZE,
    chat_template="",
    bos_token_id=simulated.BOS_TOKEN_ID,
    eos_token_ids=(simulated.EOS_TOKEN_ID,),
    pad_token_id=simulated.PAD_TOKEN_ID,
    add_bos_token=False,
    context_length=simulated.SPEC.context_length,
    model_name=simulated.SPEC.name,
)
"""The text side of the simulated model: one token a byte."""

log = structlog.get_logger()

ExecutorBuilder = Callable[[str, ExecutorContext], BuiltExecutor]


class ComputePlane:
    """A compute plane in this process: loads its model when made, serves from `start` to `stop`.

    `on_fault` is called, on another thread, if the plane's own code fails. `build` makes the
    executor; tests give another. Raises EngineError families for everything that can be wrong with
    the configuration, the model and the machine.
    """

    def __init__(
        self,
        config: ComputePlaneConfig,
        *,
        on_fault: Callable[[], None] = lambda: None,
        build: ExecutorBuilder = build_executor,
    ) -> None:
        began = time.monotonic()
        self._config = config
        tls = None if config.tls_files is None else ServerTls(config.tls_files)
        placement = choose_placement(config)
        check_address(config.listen_address)
        model = None if placement.executor == "simulated" else _load_model(config.model, config)
        draft = None if config.draft_model is None else _load_draft(config.draft_model, config)
        if draft is not None:
            check_draft_model(draft, model)
        spec = simulated.SPEC if model is None else model.spec
        adapters = _load_adapters(config.adapter_sources, model)
        num_threads = config.effective_num_threads
        context = ExecutorContext(
            spec=spec,
            model=model,
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            dtype=placement.dtype,
            kv_cache_dtype=config.kv_cache_dtype,
            instruction_set=config.instruction_set,
            max_tokens=config.max_tokens_per_batch,
            device=placement.device,
            num_threads=num_threads,
            kernel_cache=config.kernel_cache_root,
            swap_bytes=config.swap_bytes,
            max_rows=config.max_rows,
            uses_graphs=config.cuda_graph,
            max_slots=config.max_slots,
            fills_memory=config.fills_memory_of(placement.pool_device),
            gpu_memory_utilization=config.gpu_memory_utilization,
            gpu_memory_limit=config.gpu_memory_limit_bytes,
            adapters=adapters,
        )
        built = build(placement.executor, context)
        if built.context_length is not None:
            spec = replace(spec, context_length=built.context_length)
        limits = SlotLimits(
            max_slots=built.num_slots or config.max_slots,
            max_rows=config.max_rows,
            max_tokens=config.max_tokens_per_batch,
            block_size=config.block_size,
            num_blocks=config.num_blocks if built.num_blocks is None else built.num_blocks,
            vocab_size=spec.vocab_size,
            context_length=spec.context_length,
            num_host_blocks=built.num_host_blocks,
            embedding_size=spec.hidden_size if built.gives_embeddings else 0,
            num_states=built.num_states,
            has_draft_model=draft is not None,
            num_adapters=len(adapters),
        )
        self._executors = [built]
        drafter = None
        if draft is not None:
            build_another = partial(build, placement.executor)
            try:
                drafter, of_draft = build_drafter(
                    draft, context, built, limits, config.draft_p_min, build_another
                )
            except ConfigError:
                self._close_executors()
                raise
            self._executors.append(of_draft)
        facts = PlaneFacts(
            spec=spec,
            dtype=built.dtype or placement.dtype,
            model_sha256="" if model is None else model.sha256 or "",
            numerics_id=built.numerics_id,
            executor=built.name,
            device=built.device or describe_device(placement.device, num_threads),
            limits=limits,
            preferred_prefill_chunk=min(built.preferred_prefill_chunk, limits.max_tokens),
            kv_pool_bytes=sum(each.kv_pool_bytes for each in self._executors),
            weights_bytes=sum(each.weights_bytes for each in self._executors),
            features=features_of(limits),
            tells_prompts_apart=built.tells_prompts_apart,
            max_message_bytes=MAX_PLANE_MESSAGE_BYTES,
            software_version=software_version(),
            max_batches_in_flight=(
                MAX_BATCHES_IN_FLIGHT
                if isinstance(built.executor, PipelinedExecutor)
                else BATCHES_IN_TURN
            ),
            adapters=tuple(adapter.facts for adapter in adapters),
        )
        self._sessions = SessionLedger()
        self._device = DeviceThread(
            built.executor, SlotTable(limits), self._sessions, on_fault, drafter
        )
        assets = SIMPLE_ASSETS if model is None else _assets(model, spec.context_length)
        self._servicer = ComputeServicer(facts, assets, self._device, self._sessions)
        self._server = PlaneServer(self._servicer, config.listen_address, tls)
        log.info(
            "loaded",
            model=spec.name,
            draft_model=None if draft is None else draft.spec.name,
            adapters=[adapter.name for adapter in adapters],
            weight_format=spec.weight_format,
            executor=facts.executor,
            device=facts.device.name,
            capability=facts.device.capability,
            total_memory_bytes=facts.device.total_memory_bytes,
            weights_bytes=facts.weights_bytes,
            dtype=facts.dtype,
            numerics_id=facts.numerics_id,
            num_threads=num_threads,
            block_size=limits.block_size,
            num_blocks=limits.num_blocks,
            num_host_blocks=limits.num_host_blocks,
            kv_pool_bytes=facts.kv_pool_bytes,
            seconds=round(time.monotonic() - began, 3),
        )

    def start(self) -> Address:
        """Serve; return where, with the real port. Raises ListenError."""
        address = self._server.start()
        self._device.start()
        log.info("serving", address=str(address), epoch=f"{self._sessions.epoch:016x}")
        return address

    def is_well(self, patience_s: float) -> bool:
        """Whether the device thread waits for a batch, or began the one at hand that recently."""
        return self._device.is_well(patience_s)

    def stop(self) -> bool:
        """Report NOT_SERVING, finish the batches under way, end; whether they finished in time."""
        self._server.refuse_traffic()
        is_done = self._device.stop(self._config.shutdown_timeout)
        self._servicer.end_streams(PlaneDraining("the compute plane is shutting down"))
        self._server.stop()
        if is_done:
            self._close_executors()
        log.info("stopped", batches_finished=is_done)
        return is_done

    def _close_executors(self) -> None:
        for built in self._executors:
            close = getattr(built.executor, "close", None)
            if close is not None:
                close()


def _load_model(reference: str, config: ComputePlaneConfig) -> LoadedModel:
    if config.verify_model:
        return load_model(reference, long_context=config.long_context)

    def locate_unchecked(name: str) -> ModelLocation:
        return replace(locate_model(name), sha256=None)

    return load_model(reference, locate_unchecked, long_context=config.long_context)


def _load_draft(reference: str, config: ComputePlaneConfig) -> LoadedModel:
    """Load the draft model; what is wrong with it is said of that setting."""
    try:
        return _load_model(reference, config)
    except ConfigError as error:
        raise ConfigError(f"draft_model: {error.message}", field="draft_model") from error


def _load_adapters(
    sources: tuple[AdapterSource, ...], model: LoadedModel | None
) -> tuple[Adapter, ...]:
    """Read the adapters of a model; without one they have a name alone."""
    name = simulated.SPEC.name if model is None else model.spec.name
    for source in sources:
        if source.name == name:
            raise ConfigError(f"lora: the model itself is called {name!r}", field="lora")
    if model is None:
        return tuple(Adapter(source.name, {}) for source in sources)
    return tuple(load_adapter(source.name, source.path, model) for source in sources)


def _assets(model: LoadedModel, context_length: int) -> PlaneAssets:
    assets = model.assets
    return PlaneAssets(
        tokenizer_json=assets.tokenizer_json,
        vocab_size=model.spec.vocab_size,
        chat_template=assets.chat_template,
        bos_token_id=assets.bos_token_id,
        eos_token_ids=assets.eos_token_ids,
        pad_token_id=assets.pad_token_id,
        add_bos_token=assets.add_bos_token,
        context_length=context_length,
        model_name=assets.model_name,
        text_end_token_ids=assets.text_end_token_ids,
    )
