"""The part of the report about layers with states, and launches that few architectures have."""

from __future__ import annotations

from typing import Any, TypeAlias

from bench.gpu import recurrence_speed, small_launches
from bench.gpu.device import milliseconds
from bench.gpu.findings import Findings, PartOptions
from bench.gpu.one_by_one import one_by_one
from bench.gpu.recurrence_speed import RecurrenceShape, measure_recurrence
from bench.gpu.small_launches import CopyShape, SmallShape, measure_copies, measure_launch

Shape: TypeAlias = RecurrenceShape | SmallShape | CopyShape


def recurrences(found: Findings, options: PartOptions) -> None:
    """Measure layers with states beside a device copy, then small launches and copies of states.

    Their launches begin early, as a step's do; layers must give the bits that they give in turn.
    """
    import torch

    from bench.gpu.decode_bandwidth import measure_copy
    from compute_plane.cuda.launchers import CudaLauncher

    device = torch.device("cuda", torch.cuda.current_device())
    launcher, late = (CudaLauncher(device, options.machine_code) for _ in range(2))
    copy = measure_copy(milliseconds)
    layers: list[dict[str, Any]] = []
    small: list[dict[str, Any]] = []
    found.values |= {"recurrences": layers, "small_launches": small}

    def measure(shape: Shape) -> None:
        torch.cuda.empty_cache()
        if isinstance(shape, RecurrenceShape):
            result = measure_recurrence(shape, launcher, milliseconds, late=late)
            layers.append(result)
            found.failures += [f"{shape.name}: {fault}" for fault in result["faults"]]
        elif isinstance(shape, SmallShape):
            result = measure_launch(shape, launcher, milliseconds)
            small.append(result)
        else:
            result = measure_copies(shape, milliseconds)
            small.append(result)
        result["fraction_of_copy"] = result["gb_per_s"] / copy["gb_per_s"]
        found.say(
            f"{shape.name:<44} {result['microseconds']:9.2f} µs, {result['gb_per_s']:6.0f} GB/s, "
            f"{result['fraction_of_copy']:.2f} of the copy"
        )

    shapes: tuple[Shape, ...] = (
        *recurrence_speed.SHAPES,
        *small_launches.SHAPES,
        *small_launches.COPIES,
    )
    one_by_one(found, options, shapes, lambda shape: shape.name, measure)
