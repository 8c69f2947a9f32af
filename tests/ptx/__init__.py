"""A PTX machine: runs what the compiler made of a kernel, without a GPU, and distrusts it.

`launch(text, grid, arguments)` reads the PTX that `kernels.cuda.build.compile_ptx` emits and
executes it: the assembly that we write ourselves, what the compiler did with addresses, barriers
and registers. It stands beside `tests.simt`, which runs a kernel's Python source: what both say is
what the source means, what only this one says is what became of it. The meaning of instructions is
written from the manual, not from the twins there.

All lanes of several blocks run together, a register being a NumPy array with one element a lane.
Each of these ends the launch with a `Fault` that names the line:

    OutOfBounds    an address outside of every buffer, or one that may not be written
    Misaligned     an access whose address is no multiple of its size
    Uninitialised  shared memory, or a register, that nobody has written
    Race           a place that two threads touch, at least one writing, with no barrier between;
                   a read by the way for constants (.nc) of what the kernel writes
    TooEarly       of a launch that begins early: memory that is touched before the wait, or a
                   thread that never waits
    InFlight       a place that an asynchronous copy is still writing
    Divergence     lanes that wait for others at a barrier or an instruction of the warp, in vain
    Undefined      what the manual leaves open
    Endless        a loop that goes on and on
    Unsupported    text that is not known here: nothing is left out

What it does not know: that the assembler may join a product and a sum not marked `.rn`, in which
order tensor cores sum (here exactly, rounded once), how exact the special-function unit is (here
rounded right), and time.

    program      the text → instructions and declarations
    registers    the registers of all lanes; what is read and never written
    integers     what instructions on integers and bits compute
    floats       the same of floats
    elementwise  these as steps of the machine
    memory       bytes, with bounds, and who touched them when
    accesses     loads, stores, atomics
    copies       asynchronous copies
    early        launches that begin before the one ahead has ended
    warps        shuffles, votes, tensor cores
    lanes        the threads that run together
    front        which of them go on next
    machine      the loop
    launcher     a kernel over a grid, arrays for pointers
    meter        counts: instructions, sectors, wavefronts
    loops        the loop with the products, in PTX and in machine code
    report       the counts of all kernels as a table
    texts        small texts for tests
"""

from __future__ import annotations

from tests.ptx.faults import (
    Divergence,
    Endless,
    Fault,
    InFlight,
    Misaligned,
    OutOfBounds,
    Race,
    TooEarly,
    Undefined,
    Uninitialised,
    Unsupported,
)
from tests.ptx.launcher import launch
from tests.ptx.meter import Meter

__all__ = [
    "launch",
    "Meter",
    "Fault",
    "OutOfBounds",
    "Misaligned",
    "Uninitialised",
    "Race",
    "TooEarly",
    "InFlight",
    "Divergence",
    "Undefined",
    "Endless",
    "Unsupported",
]
