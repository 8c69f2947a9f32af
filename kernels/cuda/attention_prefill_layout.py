"""How a block of prefill attention on tensor cores divides its rows, and its shared memory."""

from __future__ import annotations

from dataclasses import dataclass

TILE_ROWS = 128


@dataclass(frozen=True, slots=True)
class PrefillLayout:
    row_tiles: int
    keys: int
    parked: int

    @property
    def warp_rows(self) -> int:
        return 16 * self.row_tiles

    @property
    def threads(self) -> int:
        return TILE_ROWS // self.warp_rows * 32


_LAYOUTS = {
    64: PrefillLayout(2, 64, 0),
    96: PrefillLayout(2, 32, 0),
    128: PrefillLayout(2, 32, 4),
    256: PrefillLayout(1, 16, 0),
}
_LAYOUTS_8_BITS = {
    64: PrefillLayout(2, 64, 0),
    96: PrefillLayout(2, 32, 0),
    128: PrefillLayout(2, 32, 7),
    256: PrefillLayout(1, 32, 0),
}


def prefill_layout(head_size: int, kv_dtype: str | None) -> PrefillLayout:
    return (_LAYOUTS if kv_dtype is None else _LAYOUTS_8_BITS)[head_size]
