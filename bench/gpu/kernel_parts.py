"""The parts of the report about kernels: are they right, and how fast are they."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bench.gpu.device import KernelLoader, milliseconds
from bench.gpu.findings import Findings, PartOptions
from kernels.cuda.operations import OPERATIONS
from kernels.cuda.variant import Variant


def numerics(found: Findings, options: PartOptions) -> None:
    """Build every variant, and check each against the exact answer."""
    from bench.gpu import decode_bandwidth, matmul_bandwidth, prefill_speed
    from bench.gpu.numerics import NumericsResult, check_variants
    from kernels.cuda.operations import all_variants

    loader = KernelLoader(options.cache_dir, found.say)
    variants = all_variants(every=not options.spread)
    measured: list[Variant] = [v for shape in decode_bandwidth.SHAPES for v in shape.variants]
    measured += [shape.variant for shape in prefill_speed.SHAPES]
    measured += [shape.variant for shape in matmul_bandwidth.SHAPES]
    loader.prepare(list(dict.fromkeys([*variants, *measured])))
    checked: list[dict[str, Any]] = []
    found.values["numerics"] = checked

    def note(result: NumericsResult) -> None:
        checked.append(asdict(result))
        found.failures += [f"{result.case}: {fault}" for fault in result.faults]
        found.save()

    check_variants(variants, loader.run_case, progress=note)
    for name in OPERATIONS:
        of_operation = [result for result in checked if result["case"].startswith(name)]
        errors = [error for result in of_operation for error in result["errors"].values()]
        largest = max(errors, default=0.0)
        found.say(f"numerics {name}: {len(of_operation)} cases, largest error {largest:.2e}")


def decode_attention(found: Findings, options: PartOptions) -> None:
    """Measure a device copy, and how fast decode attention reads the pool."""
    import torch

    from bench.gpu.decode_bandwidth import SHAPES, measure_copy, measure_decode
    from bench.gpu.provenance import describe_device

    loader = KernelLoader(options.cache_dir, found.say)
    found.values["copy"] = copy = measure_copy(milliseconds)
    found.values["decode_attention"] = results = []
    found.say(f"device copy           {copy['gb_per_s']:8.0f} GB/s read + written")
    multiprocessors = describe_device()["multiprocessors"]
    for shape in SHAPES:
        result = measure_decode(
            shape, loader.load, milliseconds, found.say, num_multiprocessors=multiprocessors
        )
        _note_kernels(found, loader, *shape.variants)
        result["fraction_of_copy"] = result["gb_per_s"] / copy["gb_per_s"]
        results.append(result)
        found.failures += [f"{shape.name}: {fault}" for fault in result["faults"]]
        found.say(
            f"{shape.name:<66} {result['gb_per_s']:6.0f} GB/s read, "
            f"{result['fraction_of_copy']:.2f} of the copy, {result['splits']} splits"
        )
        if shape.least_fraction is not None:
            fraction = result["fraction_of_copy"]
            found.target(f"{shape.name}, of the copy", fraction, at_least=shape.least_fraction)
        for rival, figures in result["rivals"].items():
            if "gb_per_s" in figures:
                found.say(f"    {rival:<62} {figures['gb_per_s']:6.0f} GB/s read")
        torch.cuda.empty_cache()


def prefill_attention(found: Findings, options: PartOptions) -> None:
    """Measure operations a second of prefill attention."""
    import torch

    from bench.gpu.prefill_speed import SHAPES, measure_prefill

    loader = KernelLoader(options.cache_dir, found.say)
    found.values["prefill_attention"] = results = []
    for shape in SHAPES:
        result = measure_prefill(shape, loader.load(shape.variant), milliseconds, found.say)
        _note_kernels(found, loader, shape.variant)
        results.append(result)
        found.failures += [f"{shape.name}: {fault}" for fault in result["faults"]]
        found.say(f"{shape.name:<66} {result['tflop_per_s']:6.0f} TFLOP/s")
        if shape.least_tflop_per_s is not None:
            speed = result["tflop_per_s"]
            found.target(f"{shape.name}, TFLOP/s", speed, at_least=shape.least_tflop_per_s)
        for rival, figures in result["rivals"].items():
            if "tflop_per_s" in figures:
                found.say(f"    {rival:<62} {figures['tflop_per_s']:6.0f} TFLOP/s")
        torch.cuda.empty_cache()


def quantized_matmul(found: Findings, options: PartOptions) -> None:
    """Measure products with quantised weights beside a device copy."""
    import torch

    from bench.gpu.decode_bandwidth import measure_copy
    from bench.gpu.matmul_bandwidth import SHAPES, measure_matmul
    from bench.gpu.matmul_rivals import RIVALS

    loader = KernelLoader(options.cache_dir, found.say)
    copy = measure_copy(milliseconds)
    found.values["quantized_matmul"] = results = []
    for shape in SHAPES:
        # The rivals' weights are their own, the same beside each of our formats: once is enough.
        rivals = RIVALS if shape.weights == SHAPES[0].weights else {}
        result = measure_matmul(shape, loader.load, milliseconds, found.say, rivals=rivals)
        _note_kernels(found, loader, shape.variant)
        result["fraction_of_copy"] = result["gb_per_s"] / copy["gb_per_s"]
        results.append(result)
        found.failures += [f"{shape.name}: {fault}" for fault in result["faults"]]
        found.say(
            f"{shape.name:<66} {result['gb_per_s']:6.0f} GB/s, "
            f"{result['fraction_of_copy']:.2f} of the copy, "
            f"{result['microseconds_per_product']:.1f} µs"
        )
        for rival, figures in result["rivals"].items():
            if "gb_per_s" in figures:
                microseconds = figures["microseconds_per_product"]
                found.say(f"    {rival:<62} {figures['gb_per_s']:6.0f} GB/s, {microseconds:.1f} µs")
        torch.cuda.empty_cache()


def _note_kernels(found: Findings, loader: KernelLoader, *variants: Variant) -> None:
    """Note what the device says of kernels, and who assembled them."""
    kernels = found.values.setdefault("kernels", {})
    for variant in variants:
        kernels[variant.name] = {
            **loader.load(variant).attributes(), "assembled_by": loader.made_by[variant.name],
        }  # fmt: skip
