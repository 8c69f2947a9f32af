"""What all tests share: where compiled kernels are kept."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

from compute_plane.config import ComputePlaneConfig
from compute_plane.executor.kernel_cache import prepare_kernel_cache

# Numba's own place for machine code, beside the sources, does not notice that something a kernel
# imports has changed; the product's cache does. Tests load what the product has compiled, too.
prepare_kernel_cache(ComputePlaneConfig().kernel_cache_root)


@pytest.fixture(autouse=True)
def logs_as_by_default() -> Iterator[None]:
    """Undo what a test's engine says of logging: the next test captures log lines."""
    yield
    if structlog.is_configured():
        structlog.reset_defaults()
