"""Compiling in another process: `python -m kernels.cpu.compile_worker SET [CPU FEATURES]`.

It reads names of operations, a line each, and writes their object files, each behind its length in
eight bytes, until its input ends. `Worker` is the other end. It compiles for the instruction set
that the process which started it has chosen.
"""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from types import TracebackType
from typing import Final

from kernels.cpu import instruction_set

_LENGTH: Final = struct.Struct("<q")


class Worker:
    """A process that compiles. `output`: a descriptor that is readable once something is done.

    Leaving a `with` ends the process, whatever it is doing.
    """

    def __init__(self) -> None:
        chosen, target = instruction_set.selected_instruction_set(), instruction_set.forced_target()
        # Ctrl-C at a terminal is for the process that started it, which ends it.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, chosen.name, *(target or ())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # what it cannot compile, its starter is told by trying
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self.output = self._output.fileno()

    def begin(self, name: str) -> bool:
        """Have an operation compiled; False if the process is gone."""
        try:
            self._input.write(f"{name}\n".encode())
            self._input.flush()
        except BrokenPipeError:
            return False
        return True

    def result(self) -> bytes | None:
        """Wait for the object file of what was begun; None if the process is gone."""
        length = self._output.read(_LENGTH.size)
        if len(length) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack(length)
        code = self._output.read(size)
        return code if len(code) == size else None

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()


def main(arguments: list[str]) -> None:
    """Compile until the input ends."""
    name, *target = arguments
    instruction_set.adopt(name, (target[0], target[1]) if target else None)
    from kernels.cpu.compiled import object_code

    # Only object files go there, whatever a compiler prints.
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        code = object_code(line.rstrip("\n"))
        output.write(_LENGTH.pack(len(code)) + code)
        output.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
