"""How many files and connections this process may have open."""

from __future__ import annotations

import contextlib
import resource


def raise_descriptor_limit() -> None:
    """Ask for all that this process is allowed: shells mostly start theirs with 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def share_of_descriptors(share: float, most: int) -> int:
    """Return how many of them one port may have, at least 1."""
    return max(1, min(most, int(descriptor_limit() * share)))


def descriptor_limit() -> int:
    """Return how many there may be."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft
