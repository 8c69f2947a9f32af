"""What the simulator accuses a kernel of."""

from __future__ import annotations


class Fault(Exception):
    """A kernel did what no GPU promises to survive."""


class OutOfBounds(Fault):
    """An index outside an array."""


class Misaligned(Fault):
    """A wide access at an address that is not a multiple of its size."""


class Race(Fault):
    """Two threads touched the same element without a barrier between, at least one writing."""


class TooEarly(Fault):
    """Memory is touched before the launch ahead has ended, or a thread ends without having waited.

    Only of launches that begin early.
    """


class Divergence(Fault):
    """A warp instruction that not all 32 lanes reached together."""


class Deadlock(Fault):
    """Threads that wait for what cannot come."""


class Unsupported(Fault):
    """Something of CUDA that the simulator does not model."""
