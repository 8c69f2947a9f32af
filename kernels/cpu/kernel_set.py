"""The CPU operations as a kernel set."""

from __future__ import annotations

from typing import Final

from kernels.cpu.logprobs import token_logprobs
from kernels.cpu.paged_attention import paged_attention
from kernels.cpu.rms_norm import rms_norm
from kernels.cpu.rope import rope_write_kv
from kernels.cpu.sample_arrays import sample
from kernels.cpu.silu_mul import silu_mul
from kernels.interface import KernelSet
from kernels.reference.embedding import embedding

KERNELS: Final = KernelSet(
    name="cpu",
    embedding=embedding,  # one memory copy: NumPy's is as good as any
    rms_norm=rms_norm,
    rope_write_kv=rope_write_kv,
    paged_attention=paged_attention,
    silu_mul=silu_mul,
    sample=sample,
    token_logprobs=token_logprobs,
)
