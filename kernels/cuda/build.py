"""Plain kernel function → PTX → machine code, without a GPU, a driver or `nvcc`.

    variant.kernel()  ── numba.cuda.compile ──▶  PTX  ── nvJitLink ──▶  cubin ──▶ cache

Numba lowers to LLVM IR and libnvvm turns that into PTX; nvJitLink assembles PTX for one
architecture and reports registers and spills. All three libraries come as wheels (the `cuda`
extra).

The cache directory belongs to the caller. It must be private (0700, ours), because what lies there
is loaded into the device. A file's name says what made it:

    <variant>.<architecture>.<source hash>.<toolchain hash>.cubin

A machine whose toolchain is missing, or fails, can use a file made elsewhere from the same source;
otherwise both hashes must agree.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import inspect
import os
import re
import stat
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from kernels.cuda import fitted_ptx, instructions
from kernels.cuda import variant as variant_module
from kernels.cuda.errors import CacheDirectoryError, CompileError, MissingToolchainError
from kernels.cuda.fitted_ptx import fitted
from kernels.cuda.variant import Variant
from kernels.uncollected import uncollected

# PTX is made for this one, whatever it is assembled for: the kernels use nothing newer, and the
# slower half of a build is done once for all architectures.
LOWEST_CAPABILITY = (8, 0)

TOOLCHAIN_PACKAGES = (
    "numba",
    "numba-cuda",
    "llvmlite",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "nvidia-nvvm",
    "nvidia-nvjitlink",
)
COMPILER_LIBRARIES = ("nvvm", "nvrtc")
LINKER_LIBRARIES = ("nvJitLink",)

FOLLOWED = ("kernels.cuda.", "kernels.reference.")
"""Modules that shape machine code: the specification's constants are compiled in. What else kernels
import of ours, `kernels.interface`, names types for the type checker."""

_ENTRY = re.compile(r"\.visible \.entry (\S+?)\(")
_REGISTERS = re.compile(r"\bused (\d+) registers", re.IGNORECASE)
_SHARED = re.compile(r"(\d+) bytes smem")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """What one thread or block of the machine code takes, as the assembler reports it.

    `stack_bytes` is local memory in use: spilled registers, or an array that did not fit in them.
    """

    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int


def architecture(capability: tuple[int, int]) -> str:
    """Return the assembler's name of a compute capability: (9, 0) is sm_90."""
    major, minor = capability
    return f"sm_{major}{minor}"


def require_toolchain(libraries: Sequence[str] = COMPILER_LIBRARIES + LINKER_LIBRARIES) -> None:
    """Raise MissingToolchainError, naming the first part of the compiler that is absent."""
    try:
        import cuda.pathfinder as pathfinder
        import numba.cuda  # noqa: F401 - is it there?
        from cuda.bindings import nvjitlink  # noqa: F401
    except ImportError as error:
        raise MissingToolchainError(f"the Python package {error.name}") from error
    for library in libraries:
        try:
            pathfinder.load_nvidia_dynamic_lib(library)
        except pathfinder.DynamicLibNotFoundError as error:
            raise MissingToolchainError(f"the library {library}") from error


def toolchain_versions() -> dict[str, str]:
    """Return the version of each package of the compiler; "not a package" where it is no wheel."""
    versions = {}
    for package in TOOLCHAIN_PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not a package"
    return versions


def compile_ptx(variant: Variant, capability: tuple[int, int] = LOWEST_CAPABILITY) -> str:
    """Return the variant's PTX, its entry point named `variant.name`.

    `link` can assemble it for `capability` and all later ones.

    Raises MissingToolchainError, or CompileError where Numba refuses the source.
    """
    require_toolchain(COMPILER_LIBRARIES)
    from numba import cuda, types
    from numba.core.errors import NumbaError
    from numba.cuda.cudadrv.error import CCSupportError, NvvmError

    signature = types.void(*[_numba_type(types, argument) for argument in variant.arguments])
    try:
        with uncollected():
            ptx, _ = cuda.compile(
                variant.kernel(),
                signature,
                device=False,
                abi="numba",
                cc=capability,
                launch_bounds=_launch_bounds(variant),
            )
    except (NumbaError, NvvmError, CCSupportError, TypeError, AttributeError, ImportError) as error:
        # TypeError: a numba-cuda whose `compile` has other parameters. The last two: one that does
        # not go with its own libraries, such as a NumPy that has lost what it uses.
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CompileError(f"{variant.name} for {capability}: {first_line}") from error
    entries = _ENTRY.findall(ptx)
    if len(entries) != 1:
        raise CompileError(f"{variant.name}: expected one entry point in the PTX, got {entries}")
    return str(ptx).replace(entries[0], variant.name)


def link(name: str, ptx: str, capability: tuple[int, int]) -> tuple[bytes, ResourceUsage]:
    """Assemble PTX to machine code (a cubin) and say what it uses.

    Raises MissingToolchainError, or CompileError with the linker's log.
    """
    require_toolchain(LINKER_LIBRARIES)
    from cuda.bindings import nvjitlink

    arch = architecture(capability)
    try:
        handle = nvjitlink.create(2, [f"-arch={arch}", "-verbose"])
    except nvjitlink.nvJitLinkError as error:  # of an architecture that it does not know
        raise CompileError(f"{name} for {arch}: {error}") from error
    try:
        code = fitted(ptx, capability).encode()
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, code, len(code), name)
        nvjitlink.complete(handle)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, cubin)
        info = bytearray(nvjitlink.get_info_log_size(handle))
        nvjitlink.get_info_log(handle, info)
    except nvjitlink.nvJitLinkError as error:
        log = bytearray(nvjitlink.get_error_log_size(handle))
        nvjitlink.get_error_log(handle, log)
        raise CompileError(f"{name}: {error}: {_text(log)}") from error
    finally:
        nvjitlink.destroy(handle)
    return bytes(cubin), parse_usage(name, _text(info))


def parse_usage(name: str, log: str) -> ResourceUsage:
    """Read the assembler's `-v` report."""
    registers, shared, stack = (pattern.search(log) for pattern in (_REGISTERS, _SHARED, _STACK))
    if registers is None or stack is None:
        raise CompileError(f"{name}: no resource report in the linker's log: {log!r}")
    frame, stores, loads = (int(stack.group(i)) for i in (1, 2, 3))
    return ResourceUsage(
        registers=int(registers.group(1)),
        shared_bytes=int(shared.group(1)) if shared else 0,
        stack_bytes=frame,
        spill_bytes=stores + loads,
    )


def build(
    variant: Variant,
    capability: tuple[int, int],
    cache_dir: Path,
    *,
    progress: Callable[[str], None] | None = None,
) -> bytes:
    """Return the variant's machine code, from the cache if it is there.

    Where there is no compiler, or it fails, another machine's code of the same source will do.
    `progress` gets one line before each compilation. Raises CacheDirectoryError,
    MissingToolchainError or CompileError.
    """
    path = _cache_path(variant, capability, private_directory(cache_dir))
    if path.exists():
        return path.read_bytes()
    try:
        require_toolchain()
        if progress is not None:
            progress(f"compiling {variant.name} for {architecture(capability)}")
        cubin, _ = link(variant.name, compile_ptx(variant), capability)
    except (MissingToolchainError, CompileError):
        made_elsewhere = prebuilt(variant, capability, cache_dir)
        if made_elsewhere is None:
            raise
        return made_elsewhere
    write_whole(path, cubin)
    return cubin


def is_built(variant: Variant, capability: tuple[int, int], cache_dir: Path) -> bool:
    """Whether this machine's toolchain has built a variant into the cache."""
    return _cache_path(variant, capability, private_directory(cache_dir)).exists()


def prebuilt(variant: Variant, capability: tuple[int, int], cache_dir: Path) -> bytes | None:
    """Return machine code that some toolchain made from this very source; None if there is none."""
    directory = private_directory(cache_dir)
    for path in sorted(directory.glob(f"{_stem(variant, capability)}.*.cubin")):
        return path.read_bytes()
    return None


def store(variant: Variant, capability: tuple[int, int], cache_dir: Path, cubin: bytes) -> None:
    """Put machine code into the cache."""
    write_whole(_cache_path(variant, capability, private_directory(cache_dir)), cubin)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that appears complete or not at all, whoever else writes it."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    Path(file.name).replace(path)


def source_hash(variant: Variant) -> str:
    """Return the hash of everything of ours that shapes the machine code."""
    digest = hashlib.sha256(f"{variant!r} {variant.arguments} {variant.threads}".encode())
    package = Path(str(instructions.__file__)).parent
    kernel = _own_sources(Path(inspect.getfile(type(variant))))
    builder = {Path(str(module.__file__)) for module in (variant_module, fitted_ptx)}
    builder.add(Path(__file__))
    for source in sorted({*kernel, *package.glob("*.py"), *builder}):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def toolchain_hash() -> str:
    """Return the hash of the compiler's versions."""
    return hashlib.sha256(repr(sorted(toolchain_versions().items())).encode()).hexdigest()[:16]


def private_directory(path: Path) -> Path:
    """Return `path`, created if missing, once it is known that only we can write there.

    What it lies in is created as private, too: that may be a cache of others. Raises
    CacheDirectoryError.
    """
    path = path.expanduser()
    try:
        for parent in reversed(path.parents):
            if not parent.exists():
                parent.mkdir(mode=0o700, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise CacheDirectoryError(f"machine-code cache {path}: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise CacheDirectoryError(f"machine-code cache {path} must be a directory, not a link")
    if status.st_uid != os.getuid():
        raise CacheDirectoryError(
            f"machine-code cache {path} must belong to uid {os.getuid()}, not {status.st_uid}"
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise CacheDirectoryError(
            f"machine-code cache {path} must be private: mode 0700, not {mode:#o} "
            f"(chmod 700 {path})"
        )
    return path


def _launch_bounds(variant: Variant) -> tuple[int, ...]:
    blocks = variant.expectation.resident_blocks
    return (variant.threads,) if blocks is None else (variant.threads, blocks)


@functools.cache
def _own_sources(path: Path) -> frozenset[Path]:
    """Return a kernel's file and every file it imports of `FOLLOWED`, also by way of others."""
    root = Path(__file__).parents[2]
    seen, left = {path}, [path]
    while left:
        for statement in ast.walk(ast.parse(left.pop().read_text())):
            if not isinstance(statement, ast.ImportFrom) or statement.module is None:
                continue
            modules = [statement.module, *(f"{statement.module}.{x.name}" for x in statement.names)]
            for module in modules:
                file = root.joinpath(*module.split(".")).with_suffix(".py")
                if module.startswith(FOLLOWED) and file.exists() and file not in seen:
                    seen.add(file)
                    left.append(file)
    return frozenset(seen)


def _numba_type(types: ModuleType, argument: str) -> object:
    if argument.endswith("*"):
        return types.CPointer(getattr(types, argument[:-1]))
    return getattr(types, argument)


def _text(log: bytearray) -> str:
    return " ".join(log.decode(errors="replace").rstrip("\0").split())


def _stem(variant: Variant, capability: tuple[int, int]) -> str:
    return f"{variant.name}.{architecture(capability)}.{source_hash(variant)}"


def _cache_path(variant: Variant, capability: tuple[int, int], directory: Path) -> Path:
    return directory / f"{_stem(variant, capability)}.{toolchain_hash()}.cubin"
