"""A SIMT simulator: runs a CUDA kernel's own source, thread by thread, and distrusts it.

`launch(kernel, grid, threads, arguments)` runs the plain function that Numba would compile, with
`numba.cuda`, our instructions and Numba's scalar types replaced by twins. Every
thread is a greenlet; it runs until it needs its warp (a shuffle) or its block (a barrier). Warps
and lanes run in shuffled order. Each of these ends the launch with a `Fault`:

    OutOfBounds   an index below zero or past the end, of global, shared or local memory
    Misaligned    a wide access at an address that is not a multiple of its size
    Race          memory that two threads touch, at least one writing, with no barrier between
                  (of two blocks: no fences and atomics, or read by way of the first cache), or
                  that an asynchronous copy is still writing
    TooEarly      of a launch that begins early: memory that is touched before the wait, or a thread
                  that never waits
    Divergence    the lanes of a warp at different warp instructions, or some gone
    Deadlock      threads of a block at different barriers, or waiting for what never comes
    Unsupported   something of CUDA that this simulator does not model

Shared and local memory start poisoned: NaN in floats, large garbage in integers.

    access      when a thread touched memory
    memory      arrays that check every access
    threads     lanes, warps and the block that runs them
    device      the twins of `numba.cuda`
    twins       the twins of our instructions, by the kernel's own names
    tensor      what tensor-core instructions compute over a warp
    simulator   `launch`: rebinds a kernel to the twins and runs the grid
"""

from __future__ import annotations

from tests.simt.faults import (
    Deadlock,
    Divergence,
    Fault,
    Misaligned,
    OutOfBounds,
    Race,
    TooEarly,
    Unsupported,
)
from tests.simt.simulator import launch

__all__ = [
    "launch",
    "Fault",
    "OutOfBounds",
    "Misaligned",
    "Race",
    "TooEarly",
    "Divergence",
    "Deadlock",
    "Unsupported",
]
