"""How many heads attention has in a layer, and how large they are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Heads:
    """`num_heads` of queries and `num_kv_heads` of keys and values, of `head_dim` elements."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together; that of all value heads is the same."""
        return self.num_kv_heads * self.head_dim

    @property
    def group(self) -> int:
        """How many query heads share a kv head."""
        return self.num_heads // self.num_kv_heads
