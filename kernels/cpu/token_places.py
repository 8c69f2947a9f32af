"""Where a token's K and V go in a sub-block of the pool (`kernels.cpu.kv_layout`)."""

from __future__ import annotations

from kernels.cpu.compiled import inlined, int64_at
from kernels.cpu.kv_layout import SUB_BLOCK_TOKENS


@inlined()
def find_token_places(
    sub_block: int, lane: int, value_bytes: int, key_dim: int, value_dim: int, places: int
) -> None:
    """Write four addresses for the stores of `kernels.cpu.rope_tile`, int64 at `places`.

    Of the token's lane of K, of its row of V, and in pools of eight bits of the scales of both.
    `lane`: of the token in the sub-block. `key_dim`, `value_dim`: D', V'.
    """
    # Tokens are in lanes of K; in V they are rows, or halves of pairs of rows.
    pair = 1 if value_bytes == 4 else 2
    found = int64_at(places)
    values = sub_block + key_dim * SUB_BLOCK_TOKENS * value_bytes
    found[0] = sub_block + lane * pair * value_bytes
    found[1] = values + (lane // pair * value_dim * pair + lane % pair) * value_bytes
    found[2] = values + value_dim * SUB_BLOCK_TOKENS * value_bytes + 4 * lane
    found[3] = found[2] + 4 * SUB_BLOCK_TOKENS
