"""What a server says of itself, its model and its requests."""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.core.kv_interface import MemoryStats
from hetero_infer.client.answers import StateReached


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the server runs. `max_model_len`: prompt and completion together, in tokens.

    `context_length`: what the model itself takes. `has_chat_template`: whether it can chat.
    `base_model`: of an adapter, the model that it changes, else empty; `adapter_rank`: its rank.
    `num_parameters` are an adapter's own then, the rest is of the model.
    """

    model: str
    dtype: str
    weight_format: str
    executor: str
    device: str
    max_model_len: int
    architecture: str = ""
    vocab_size: int = 0
    context_length: int = 0
    num_parameters: int = 0
    numerics_id: str = ""
    software_version: str = ""
    has_chat_template: bool = False
    base_model: str = ""
    adapter_rank: int = 0


@dataclass(frozen=True, slots=True)
class PoolStats(MemoryStats):
    """Use of the KV pool, and how many tokens one of its blocks holds."""

    block_size: int = 0


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What the chat template made of a conversation, special tokens included."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """What a request is doing. `finish_reason`: empty while it goes on; `age_s`: since receipt.

    `completion_tokens`: of each sample. `model`: what computes it, the model or an adapter.
    """

    request_id: str
    state: str
    priority: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: tuple[int, ...]
    finish_reason: str
    age_s: float
    states: tuple[StateReached, ...]
    model: str = ""
