"""Whose the keys of a JSON file are, for one file may serve both planes and the front door.

Written out because the planes must not import each other, nor the front door; tests above all of
them compare these with their declarations.
"""

from __future__ import annotations

from typing import Final

COMPUTE_PLANE_KEYS: Final = frozenset(
    {
        "block_size",
        "cuda_graph",
        "device",
        "draft_model",
        "lora",
        "draft_p_min",
        "dtype",
        "executor",
        "gpu_memory_limit",
        "gpu_memory_utilization",
        "instruction_set",
        "kernel_cache",
        "kv_cache_dtype",
        "long_context",
        "max_num_blocks",
        "max_rows",
        "max_slots",
        "max_tokens_per_batch",
        "model",
        "num_threads",
        "swap_space",
        "verify_model",
    }
)
"""Of `compute_plane.config` alone."""

CONTROL_PLANE_KEYS: Final = frozenset(
    {
        "api_tokens",
        "chat_template",
        "chat_template_kwargs",
        "compute",
        "compute_grace",
        "compute_tls_ca",
        "compute_tls_cert",
        "compute_tls_key",
        "grammar_drafts",
        "grpc_host",
        "grpc_port",
        "http",
        "http_cors_origins",
        "http_host",
        "http_port",
        "kv_cache_manager",
        "max_batch_size",
        "max_model_len",
        "max_num_seqs",
        "max_queued_requests",
        "max_total_tokens",
        "max_unread_tokens",
        "memory_threshold",
        "metrics_compat",
        "otlp_traces_endpoint",
        "pipeline_depth",
        "pooling",
        "prefill_chunk",
        "prefix_cache",
        "prompt_lookup_min",
        "reasoning_parser",
        "record",
        "scheduler",
        "speculative_tokens",
        "tool_call_parser",
    }
)
"""Of `control_plane.config` alone."""

FRONT_DOOR_KEYS: Final = frozenset(
    {
        "adapter",
        "beam_width",
        "cache_salt",
        "config",
        "early_stopping",
        "frequency_penalty",
        "ignore_eos",
        "include_stop",
        "input",
        "json",
        "json_schema",
        "length_penalty",
        "logit_bias",
        "logprobs",
        "max_tokens",
        "min_p",
        "min_tokens",
        "n",
        "presence_penalty",
        "priority",
        "prompt_logprobs",
        "regex",
        "repetition_penalty",
        "seed",
        "serve",
        "stop",
        "stop_token_ids",
        "temperature",
        "top_k",
        "top_p",
    }
)
"""Of `hetero_infer.config` and its command line."""
