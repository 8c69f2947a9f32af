"""Every operation there is a CUDA kernel for, and its variants."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Protocol

from kernels.cuda import (
    add_experts,
    adjust_logits,
    attention_decode,
    attention_prefill,
    attention_wide,
    cap_logits,
    copy_blocks,
    delta_rule,
    dense_matmul,
    embedding,
    gate_apart,
    gate_attended,
    gate_mul,
    gated_convolution,
    gated_norm,
    gated_row_norm,
    joint_norms,
    latent_attention,
    latent_write,
    logprobs,
    mamba2_inputs,
    quantized_matmul,
    quantized_rows,
    relu2,
    rms_norm,
    rope_write_kv,
    route_experts,
    router_logits,
    sampling,
    selective_scan,
    short_convolution,
)
from kernels.cuda.variant import Variant


class Operation(Protocol):
    """A kernel's module, as the check and the GPU's tests see it."""

    def variants(self, *, every: bool) -> Sequence[Variant]:
        """Return a spread of the variants, or every one there is."""
        ...


# Name of the operation → its module.
OPERATIONS: dict[str, Operation] = {
    "add_experts": add_experts,
    "adjust_logits": adjust_logits,
    "attention_decode": attention_decode,
    "attention_prefill": attention_prefill,
    "attention_wide": attention_wide,
    "cap_logits": cap_logits,
    "copy_blocks": copy_blocks,
    "delta_rule": delta_rule,
    "dense_matmul": dense_matmul,
    "embedding": embedding,
    "gate_apart": gate_apart,
    "gate_attended": gate_attended,
    "gate_mul": gate_mul,
    "gated_convolution": gated_convolution,
    "gated_norm": gated_norm,
    "gated_row_norm": gated_row_norm,
    "joint_norms": joint_norms,
    "latent_attention": latent_attention,
    "latent_write": latent_write,
    "logprobs": logprobs,
    "mamba2_inputs": mamba2_inputs,
    "quantized_matmul": quantized_matmul,
    "quantized_rows": quantized_rows,
    "relu2": relu2,
    "rms_norm": rms_norm,
    "rope_write_kv": rope_write_kv,
    "route_experts": route_experts,
    "router_logits": router_logits,
    "sampling": sampling,
    "selective_scan": selective_scan,
    "short_convolution": short_convolution,
}


def operation_of(variant: Variant) -> str:
    """Return the name of the operation that a variant is of."""
    return _operations_of_kinds()[type(variant)]


@cache
def _operations_of_kinds() -> dict[type[Variant], str]:
    return {
        type(variant): name
        for name, module in OPERATIONS.items()
        for variant in module.variants(every=False)
    }


def all_variants(*, every: bool) -> list[Variant]:
    """Return the variants of all operations: a spread, or every one there is."""
    return [variant for module in OPERATIONS.values() for variant in module.variants(every=every)]
