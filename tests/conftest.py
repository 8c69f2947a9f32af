"""What all tests share: where compiled kernels are kept, signals, and who comes first."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from compute_plane.config import ComputePlaneConfig
from compute_plane.executor.kernel_cache import prepare_kernel_cache

# Numba's own place for machine code, beside the sources, does not notice that something a kernel
# imports has changed; the product's cache does. Tests load what the product has compiled, too.
prepare_kernel_cache(ComputePlaneConfig().kernel_cache_root)

# What a shell starts in the background may be deaf to Ctrl-C, and so would be the commands that
# tests start and interrupt: children inherit what is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST_FIRST = ("integration", "faults", "golden", "kernels", "properties", "hetero_infer")
"""Folders whose files take long; a worker that gets one of them last keeps the other waiting."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the long ones begin. Workers take files in this order (`--no-loadscope-reorder`)."""
    root = Path(__file__).parent
    ranks = {root / name: rank for rank, name in enumerate(LONGEST_FIRST)}

    def rank(item: pytest.Item) -> int:
        return min((ranks[folder] for folder in item.path.parents if folder in ranks), default=99)

    items.sort(key=rank)


@pytest.fixture(autouse=True)
def logs_as_by_default() -> Iterator[None]:
    """Undo what a test's engine says of logging: the next test captures log lines."""
    yield
    if structlog.is_configured():
        structlog.reset_defaults()
