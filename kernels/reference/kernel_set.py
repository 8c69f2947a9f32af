"""The reference operations as a kernel set."""

from __future__ import annotations

from typing import Final

from kernels.interface import KernelSet
from kernels.reference.embedding import embedding
from kernels.reference.logprobs import token_logprobs
from kernels.reference.paged_attention import paged_attention
from kernels.reference.rms_norm import rms_norm
from kernels.reference.rope import rope_write_kv
from kernels.reference.sampling import sample
from kernels.reference.silu_mul import silu_mul

KERNELS: Final = KernelSet(
    name="reference",
    embedding=embedding,
    rms_norm=rms_norm,
    rope_write_kv=rope_write_kv,
    paged_attention=paged_attention,
    silu_mul=silu_mul,
    sample=sample,
    token_logprobs=token_logprobs,
)
