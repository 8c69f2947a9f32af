"""FlashInfer with its kernels compiled ahead, for a GPU machine without `nvcc` or minutes for it.

FlashInfer compiles what it is asked for when it is asked. `add_to` gives the package in a bundle's
`site` the modules that the report's rivals load, where FlashInfer itself looks for such as came
with it (`data/aot`), and takes the headers away that it would compile them from. That takes a C++
compiler here, CUDA's compiler from wheels, and ten to twenty minutes of two cores.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from bench.gpu.bundled_packages import pip_command

PACKAGE: Final = "flashinfer-python"
VERSION: Final = "0.5.3"
"""Whose decode attention has run beside ours, with torch 2.11."""
AT_RUN_TIME: Final = {
    PACKAGE: VERSION,
    "apache-tvm-ffi": "0.1.9",
    "nvidia-ml-py": "13.580.82",
    "requests": "2.32.5",
    "tqdm": "4.67.1",
}
"""What importing it takes beside torch and what torch brings."""
COMPILER: Final = {
    "nvidia-cuda-nvcc": "13.0.88",
    "nvidia-cuda-crt": "13.0.88",
    "nvidia-nvvm": "13.0.88",
    "nvidia-cuda-runtime": "13.0.96",
    "nvidia-cuda-cccl": "13.0.85",
    "nvidia-curand": "10.4.0.35",
    "ninja": "1.13.0",
}
HEAD_SIZE: Final = 128
"""Of the shapes that the report has targets for, all in bfloat16."""
SOURCES: Final = ("cutlass", "include", "spdlog")
"""Of the package's data, what only the compiler reads. Templates in `csrc` are filled in even where
what they would become is there."""

Run = Callable[..., object]


def add_to(site: Path, capability: str, temporary: Path, *, run: Run = subprocess.run) -> None:
    """Compile into the `flashinfer` that has been installed in `site`.

    `capability`: of the GPU, like "9.0". Raises CalledProcessError and OSError, also where nothing
    is found of what was compiled.
    """
    tools, workspace = temporary / "tools", temporary / "workspace"
    run(pip_command(tools, {**AT_RUN_TIME, **COMPILER}), check=True)
    variables = {
        "CUDA_HOME": _toolkit(tools / "nvidia" / "cu13", run),
        "FLASHINFER_CUDA_ARCH_LIST": architecture(capability),
        "FLASHINFER_WORKSPACE_BASE": workspace,
        "PYTHONPATH": f"{tools}:{Path(__file__).parents[2]}",
    }
    command = [
        "sh", "-c", 'PATH="$0:$PATH" exec "$@"', str(tools / "bin"),
        "env", "-u", "FLASHINFER_DISABLE_JIT",
        *(f"{name}={value}" for name, value in variables.items()),
        sys.executable, "-m", "bench.gpu.flashinfer_modules",
    ]  # fmt: skip
    run(command, check=True)
    data = site / "flashinfer" / "data"
    modules = sorted(workspace.glob(f".cache/flashinfer/{VERSION}/*/cached_ops/*/*.so"))
    if not modules:  # and with no compiler there it would not be noticed before minutes are spent
        raise FileNotFoundError(f"FlashInfer {VERSION} left no modules in its workspace")
    for module in modules:
        place = data / "aot" / module.stem
        place.mkdir(parents=True)
        shutil.copy2(module, place)
    for name in SOURCES:
        shutil.rmtree(data / name)


def architecture(capability: str) -> str:
    """Return FlashInfer's name of a compute capability: from 9.0 on that of one device alone."""
    major = int(capability.partition(".")[0])
    return f"{capability}a" if major >= 9 else capability


def specifications() -> list[Any]:
    """Return what FlashInfer compiles for the rivals, as it names and configures them itself.

    Decode of four query heads a group and more goes through `fa2`'s prompts; prompts through
    `fa3`'s where there is that. Pages are looked up by a module of their own.
    """
    import torch

    jit = importlib.import_module("flashinfer.jit")
    page = importlib.import_module("flashinfer.jit.page")
    majors = {major for major, _ in jit.core.current_compilation_context.TARGET_CUDA_ARCHS}
    backends = ("fa2", "fa3") if 9 in majors else ("fa2",)
    dtype, indices = torch.bfloat16, torch.int32
    return [
        page.gen_page_module(),
        *(
            jit.gen_batch_prefill_module(
                backend, dtype, dtype, dtype, indices, HEAD_SIZE, HEAD_SIZE,
                pos_encoding_mode=0, use_sliding_window=False,
                use_logits_soft_cap=False, use_fp16_qk_reduction=False,
            )
            for backend in backends
        ),
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile where FlashInfer keeps what it compiles; the exit code. `add_to` runs this."""
    argparse.ArgumentParser(
        prog="python -m bench.gpu.flashinfer_modules", description=main.__doc__
    ).parse_args(arguments)
    specs = specifications()
    print(f"compiling {', '.join(spec.name for spec in specs)} …", flush=True)
    importlib.import_module("flashinfer.jit.core").build_jit_specs(specs)
    return 0


def _toolkit(directory: Path, run: Run) -> Path:
    """Make of the wheels' folder what a toolkit's looks like to FlashInfer's linker flags.

    The driver's library is on no machine without a GPU: an empty one of its name lets the linker
    note that it is wanted.
    """
    (directory / "lib64").symlink_to("lib")
    (directory / "lib" / "libcudart.so").symlink_to("libcudart.so.13")
    stubs = directory / "lib" / "stubs"
    stubs.mkdir()
    empty = ["cc", "-shared", "-o", str(stubs / "libcuda.so"), "-Wl,-soname,libcuda.so.1"]
    run([*empty, "-x", "c", os.devnull], check=True)
    return directory


if __name__ == "__main__":
    sys.exit(main())
