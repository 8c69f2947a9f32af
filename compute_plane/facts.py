"""What a plane is and what its model's text side is: fixed once it has started."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from typing import Final

from compute_plane.device import DeviceDescription
from compute_plane.executor.batch_checks import SlotLimits
from compute_plane.model.adapter import AdapterFacts
from compute_plane.model.spec import ModelSpec
from planes.transport import PROTOCOL_VERSION

BATCHES_IN_TURN: Final = 2
"""Batches of one stream under way: one runs, the next waits ready."""
MAX_BATCHES_IN_FLIGHT: Final = 8
"""The same where steps are launched ahead: two are launched, the others wait ready."""

DISTRIBUTION: Final = "hetero-paged-infer"


@dataclass(frozen=True, slots=True)
class PlaneFacts:
    """The answer to Describe, but for epoch and session."""

    spec: ModelSpec
    dtype: str
    model_sha256: str
    numerics_id: str
    executor: str
    device: DeviceDescription
    limits: SlotLimits
    preferred_prefill_chunk: int
    kv_pool_bytes: int
    weights_bytes: int
    features: tuple[str, ...]
    max_message_bytes: int
    software_version: str
    tells_prompts_apart: bool = False
    protocol_version: int = PROTOCOL_VERSION
    max_batches_in_flight: int = BATCHES_IN_TURN
    adapters: tuple[AdapterFacts, ...] = ()


@dataclass(frozen=True, slots=True)
class PlaneAssets:
    """The answer to GetModelAssets. `tokenizer_json` None: the simple byte-level tokenizer."""

    tokenizer_json: bytes | None
    vocab_size: int
    chat_template: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    add_bos_token: bool
    context_length: int
    model_name: str
    text_end_token_ids: tuple[int, ...] = ()


def software_version() -> str:
    """Return the version of the installed package; from a bare source tree, "unknown"."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
