"""Machine code of operations: kept in files, loaded into the process.

An operation is one object file, as compilers write them, in the directory of what it was made from
(`compute_plane.cpu.kernel_cache`); it defines one symbol and needs nothing but the C library.

    NAME.o    SHA-256 of name and object file, 32 bytes │ object file

LLVM's linker loads it: a library, without Numba, which takes half a second to import.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from pathlib import Path
from typing import Protocol

import llvmlite.binding

from planes.errors import ConfigError

DIGEST_BYTES = hashlib.sha256().digest_size


class Watch(Protocol):
    """Is told what a process does because code was not kept."""

    def missing(self, name: str, directory: Path | None) -> None:
        """Note that code is about to be made; `directory`: where it was looked for."""

    def made(self, name: str) -> None:
        """Note that it is there."""

    def not_kept(self, error: ConfigError) -> None:
        """Note that it could not be written: it works, and the next process makes it again."""


def keep_code_in(directory: Path | None, watch: Watch | None = None) -> None:
    """Look for machine code in a directory from now on, and keep there what is compiled.

    None: keep nothing, as it is at the beginning.
    """
    global _directory, _watch
    _directory, _watch = directory, watch


def find_code(name: str) -> bytes | None:
    """Return the object file that is kept under a name; None if there is none, or not all of it.

    Raises ConfigError if it cannot be read.
    """
    code = None if _directory is None else _read(_directory, name)
    if code is None and _watch is not None:
        _watch.missing(name, _directory)
    return code


def _read(directory: Path, name: str) -> bytes | None:
    try:
        kept = (directory / f"{name}.o").read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _failure(error) from error
    code = kept[DIGEST_BYTES:]
    return code if kept[:DIGEST_BYTES] == _digest(name, code) else None


def keep_code(name: str, code: bytes) -> None:
    """Keep an object file, if there is a directory for it.

    Others may do the same meanwhile; a reader finds one of them, whole. If it cannot be kept, the
    watch is told; without one ConfigError is raised.
    """
    if _watch is not None:
        _watch.made(name)
    if _directory is None:
        return
    try:
        _write(_directory, name, code)
    except OSError as error:
        failure = _failure(error)
        if _watch is None:
            raise failure from error
        _watch.not_kept(failure)


def _write(directory: Path, name: str, code: bytes) -> None:
    # Not by number: planes in containers that share a cache are process 1, all of them.
    beside = directory / f".{name}.{os.urandom(8).hex()}"
    try:
        beside.write_bytes(_digest(name, code) + code)
        beside.replace(directory / f"{name}.o")
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def load_code(name: str, code: bytes) -> int:
    """Load an object file that defines `symbol_of(name)`; return that address, good for ever."""
    engine = _linker()
    engine.add_object_file(llvmlite.binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    address = int(engine.get_function_address(symbol_of(name)))
    if address == 0:
        raise ValueError(f"the machine code of {name} does not define it")
    return address


def symbol_of(name: str) -> str:
    """Return the symbol that the object file of a name defines."""
    return f"hetero.{name}"


def _digest(name: str, code: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + code).digest()


def _failure(error: OSError) -> ConfigError:
    return ConfigError(f"kernel cache {_directory}: {error.strerror}", field="kernel_cache")


@functools.cache
def _linker() -> llvmlite.binding.ExecutionEngine:
    """Return what loads object files; they stay where they are as long as it lives."""
    llvmlite.binding.initialize_native_target()
    llvmlite.binding.initialize_native_asmprinter()
    target = llvmlite.binding.Target.from_triple(llvmlite.binding.get_process_triple())
    nothing = llvmlite.binding.parse_assembly("")
    return llvmlite.binding.create_mcjit_compiler(nothing, target.create_target_machine(jit=True))


_directory: Path | None = None
_watch: Watch | None = None
