"""What several tests of CUDA kernels begin with."""

from __future__ import annotations

import pytest

from kernels.cuda import attention_chunks


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 64 tokens: each sharer has one tile of a chunk."""
    for name in ("CHUNK_TILES", "LEAST_CHUNK_TILES"):
        monkeypatch.setattr(attention_chunks, name, 4)
