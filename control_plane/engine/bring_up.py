"""From an address to a running engine, waiting for the compute plane as long as it takes."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from control_plane.config import SchedulingLimits
from control_plane.core.interface import ReportsMemory, SchedulerConfig
from control_plane.core.limits import RequestLimits
from control_plane.engine.admission import Admission
from control_plane.engine.compute_client import ComputeClient
from control_plane.engine.events import Publisher
from control_plane.engine.link import ComputeLink
from control_plane.engine.loop import EngineLoop, LoopOptions
from control_plane.engine.plane import DRAFT_MODEL, PlaneDescription, effective_limits
from control_plane.engine.plugins import CoreFactories
from control_plane.errors import LinkError, PlaneMismatchError, PlaneNotThereError
from control_plane.structured.grammars import Grammars
from control_plane.text.assets import ModelAssets, make_tokenizer
from control_plane.text.tokenizer import Tokenizer

_log = structlog.get_logger(__name__)

RETRY_PAUSE_S = 0.05

_DEFAULTS = SchedulingLimits()

QUIET_WAIT_S = 10.0
"""Planes that start together find each other within it; only a longer wait needs a reason.

It is said once more each time the wait has become twice as long.
"""


@dataclass(frozen=True, slots=True)
class ConnectedPlane:
    """A compute plane that answered: what it is, and what follows for the control plane.

    `tokenizer`: the model's or the caller's own; `eos_token_ids` are that one's, and `text_end` is
    what it puts behind texts that are embedded. `prefix_cache`: whether blocks are to be found
    again.
    """

    plane: PlaneDescription
    assets: ModelAssets
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    limits: SchedulerConfig
    prefix_cache: bool = True
    text_end: tuple[int, ...] = ()

    def make_admission(self) -> Admission:
        """Return what turns prompts into requests for this plane's model."""
        return Admission(
            self.tokenizer,
            RequestLimits(
                max_model_len=self.limits.max_model_len,
                block_size=self.plane.block_size,
                num_blocks=self.plane.num_blocks,
                max_beams=self.limits.num_slots,
                shares_prompts=self.limits.num_states == 0,
            ),
            vocab_size=self.plane.vocab_size,
            eos_token_ids=self.eos_token_ids,
            features=self.plane.features,
        )

    def make_grammars(self) -> Grammars:
        """Return what constrains requests for this plane's model; nothing is done before one."""
        return Grammars(
            self.tokenizer, vocab_size=self.plane.vocab_size, eos_token_ids=self.eos_token_ids
        )


def connect(
    client: ComputeClient, limits: SchedulingLimits, *, stop: threading.Event
) -> ConnectedPlane | None:
    """Wait for the compute plane and learn what it is; None if `stop` is set first.

    Raises PlaneMismatchError and TokenizationError as `learn` does.
    """
    address = str(client.address)
    waiting_since: float | None = None
    next_word_s = QUIET_WAIT_S
    while not stop.is_set():
        try:
            return learn(client, limits)
        except LinkError as error:
            now = time.monotonic()
            if waiting_since is None:
                waiting_since = now
                _log.info("waiting for the compute plane", address=address)
            elif now - waiting_since >= next_word_s:
                _tell_wait(address, round(now - waiting_since), error)
                next_word_s *= 2.0
        stop.wait(RETRY_PAUSE_S)
    return None


def _tell_wait(address: str, waited_s: int, error: LinkError) -> None:
    """Say what is waited for: a plane that starts, as far as can be seen, is no fault."""
    if isinstance(error, PlaneNotThereError):
        _log.warning(
            f"waiting for the compute plane to start, {waited_s} s so far (it compiles its kernels "
            "once, which takes about half a minute, and loads the model)",
            address=address,
        )
    else:
        _log.warning(
            f"still waiting for the compute plane, {waited_s} s so far",
            address=address,
            error=error.message,
        )


def learn(
    client: ComputeClient, limits: SchedulingLimits, tokenizer: Tokenizer | None = None
) -> ConnectedPlane:
    """Ask the compute plane what it is.

    `tokenizer`: the caller's own instead of the model's. Raises LinkError if the plane does not
    answer, PlaneMismatchError and TokenizationError if this control plane cannot work with it.
    """
    plane = client.describe()
    assets = client.get_assets()
    if tokenizer is None:
        tokenizer, eos_token_ids = make_tokenizer(assets), assets.eos_token_ids
        text_end = assets.text_end_token_ids
    else:
        eos_token_ids = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        text_end = ()
    if tokenizer.vocab_size > plane.vocab_size:
        raise PlaneMismatchError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model's logits only "
            f"{plane.vocab_size}",
            field="vocab_size",
        )
    config, lowered = effective_limits(limits, plane)
    for limit in lowered:
        is_asked_for = limit.configured != getattr(_DEFAULTS, limit.name)
        tell = _log.warning if is_asked_for else _log.info
        tell(
            "limit lowered to the compute plane's",
            name=limit.name,
            configured=limit.configured,
            effective=limit.effective,
        )
    _tell_idle_drafts(limits, config, plane)
    return ConnectedPlane(
        plane, assets, tokenizer, eos_token_ids, config, limits.prefix_cache, text_end
    )


def _tell_idle_drafts(
    limits: SchedulingLimits, config: SchedulerConfig, plane: PlaneDescription
) -> None:
    """Say why there will be no drafts of texts, if they were asked for."""
    if limits.speculative_tokens == 0:
        if limits.prompt_lookup_min != SchedulingLimits().prompt_lookup_min:
            _log.warning("prompt_lookup_min has no effect without speculative_tokens")
        if DRAFT_MODEL in plane.features:
            _log.warning("the compute plane's draft model has no effect without speculative_tokens")
        return
    reasons = {
        "the compute plane takes no drafts": config.speculative_tokens == 0,
        "max_batch_size 1 leaves no row for a draft": config.max_batch_size == 1,
        "max_total_tokens 1 leaves no token for a draft": config.max_total_tokens == 1,
        "block_size 1 leaves no room for one in a block": plane.block_size == 1,
    }
    reason = next((reason for reason, is_so in reasons.items() if is_so), None)
    if reason is not None:
        _log.warning(f"speculative_tokens has no effect: {reason}", executor=plane.executor)


def make_loop(
    link: ComputeLink,
    connected: ConnectedPlane,
    publish: Publisher,
    *,
    options: LoopOptions,
    factories: CoreFactories | None = None,
    on_link_change: Callable[[bool], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> EngineLoop:
    """Put scheduler, page tables and link together.

    `factories`: of a user's own scheduler or KV cache manager; ConfigError if they are none. The
    pipeline is no deeper than the plane allows.
    """
    plane = connected.plane
    scheduler, kv_cache = (factories or CoreFactories()).make(
        connected.limits, plane, prefix_cache=connected.prefix_cache
    )
    reporter = scheduler if isinstance(scheduler, ReportsMemory) else kv_cache
    depth = min(options.pipeline_depth, plane.max_batches_in_flight)
    return EngineLoop(
        scheduler,
        link,
        publish,
        memory_stats=reporter.get_memory_stats,
        options=dataclasses.replace(options, pipeline_depth=depth),
        on_link_change=on_link_change,
        clock=clock,
    )
