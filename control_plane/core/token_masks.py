"""Sets of tokens as bits: `RowConstraint.allowed_tokens` of the wire."""

from __future__ import annotations

from collections.abc import Iterable


def all_but(token_ids: Iterable[int], vocab_size: int) -> bytes:
    """Return all tokens but some; empty if that is none."""
    bits = (1 << vocab_size) - 1
    for token_id in set(token_ids):
        bits &= ~(1 << token_id)
    return bits.to_bytes(-(-vocab_size // 8), "little") if bits else b""


def of_both(allowed: bytes, others: bytes) -> bytes:
    """Return what two sets share; `allowed` where they share nothing."""
    shared = int.from_bytes(allowed, "little") & int.from_bytes(others, "little")
    return shared.to_bytes(len(allowed), "little") if shared else allowed
