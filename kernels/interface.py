"""The operations a kernel set offers, as Protocols.

Every operation is a function of arrays that writes a caller-provided `out`; it keeps nothing and
allocates nothing that outlives the call. `kernels.reference` holds the specification of each, one
file an operation; the other sets agree with it: exactly for integers, within rounding for floats.

A set keeps one law: the result of a row (a token, a (token, head) item, a sample) is computed in an
order fixed by that row alone. So it is the same bits whoever else is in the arrays and however the
caller cuts the rows into calls or threads.

Array letters: T tokens, S sequences, H query heads, G kv heads, D head size, N blocks, L layers,
B block size, M table width, E hidden size, F feed-forward size, K samples, R logits rows,
V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]
BoolArray = npt.NDArray[np.bool_]


class Embedding(Protocol):
    """`kernels.reference.embedding`."""

    def __call__(self, table: Float32Array, token_ids: Int32Array, out: Float32Array) -> None:
        """Write row `token_ids[t]` of `table` [V, E] to `out[t]` [T, E]."""
        ...


class RmsNorm(Protocol):
    """`kernels.reference.rms_norm`."""

    def __call__(
        self, x: Float32Array, weight: Float32Array, eps: float, out: Float32Array
    ) -> None:
        """Write x · weight / sqrt(mean(x²) + eps) of each row of `x` [T, E] to `out` [T, E]."""
        ...


class RopeWriteKv(Protocol):
    """`kernels.reference.rope`."""

    def __call__(
        self,
        qkv: Float32Array,
        cosines: Float32Array,
        sines: Float32Array,
        kv_pool: Float32Array,
        layer: int,
        kv_slots: Int64Array,
        out: Float32Array,
    ) -> None:
        """Rotate Q into `out` [T, H, D], rotated K and V into the pool [N, L, 2, G, B, D]."""
        ...


class PagedAttention(Protocol):
    """`kernels.reference.paged_attention`."""

    def __call__(
        self,
        q: Float32Array,
        kv_pool: Float32Array,
        layer: int,
        block_tables: Int32Array,
        token_rows: Int32Array,
        positions: Int32Array,
        scale: float,
        first_item: int,
        end_item: int,
        out: Float32Array,
    ) -> None:
        """Attend with items first_item to end_item − 1, item i = (token i // G, kv head i % G)."""
        ...


class SiluMul(Protocol):
    """`kernels.reference.silu_mul`."""

    def __call__(self, gate_up: Float32Array, out: Float32Array) -> None:
        """Write silu(gate) · up of each row of `gate_up` [T, 2·F] to `out` [T, F]."""
        ...


class Sample(Protocol):
    """`kernels.reference.sampling`."""

    def __call__(
        self,
        logits: Float32Array,
        logits_rows: Int32Array,
        temperatures: Float64Array,
        top_ps: Float64Array,
        seeds: UInt64Array,
        sample_indexes: Int64Array,
        positions: Int64Array,
        out: Int32Array,
        is_finite: BoolArray,
    ) -> None:
        """Draw sample k from row `logits_rows[k]` of `logits` [R, V] into `out[k]`."""
        ...


class TokenLogprobs(Protocol):
    """`kernels.reference.logprobs`."""

    def __call__(self, logits: Float32Array, token_ids: Int32Array, out: Float32Array) -> None:
        """Write the log-probability of `token_ids[r]` under row r of `logits` [R, V]."""
        ...


@dataclass(frozen=True, slots=True)
class KernelSet:
    """One implementation of every operation, on one device kind."""

    name: str
    embedding: Embedding
    rms_norm: RmsNorm
    rope_write_kv: RopeWriteKv
    paged_attention: PagedAttention
    silu_mul: SiluMul
    sample: Sample
    token_logprobs: TokenLogprobs
