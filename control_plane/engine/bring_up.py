"""From an address to a running engine, waiting for the compute plane as long as it takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from control_plane.config import SchedulingLimits
from control_plane.core.interface import SchedulerConfig
from control_plane.core.kv_cache import KVCacheManager
from control_plane.core.scheduler import Scheduler
from control_plane.engine.admission import Admission, PromptLimits
from control_plane.engine.compute_client import ComputeClient
from control_plane.engine.events import Publisher
from control_plane.engine.loop import EngineLoop, LoopOptions
from control_plane.engine.plane import PlaneDescription, effective_limits
from control_plane.errors import LinkError, PlaneMismatchError
from control_plane.text.assets import ModelAssets, make_tokenizer
from control_plane.text.tokenizer import Tokenizer

_log = structlog.get_logger(__name__)

RETRY_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class ConnectedPlane:
    """A compute plane that answered: what it is, and what follows for the control plane."""

    plane: PlaneDescription
    assets: ModelAssets
    tokenizer: Tokenizer
    limits: SchedulerConfig

    def make_admission(self) -> Admission:
        """Return what turns prompts into requests for this plane's model."""
        return Admission(
            self.tokenizer,
            PromptLimits(max_model_len=self.limits.max_model_len, vocab_size=self.plane.vocab_size),
            eos_token_ids=self.assets.eos_token_ids,
        )


def connect(
    client: ComputeClient,
    limits: SchedulingLimits,
    *,
    stop: threading.Event,
    tokenizer: Tokenizer | None = None,
) -> ConnectedPlane | None:
    """Wait for the compute plane and learn what it is; None if `stop` is set first.

    `tokenizer`: the caller's own instead of the model's. Raises PlaneMismatchError and
    TokenizationError for a plane this control plane cannot work with.
    """
    has_complained = False
    while not stop.is_set():
        try:
            return _learn(client, limits, tokenizer)
        except LinkError as error:
            if not has_complained:
                has_complained = True
                _log.info(
                    "waiting for the compute plane",
                    address=str(client.address),
                    error=error.message,
                )
        stop.wait(RETRY_PAUSE_S)
    return None


def _learn(
    client: ComputeClient, limits: SchedulingLimits, tokenizer: Tokenizer | None
) -> ConnectedPlane:
    plane = client.describe()
    assets = client.get_assets()
    tokenizer = tokenizer or make_tokenizer(assets)
    if tokenizer.vocab_size > plane.vocab_size:
        raise PlaneMismatchError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model's logits only "
            f"{plane.vocab_size}",
            field="vocab_size",
        )
    config, lowered = effective_limits(limits, plane)
    for limit in lowered:
        _log.info(
            "limit lowered to the compute plane's",
            name=limit.name,
            configured=limit.configured,
            effective=limit.effective,
        )
    return ConnectedPlane(plane, assets, tokenizer, config)


def make_loop(
    client: ComputeClient,
    connected: ConnectedPlane,
    publish: Publisher,
    *,
    options: LoopOptions,
    on_link_change: Callable[[bool], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> EngineLoop:
    """Put scheduler, page tables and link together.

    The pipeline is no deeper than the plane allows.
    """
    plane = connected.plane
    kv_cache = KVCacheManager(plane.num_blocks, plane.block_size)
    depth = min(options.pipeline_depth, plane.max_batches_in_flight)
    return EngineLoop(
        Scheduler(connected.limits, kv_cache),
        client,
        publish,
        memory_stats=kv_cache.get_memory_stats,
        options=LoopOptions(
            pipeline_depth=depth,
            max_queued_requests=options.max_queued_requests,
            compute_grace_s=options.compute_grace_s,
        ),
        on_link_change=on_link_change,
        clock=clock,
    )
