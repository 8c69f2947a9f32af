"""The parts of the report about kernels: are they right, and how fast are they."""

from __future__ import annotations

import random
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from bench.gpu.device import KernelLoader, milliseconds
from bench.gpu.findings import Findings, PartOptions
from bench.gpu.one_by_one import one_by_one
from kernels.cuda.operations import OPERATIONS, operation_of
from kernels.cuda.variant import Variant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from bench.gpu.numerics import NumericsResult

AT_ONCE: Final = 64
"""Variants that are built together."""
RIVALS_S: Final = 15.0
"""What the rivals of one shape may take."""


def numerics(found: Findings, options: PartOptions) -> None:
    """Build and check a spread of the variants, and those that are measured or run a model."""
    from bench.gpu.needed_kernels import needed_variants
    from bench.gpu.numerics import check_variant

    loader = KernelLoader(options.machine_code, found.say, begins_early=True)
    variants = needed_variants()
    loader.prepare(variants[options.begin_at :])
    note = _Notes(found)

    def check(numbered: tuple[int, Variant]) -> None:
        check_variant(numbered[1], numbered[0], loader.run_case, note.of(numbered[1]))

    one_by_one(found, options, list(enumerate(variants)), lambda one: one[1].name, check)
    note.say_by_operation()


def every_variant(found: Findings, options: PartOptions) -> None:
    """Build and check all the other variants, as far as time goes."""
    from bench.gpu.cases import with_launched
    from bench.gpu.needed_kernels import needed_variants
    from bench.gpu.numerics import check_variant
    from kernels.cuda.operations import all_variants

    loader = KernelLoader(options.machine_code, found.say, begins_early=True)
    known = set(needed_variants())
    others = [variant for variant in all_variants(every=True) if variant not in known]
    # Operations have hundreds or one: those that time cuts off should be of all of them.
    random.Random(0).shuffle(others)
    note = _Notes(found)

    def build_some(number: int) -> None:
        first = number // AT_ONCE * AT_ONCE
        if number in (options.begin_at, first):
            loader.prepare(with_launched(others[number : first + AT_ONCE]))

    def check(numbered: tuple[int, Variant]) -> None:
        check_variant(numbered[1], numbered[0], loader.run_case, note.of(numbered[1]))

    numbered = list(enumerate(others))
    one_by_one(found, options, numbered, lambda one: one[1].name, check, build_some)
    note.say_by_operation()
    checked = len(others) if found.go_on_at is None else found.go_on_at
    found.say(f"{checked} of {len(others)} other variants were checked")


class _Notes:
    """Puts each checked case into the report."""

    def __init__(self, found: Findings) -> None:
        self._found = found
        self._checked: list[dict[str, Any]] = []
        self._by_operation: dict[str, list[NumericsResult]] = {name: [] for name in OPERATIONS}
        found.values["numerics"] = self._checked

    def of(self, variant: Variant) -> Callable[[NumericsResult], None]:
        """Return what takes the results of a variant's cases."""
        of_operation = self._by_operation[operation_of(variant)]

        def note(result: NumericsResult) -> None:
            of_operation.append(result)
            self._checked.append(asdict(result))
            self._found.failures += [f"{result.case}: {fault}" for fault in result.faults]
            self._found.save()

        return note

    def say_by_operation(self) -> None:
        for name, of_operation in self._by_operation.items():
            errors = [error for one in of_operation for error in one.errors.values()]
            largest = max(errors, default=0.0)
            count = len(of_operation)
            self._found.say(f"numerics {name}: {count} cases, largest error {largest:.2e}")


def decode_attention(found: Findings, options: PartOptions) -> None:
    """Measure a device copy, and how fast decode attention reads the pool; then others'."""
    import torch

    from bench.gpu.decode_bandwidth import (
        SHAPES,
        AnyShape,
        Problem,
        measure_copy,
        measure_decode,
        measure_rivals,
    )

    loader = KernelLoader(options.machine_code, found.say)
    loader.prepare([variant for shape in SHAPES for variant in shape.variants])
    found.values["copy"] = copy = measure_copy(milliseconds)
    found.values["decode_attention"] = results = []
    found.say(f"device copy           {copy['gb_per_s']:8.0f} GB/s read + written")
    multiprocessors = torch.cuda.get_device_properties("cuda").multi_processor_count
    measured: list[tuple[AnyShape, dict[str, Any]]] = []

    def measure(shape: AnyShape) -> None:
        torch.cuda.empty_cache()
        result = measure_decode(
            shape,
            loader.load,
            milliseconds,
            found.say,
            num_multiprocessors=multiprocessors,
            rivals={},
        )
        _note_kernels(found, loader, *shape.variants)
        result["fraction_of_copy"] = result["gb_per_s"] / copy["gb_per_s"]
        results.append(result)
        if shape.has_rivals:
            measured.append((shape, result))
        found.failures += [f"{shape.name}: {fault}" for fault in result["faults"]]
        found.say(
            f"{shape.name:<66} {result['gb_per_s']:6.0f} GB/s read, "
            f"{result['fraction_of_copy']:.2f} of the copy, "
            f"{result['split_rows']} rows in {result['splits']} splits"
        )
        if shape.least_fraction is not None:
            fraction = result["fraction_of_copy"]
            found.target(f"{shape.name}, of the copy", fraction, at_least=shape.least_fraction)

    one_by_one(found, options, SHAPES, lambda shape: shape.name, measure)
    _measure_rivals(
        found,
        options,
        measured,
        lambda shape: measure_rivals(Problem(shape, "cuda"), milliseconds, found.say),
        ("gb_per_s", "GB/s read"),
    )


def prefill_attention(found: Findings, options: PartOptions) -> None:
    """Measure operations a second of prefill attention; then others'."""
    import torch

    from bench.gpu.prefill_speed import (
        SHAPES,
        AnyShape,
        Problem,
        measure_prefill,
        measure_rivals,
    )

    loader = KernelLoader(options.machine_code, found.say)
    loader.prepare([shape.variant for shape in SHAPES])
    found.values["prefill_attention"] = results = []
    measured: list[tuple[AnyShape, dict[str, Any]]] = []

    def measure(shape: AnyShape) -> None:
        torch.cuda.empty_cache()
        kernel = loader.load(shape.variant)
        result = measure_prefill(shape, kernel, milliseconds, found.say, rivals={})
        _note_kernels(found, loader, shape.variant)
        results.append(result)
        if shape.has_rivals:
            measured.append((shape, result))
        found.failures += [f"{shape.name}: {fault}" for fault in result["faults"]]
        found.say(f"{shape.name:<66} {result['tflop_per_s']:6.0f} TFLOP/s")
        if shape.least_tflop_per_s is not None:
            speed = result["tflop_per_s"]
            found.target(f"{shape.name}, TFLOP/s", speed, at_least=shape.least_tflop_per_s)

    one_by_one(found, options, SHAPES, lambda shape: shape.name, measure)
    _measure_rivals(
        found,
        options,
        measured,
        lambda shape: measure_rivals(Problem(shape, "cuda"), milliseconds, found.say),
        ("tflop_per_s", "TFLOP/s"),
    )


def _measure_rivals(
    found: Findings,
    options: PartOptions,
    shapes: Iterable[tuple[Any, dict[str, Any]]],
    measure: Callable[[Any], dict[str, Any]],
    figure: tuple[str, str],
) -> None:
    """Put what others do into the results of our shapes, as long as there is time.

    `figure`: its key in what `measure` returns of a rival, and its unit. Others come last because
    their libraries compile for each shape anew.
    """
    import torch

    if not options.has_rivals:
        return
    key, unit = figure
    for shape, result in shapes:
        if time.monotonic() + RIVALS_S >= options.ends:
            found.say("no time was left for others on the remaining shapes")
            return
        found.begin(f"{shape.name}, others")
        found.say(f"{found.doing}:")
        result["rivals"] = measure(shape)
        for rival, figures in result["rivals"].items():
            if key in figures:
                found.say(f"    {rival:<62} {figures[key]:6.0f} {unit}")
        torch.cuda.empty_cache()


def quantized_matmul(found: Findings, options: PartOptions) -> None:
    """Measure products with quantised weights beside a device copy."""
    import torch

    from bench.gpu.decode_bandwidth import measure_copy
    from bench.gpu.matmul_bandwidth import SHAPES, MatmulShape, measure_matmul
    from bench.gpu.matmul_rivals import RIVALS

    loader = KernelLoader(options.machine_code, found.say)
    loader.prepare([shape.variant for shape in SHAPES])
    copy = measure_copy(milliseconds)
    found.values["quantized_matmul"] = results = []

    def measure(shape: MatmulShape) -> None:
        torch.cuda.empty_cache()
        # The rivals' weights are their own, the same beside each of our formats: once is enough.
        is_wanted = options.has_rivals and shape.weights == SHAPES[0].weights
        rivals = RIVALS if is_wanted else {}
        result = measure_matmul(shape, loader.load, milliseconds, found.say, rivals=rivals)
        _note_kernels(found, loader, shape.variant)
        result["fraction_of_copy"] = result["gb_per_s"] / copy["gb_per_s"]
        results.append(result)
        _say_of_product(found, shape.name, result)

    one_by_one(found, options, SHAPES, lambda shape: shape.name, measure)


def experts(found: Findings, options: PartOptions) -> None:
    """Measure mixtures of experts beside a device copy, and torch's products of groups.

    Their launches begin early, as a step's do, and must give the bits that they give in turn.
    """
    import torch

    from bench.gpu.decode_bandwidth import measure_copy
    from bench.gpu.expert_speed import SHAPES, ExpertShape, measure_experts
    from compute_plane.cuda.launchers import CudaLauncher

    device = torch.device("cuda", torch.cuda.current_device())
    launcher, late = (CudaLauncher(device, options.machine_code) for _ in range(2))
    copy = measure_copy(milliseconds)
    found.values["experts"] = results = []

    def measure(shape: ExpertShape) -> None:
        torch.cuda.empty_cache()
        result = measure_experts(
            shape, launcher, milliseconds, late=late, has_rivals=options.has_rivals
        )
        result["fraction_of_copy"] = result["gb_per_s"] / copy["gb_per_s"]
        results.append(result)
        found.failures += [f"{shape.name}: {fault}" for fault in result["faults"]]
        others = "".join(
            f", {name} {figures['microseconds_per_layer']:.1f}"
            for name, figures in result["rivals"].items()
        )
        found.say(
            f"{shape.name:<66} {result['microseconds_per_layer']:6.1f} µs a layer{others}, "
            f"{result['gb_per_s']:6.0f} GB/s, {result['fraction_of_copy']:.2f} of the copy"
        )

    one_by_one(found, options, SHAPES, lambda shape: shape.name, measure)


def dense_matmul(found: Findings, options: PartOptions) -> None:
    """Measure products of few rows with dense weights beside a device copy, and what they replace.

    The same matrices for all: torch's product of the same rows, and the launches of a layer.
    """
    import torch

    from bench.gpu.decode_bandwidth import measure_copy
    from bench.gpu.dense_bandwidth import (
        OWN_LAUNCHES,
        RIVALS,
        SHAPES,
        DenseShape,
        measure_dense,
    )

    loader = KernelLoader(options.machine_code, found.say)
    loader.prepare([one for shape in SHAPES for one in (shape.variant, *shape.variants_apart)])
    copy = measure_copy(milliseconds)
    found.values["dense_matmul"] = results = []

    def measure(shape: DenseShape) -> None:
        torch.cuda.empty_cache()
        rivals = RIVALS if options.has_rivals else OWN_LAUNCHES
        result = measure_dense(shape, loader.load, milliseconds, rivals=rivals)
        _note_kernels(found, loader, shape.variant)
        for figures in (result, *result["rivals"].values()):
            figures["fraction_of_copy"] = figures["gb_per_s"] / copy["gb_per_s"]
        results.append(result)
        _say_of_product(found, shape.name, result)

    one_by_one(found, options, SHAPES, lambda shape: shape.name, measure)


def _say_of_product(found: Findings, name: str, result: dict[str, Any]) -> None:
    """Say how fast a product is and its rivals are; its faults are the report's."""
    found.failures += [f"{name}: {fault}" for fault in result["faults"]]
    found.say(
        f"{name:<66} {result['gb_per_s']:6.0f} GB/s, "
        f"{result['fraction_of_copy']:.2f} of the copy, "
        f"{result['microseconds_per_product']:.1f} µs"
    )
    for rival, figures in result["rivals"].items():
        if "gb_per_s" in figures:
            microseconds = figures["microseconds_per_product"]
            found.say(f"    {rival:<62} {figures['gb_per_s']:6.0f} GB/s, {microseconds:.1f} µs")


def _note_kernels(found: Findings, loader: KernelLoader, *variants: Variant) -> None:
    """Note what the device says of kernels, and who assembled them."""
    kernels = found.values.setdefault("kernels", {})
    for variant in variants:
        kernels[variant.name] = {
            **loader.load(variant).attributes(), "assembled_by": loader.made_by[variant.name],
        }  # fmt: skip
