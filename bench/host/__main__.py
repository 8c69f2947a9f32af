"""Measure what steps of the CUDA executor cost this machine: `python -m bench.host`.

Without `--step-us`: the processor time of each stage of a decode step. With it: both planes and a
client, on a device that takes so long for a step. With `--layers`: of steps that no graph holds, as
those with prompts or with structured outputs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from bench.gpu.random_model import LlamaShape, write_model
from bench.host.played_device import PlayedDriver, build_played
from bench.host.serving import Serving, measure_serving
from bench.host.stages import COMPUTE, CONTROL, STAGES, StageRun, StageWork
from compute_plane.app import ComputePlane
from compute_plane.config import ComputePlaneConfig
from compute_plane.executor.batch_checks import SlotLimits
from compute_plane.executor.interface import PipelinedExecutor
from compute_plane.executor.registry import BuiltExecutor, ExecutorContext
from planes.logs import configure_logging

BLOCK_SIZE: Final = 16
SHAPE: Final = LlamaShape("host-only", 320, 1, 4, 2, 256, 256, 8192)
"""One small layer: what there is of the model is not measured, and must not be waited for."""
THIN_SHAPE: Final = LlamaShape("host-only-thin", 320, 0, 1, 1, 64, 64, 8192)
"""Of `--layers`, in float32: the products, which this machine makes, are to be small, and quick."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write `--out` if it is given."""
    given = _parse(arguments)
    configure_logging(plane="bench", level="warning", log_format="auto")
    with tempfile.TemporaryDirectory() as directory:
        shape = SHAPE if given.layers is None else replace(THIN_SHAPE, num_layers=given.layers)
        model = write_model(shape, Path(directory) / "model")
        results = _stages(model, given) if given.step_us is None else _serving(model, given)
    if given.out is not None:
        given.out.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.host", description=__doc__)
    parser.add_argument("--rows", help="of a step, or streams: numbers with commas between them")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a row, stages only")
    parser.add_argument("--steps", type=int, help="decode steps of a run")
    parser.add_argument("--temperature", type=float, default=0.0, help="stages only")
    parser.add_argument("--asking", type=int, help="rows that ask for what follows; default: all")
    parser.add_argument("--penalty", type=float, default=1.0, help="of repetition, stages only")
    parser.add_argument("--biases", type=int, default=0, help="tokens of a bias, stages only")
    parser.add_argument("--logprobs", type=int, help="most likely tokens listed, stages only")
    parser.add_argument(
        "--waiting", type=int, default=0,
        help="sequences that a step has no room for: so many of its rows are others in the next; "
        "stages only",
    )  # fmt: skip
    parser.add_argument(
        "--layers", type=int,
        help="launch the kernels of so many layers one by one; default: a graph; stages only",
    )  # fmt: skip
    parser.add_argument("--step-us", type=float, help="microseconds that the device takes a step")
    parser.add_argument(
        "--wake-us", type=float, default=0.0,
        help="with --step-us: microseconds by which the device is late to wake who waits for it",
    )  # fmt: skip
    parser.add_argument("--repeat", type=int, default=3, help="runs with --step-us")
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    return parser.parse_args(arguments)


def _levels(text: str | None, default: Sequence[int]) -> Sequence[int]:
    return default if text is None else [int(word) for word in text.split(",")]


def _stages(model: Path, given: argparse.Namespace) -> list[dict[str, Any]]:
    results = []
    for rows in _levels(given.rows, (1, 32, 128, 256)):
        work = StageWork(
            rows,
            given.context,
            given.steps or 320,
            given.temperature,
            num_asking=rows + given.waiting if given.asking is None else given.asking,
            penalty=given.penalty,
            num_biases=given.biases,
            num_logprobs=given.logprobs,
            num_waiting=given.waiting,
        )
        played = played_executor(model, work, has_graphs=given.layers is None)
        with played as (executor, driver, limits):
            result = StageRun(executor, driver, limits, work).measure()
        results.append(result)
        times = result["medians_us"]
        sums = [sum(times[stage] for stage in stages) for stages in (COMPUTE, CONTROL)]
        print(f"{rows} rows, median µs: compute plane {sums[0]:.0f}, control plane {sums[1]:.0f}")
        print("    " + ", ".join(f"{stage} {times[stage]:.0f}" for stage in STAGES))
        calls = result["calls_of_a_step"].items()
        print("    " + ", ".join(f"{name} {count:.2f}" for name, count in calls))
    return results


def _serving(model: Path, given: argparse.Namespace) -> list[dict[str, Any]]:
    serving = Serving(
        given.step_us,
        given.wake_us,
        levels=_levels(given.rows, (1, 32)),
        output_tokens=given.steps or 1200,
        repeat=given.repeat,
    )
    results = measure_serving(model, serving)
    for result in results:
        spent = result["processor_us_of_a_step"].items()
        print(
            f"{result['streams']} streams: a step {result['step_ms']:.3f} ms at the client, "
            f"{result['device_step_ms']:.3f} on the device, idle {result['idle_share']:.0%}; "
            f"a batch waits {result['plane_queue_ms']:.3f} ms at the plane"
        )
        print("    processor µs: " + ", ".join(f"{name} {us:.0f}" for name, us in spent))
    return results


@contextmanager
def played_executor(
    model: Path, work: StageWork, *, has_graphs: bool = True
) -> Iterator[tuple[PipelinedExecutor, PlayedDriver, SlotLimits]]:
    """Build the CUDA executor on a played device, as a plane builds it, without serving."""
    made: list[tuple[BuiltExecutor, PlayedDriver]] = []

    def build(_: str, context: ExecutorContext) -> BuiltExecutor:
        made.append(build_played(context, 0.0, has_graphs=has_graphs))
        return made[-1][0]

    num_blocks = work.num_sequences * (-(-(work.context + work.steps) // BLOCK_SIZE) + 1)
    with tempfile.TemporaryDirectory() as directory:
        ComputePlane(
            ComputePlaneConfig(
                listen=f"unix:{directory}/compute.sock",
                model=str(model),
                executor="cuda",
                device="cpu",
                dtype="bfloat16" if has_graphs else "float32",
                block_size=BLOCK_SIZE,
                max_num_blocks=num_blocks,
                max_rows=work.rows,
            ),
            build=build,
        )
    built, driver = made.pop()
    if not isinstance(built.executor, PipelinedExecutor):
        raise TypeError(f"{type(built.executor).__name__} launches no steps")
    limits = SlotLimits(
        max_slots=max(work.num_sequences, 8),
        max_rows=work.rows,
        max_tokens=16384,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        vocab_size=SHAPE.vocab_size,
        context_length=SHAPE.context_length,
    )
    yield built.executor, driver, limits


if __name__ == "__main__":
    sys.exit(main())
