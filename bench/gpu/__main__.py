"""Check and measure the CUDA kernels on this GPU: `python -m bench.gpu --out report.json`.

Exit code 0: everything right; 1: a kernel is wrong or could not be built; 2: no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.gpu.device import KernelLoader, milliseconds, why_no_device
from kernels.cuda.build import DEFAULT_CACHE_DIR
from kernels.cuda.errors import CudaKernelError
from kernels.cuda.operations import OPERATIONS
from kernels.cuda.variant import Variant

REPORT_VERSION = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and return the exit code."""
    options = _parse(arguments)
    reason = why_no_device()
    if reason is not None:
        print(f"no CUDA device: {reason}", file=sys.stderr)
        return 2
    started = time.perf_counter()
    report = _begin_report()
    try:
        _fill_report(report, options)
    except CudaKernelError as error:
        report["failures"].append(f"{type(error).__name__}: {error}")
    report["seconds"] = time.perf_counter() - started
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    for failure in report["failures"]:
        print(f"FAULT: {failure}")
    print(f"report: {options.out}, {report['seconds']:.0f} s, {len(report['failures'])} faults")
    return 1 if report["failures"] else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the JSON report")
    parser.add_argument(
        "--cache-dir",
        type=Path,
        default=DEFAULT_CACHE_DIR,
        help="machine-code cache; may hold code from `kernels.cuda.check --save`",
    )
    parser.add_argument(
        "--spread", action="store_true", help="check a spread of the variants, not every one"
    )
    return parser.parse_args(arguments)


def _begin_report() -> dict[str, Any]:
    from bench.gpu.provenance import describe_commit, describe_device, describe_software

    return {
        "report_version": REPORT_VERSION,
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([sys.executable, *sys.orig_argv[1:]]),
        **describe_commit(),
        "device": describe_device(),
        "software": describe_software(),
        "kernels": {},
        "numerics": [],
        "copy": None,
        "decode_attention": [],
        "prefill_attention": [],
        "quantized_matmul": [],
        "failures": [],
    }


def _fill_report(report: dict[str, Any], options: argparse.Namespace) -> None:
    from bench.gpu import matmul_bandwidth, prefill_speed
    from bench.gpu.decode_bandwidth import SHAPES
    from kernels.cuda.operations import all_variants

    print(f"{report['device']['name']}, capability {report['device']['capability']}")
    loader = KernelLoader(options.cache_dir, print)
    variants = all_variants(every=not options.spread)
    measured: list[Variant] = [variant for shape in SHAPES for variant in shape.variants]
    measured += [shape.variant for shape in prefill_speed.SHAPES]
    measured += [shape.variant for shape in matmul_bandwidth.SHAPES]
    loader.prepare(list(dict.fromkeys([*variants, *measured])))
    _check_numerics(report, loader, variants)
    _measure_bandwidth(report, loader)
    _measure_prefill(report, loader)
    _measure_matmul(report, loader)


def _check_numerics(report: dict[str, Any], loader: KernelLoader, variants: Sequence[Any]) -> None:
    from bench.gpu.numerics import check_variants

    results = check_variants(variants, loader.run_case)
    report["numerics"] = [asdict(result) for result in results]
    for result in results:
        report["failures"] += [f"{result.case}: {fault}" for fault in result.faults]
    for name in OPERATIONS:
        of_operation = [result for result in results if result.case.startswith(name)]
        errors = [error for result in of_operation for error in result.errors.values()]
        largest = max(errors, default=0.0)
        print(f"numerics {name}: {len(of_operation)} cases, largest error {largest:.2e}")


def _measure_bandwidth(report: dict[str, Any], loader: KernelLoader) -> None:
    import torch

    from bench.gpu.decode_bandwidth import SHAPES, measure_copy, measure_decode

    report["copy"] = copy = measure_copy(milliseconds)
    print(f"device copy           {copy['gb_per_s']:8.0f} GB/s read + written")
    multiprocessors = report["device"]["multiprocessors"]
    for shape in SHAPES:
        result = measure_decode(
            shape, loader.load, milliseconds, print, num_multiprocessors=multiprocessors
        )
        for variant in shape.variants:
            report["kernels"][variant.name] = {
                **loader.load(variant).attributes(), "assembled_by": loader.made_by[variant.name],
            }  # fmt: skip
        result["fraction_of_copy"] = result["gb_per_s"] / copy["gb_per_s"]
        report["decode_attention"].append(result)
        report["failures"] += [f"{shape.name}: {fault}" for fault in result["faults"]]
        print(
            f"{shape.name:<66} {result['gb_per_s']:6.0f} GB/s read, "
            f"{result['fraction_of_copy']:.2f} of the copy, {result['splits']} splits"
        )
        for rival, figures in result["rivals"].items():
            if "gb_per_s" in figures:
                print(f"    {rival:<62} {figures['gb_per_s']:6.0f} GB/s read")
        torch.cuda.empty_cache()


def _measure_prefill(report: dict[str, Any], loader: KernelLoader) -> None:
    import torch

    from bench.gpu.prefill_speed import SHAPES, measure_prefill

    for shape in SHAPES:
        kernel = loader.load(shape.variant)
        report["kernels"][shape.variant.name] = {
            **kernel.attributes(), "assembled_by": loader.made_by[shape.variant.name],
        }  # fmt: skip
        result = measure_prefill(shape, kernel, milliseconds, print)
        report["prefill_attention"].append(result)
        report["failures"] += [f"{shape.name}: {fault}" for fault in result["faults"]]
        print(f"{shape.name:<66} {result['tflop_per_s']:6.0f} TFLOP/s")
        for rival, figures in result["rivals"].items():
            if "tflop_per_s" in figures:
                print(f"    {rival:<62} {figures['tflop_per_s']:6.0f} TFLOP/s")
        torch.cuda.empty_cache()


def _measure_matmul(report: dict[str, Any], loader: KernelLoader) -> None:
    import torch

    from bench.gpu.matmul_bandwidth import SHAPES, measure_matmul
    from bench.gpu.matmul_rivals import RIVALS

    for shape in SHAPES:
        report["kernels"][shape.variant.name] = {
            **loader.load(shape.variant).attributes(),
            "assembled_by": loader.made_by[shape.variant.name],
        }
        # The rivals' weights are their own, the same beside each of our formats: once is enough.
        rivals = RIVALS if shape.weights == SHAPES[0].weights else {}
        result = measure_matmul(shape, loader.load, milliseconds, print, rivals=rivals)
        result["fraction_of_copy"] = result["gb_per_s"] / report["copy"]["gb_per_s"]
        report["quantized_matmul"].append(result)
        report["failures"] += [f"{shape.name}: {fault}" for fault in result["faults"]]
        print(
            f"{shape.name:<66} {result['gb_per_s']:6.0f} GB/s, "
            f"{result['fraction_of_copy']:.2f} of the copy, "
            f"{result['microseconds_per_product']:.1f} µs"
        )
        for rival, figures in result["rivals"].items():
            if "gb_per_s" in figures:
                microseconds = figures["microseconds_per_product"]
                print(f"    {rival:<62} {figures['gb_per_s']:6.0f} GB/s, {microseconds:.1f} µs")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
