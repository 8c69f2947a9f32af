"""Which kernels the report needs, and building them where there is no GPU.

`python -m bench.gpu.needed_kernels DIR` compiles them for sm_90 (`--for 8.0`: for another). A GPU's
minutes are not spent on the compiler then: `make gpu GPU_ARGS="--prebuilt DIR"` takes them over, of
the very same sources.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench.gpu import (
    architecture_shapes,
    decode_bandwidth,
    dense_bandwidth,
    expected_logits,
    expert_speed,
    matmul_bandwidth,
    prefill_speed,
    recurrence_speed,
    small_launches,
)
from bench.gpu.architectures import Runs
from bench.gpu.cases import with_launched
from bench.gpu.drawn_models import drawn_model
from bench.gpu.findings import line_of
from bench.gpu.model_kernels import Nowhere, kernels_of
from bench.gpu.random_model import EIGHT_BILLION, ONE_BILLION
from compute_plane.config import ComputePlaneConfig
from compute_plane.cuda.kernel_operations import KernelOperations
from compute_plane.model.errors import ModelReferenceError
from compute_plane.model.loader import load_model
from kernels.cuda import build
from kernels.cuda.build_ahead import build_ahead
from kernels.cuda.check import capability
from kernels.cuda.errors import CudaKernelError
from kernels.cuda.operations import all_variants

if TYPE_CHECKING:
    from bench.gpu.architecture_shapes import Architecture
    from compute_plane.executor.interface import Float32Array
    from kernels.cuda.variant import Variant

BLOCK_SIZE: Final = 16
SUITES: Final = "tests.gpu.kernels_of_suites"


def needed_variants() -> list[Variant]:
    """Return the spread of every operation, what is measured, and what the models run on.

    What is launched beside one of them where it is checked is among them.
    """
    measured = [
        *(variant for shape in decode_bandwidth.SHAPES for variant in shape.variants),
        *(shape.variant for shape in prefill_speed.SHAPES),
        *(shape.variant for shape in matmul_bandwidth.SHAPES),
        *(shape.variant for shape in dense_bandwidth.SHAPES),
        *(variant for shape in dense_bandwidth.SHAPES for variant in shape.variants_apart),
        *(one for shape in expert_speed.SHAPES for one in shape.operations(Nowhere()).variants),
        *(one for shape in recurrence_speed.SHAPES for one in shape.kernels(Nowhere()).variants),
        *small_launches.VARIANTS.values(),
    ]
    return with_launched([*all_variants(every=False), *measured, *_of_models()])


def built_variants() -> list[Variant]:
    """Return those and what `architectures` run on, which are checked as wholes: all it needs."""
    return list(dict.fromkeys([*needed_variants(), *_of_architectures()]))


def missing_variants(wanted: tuple[int, int], directory: Path) -> list[Variant]:
    """Return those of them that a cache does not have for a compute capability."""
    return [one for one in built_variants() if not build.is_built(one, wanted, directory)]


def _of_models() -> Iterator[Variant]:
    """Yield the kernels of the measured models and, where it is installed, of the embedded one."""
    for shape in (ONE_BILLION, EIGHT_BILLION):
        yield from KernelOperations(Nowhere(), shape.spec(), "bfloat16", BLOCK_SIZE).variants
    try:
        embedded = load_model("default")
    except ModelReferenceError:
        return
    for dtype, configured in (("float32", "float32"), ("bfloat16", "auto")):
        yield from kernels_of(embedded, dtype, BLOCK_SIZE, configured=configured)


def _of_architectures() -> Iterator[Variant]:
    for shape in architecture_shapes.SHAPES:
        yield from kernels_of(drawn_model(shape.spec, shape.formats), "bfloat16", BLOCK_SIZE)


def of_suites() -> list[Variant]:
    """Return the kernels of the suites' small models; none, and that is said, without the tests.

    Each process of a suite would wait for the compiler. What these models are is the tests' to say.
    """
    try:
        variants: list[Variant] = importlib.import_module(SUITES).variants()
    except ImportError as error:
        _say(f"kernels of the suites' models are not built: {line_of(error)}")
        return []
    return variants


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.needed_kernels",
        description="Compile the kernels that the report needs, for a machine with a GPU.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="made if it is not there")
    parser.add_argument(
        "--for", dest="capability", type=capability, default=(9, 0), metavar="CAPABILITY",
        help="compute capability, like 8.9 (default: 9.0)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    variants = list(dict.fromkeys([*built_variants(), *of_suites()]))
    try:
        build.require_toolchain()
        build_ahead(variants, options.capability, options.directory, progress=_say)
        for variant in variants:
            build.build(variant, options.capability, options.directory, progress=_say)
    except CudaKernelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    _say(f"{len(variants)} kernels in {options.directory}")
    _write_expected(options.directory)
    return 0


def _write_expected(directory: Path) -> None:
    """Write what is expected of the tiny models beside the kernels that they run on."""
    runs = Runs(ComputePlaneConfig().kernel_cache_root)

    def answer(shape: Architecture) -> list[Float32Array]:
        return runs.expected(drawn_model(shape.spec, shape.formats))

    expected_logits.write(directory, architecture_shapes.SHAPES, answer)
    _say(f"logits of {len(architecture_shapes.SHAPES)} models in {directory}")


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
