"""How long a decode step of the whole executor takes: with graphs, without, beside the memory.

Steps of few rows are taken with the library's products, too, and the norm, gate and additions
beside them as launches of their own, as steps of many rows are; and all with launches that wait for
the one ahead to end (ADR 0031), which must say the same to the bit.

A step must read all weights, and the keys and values of its rows, once: that is what it is compared
with, at the bandwidth of a device copy measured here. Steps are launched as the plane launches
them, the next one while one is under way, and times are of the host's clock: what is left to hide
shows. The model has random weights and is made on the spot.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.gpu.device import summary
from bench.gpu.findings import Findings, PartOptions, line_of
from bench.gpu.launch_costs import launch_costs, say_costs
from bench.gpu.random_model import EIGHT_BILLION, ONE_BILLION, LlamaShape, write_model
from bench.gpu.step_answers import Answers, answers
from bench.gpu.step_profile import profiled_runs, where_time_goes
from bench.gpu.step_ways import BLOCK_SIZE, EAGER, LATE, OWN, WAYS, Way, Workload
from compute_plane.app import ComputePlane
from compute_plane.config import ComputePlaneConfig
from compute_plane.cuda.dense_kernels import MOST_ROWS
from compute_plane.executor.interface import (
    ExecutionBatch,
    GPUExecutor,
    PipelinedExecutor,
    SamplingRow,
)
from compute_plane.executor.registry import BuiltExecutor, ExecutorContext, build_executor
from kernels.cuda.quantized_kv import SCALE_BYTES

ELEMENT_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
EIGHT_BITS: Final = (1, SCALE_BYTES)
"""Of keys and values: bytes of an element, and of the scale beside those of a head."""

SHOWN_KERNELS: Final = 12
"""Lines of a profile that are printed; the report has all."""

GRAPHS_OF_EAGER: Final = 0.8
OF_READ_TIME: Final = 1.25


@dataclass(frozen=True, slots=True)
class PlaneFlags:
    """Flags of the compute plane whose executor is measured."""

    device: str
    dtype: str
    kv_cache_dtype: str = "auto"
    kernel_cache: str | None = None


def engine_steps(found: Findings, options: PartOptions) -> None:
    """Measure on the CUDA device, with a small model: of its steps most is not reading."""
    with found.attempt("what a launch costs"):
        found.values["launches"] = costs = launch_costs()
        found.say(say_costs(costs))
    _measure_on_device(found, options, ONE_BILLION, Workload())


def engine_steps_8b(found: Findings, options: PartOptions) -> None:
    """Measure on the CUDA device, with a model of whose steps most is reading.

    A layer's launches are as many, and have three and a half times as much to read beside them.
    """
    work = Workload(
        batches=(1, 8, 32, 64), repeats=3, eager_batches=(), profiled_batches=(1, 8, 32, 64),
        has_extra=True,
    )  # fmt: skip
    _measure_on_device(found, options, EIGHT_BILLION, work)


def _measure_on_device(
    found: Findings, options: PartOptions, shape: LlamaShape, work: Workload
) -> None:
    from bench.gpu.decode_bandwidth import measure_copy
    from bench.gpu.device import milliseconds

    copy = measure_copy(milliseconds)
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(shape, Path(directory) / shape.name)
        plane = PlaneFlags("cuda", "bfloat16", options.kv_cache_dtype, str(options.kernel_cache))
        measure_steps(found, shape, model, plane, gb_per_s=copy["gb_per_s"], work=work)


def measure_steps(
    found: Findings,
    shape: LlamaShape,
    model: Path,
    plane: PlaneFlags,
    *,
    gb_per_s: float,
    work: Workload | None = None,
) -> None:
    """Measure decode steps of each number of rows.

    `gb_per_s`: what the memory gives. The report gets `engine_steps`: of each size its times with
    and without graphs, the bytes that must be read, and how long that takes.
    """
    figures: dict[str, Any] = {
        "model": shape.name,
        "num_parameters": shape.num_parameters,
        "dtype": plane.dtype,
        "kv_cache_dtype": plane.kv_cache_dtype,
        "gb_per_s": gb_per_s,
        "batches": [],
    }
    found.values["engine_steps"] = figures
    results: dict[int, dict[str, Any]] = {}
    said: dict[Way, dict[int, Answers]] = {}
    work = work or Workload()
    for way in WAYS:
        batches = way.batches_of(work)
        if not batches:
            continue
        what = f"decode steps {way.name}"
        some = replace(work, batches=batches)
        with found.attempt(what), executor_on(model, some, plane, way) as made:
            for rows in batches:
                found.begin(f"{what}, {rows} rows")
                times = step_milliseconds(made, rows, work)
                if rows not in results:
                    results[rows] = {"rows": rows, "context": work.context}
                    figures["batches"].append(results[rows])
                result = results[rows]
                result[way.key] = summary(times)
                if way is OWN:
                    num_bytes = read_bytes(shape, plane, rows * work.context)
                    _compare_with_memory(found, shape.name, result, gb_per_s, num_bytes)
                    if rows in work.profiled_batches:
                        result["profile"] = _profile(found, made, rows, work, plane.device)
                elif way is EAGER:
                    _compare_with_eager(found, result)
                else:
                    _compare_with_own(found, result, way)
            if way in (OWN, LATE):
                some_rows = {min(MOST_ROWS, max(batches)), max(batches)}  # our products, torch's
                said[way] = {n: answers(made, n, work.blocks_of_row) for n in some_rows}
            del made  # two models need not find room
    if len(said) > 1:
        for rows, own in said[OWN].items():
            other = [one != late for one, late in zip(own, said[LATE][rows], strict=True)]
            if any(other):
                found.failures.append(
                    f"launches that begin early say something else, {rows} rows from step "
                    f"{other.index(True)} on"
                )


def read_bytes(shape: LlamaShape, plane: PlaneFlags, num_tokens: int) -> int:
    """Return what a decode step reads, whose rows have so many tokens together."""
    of_weight = ELEMENT_BYTES[plane.dtype]
    of_value = (of_weight, 0) if plane.kv_cache_dtype == "auto" else EIGHT_BITS
    return shape.step_weight_bytes(of_weight) + num_tokens * shape.kv_bytes_per_token(*of_value)


def _compare_with_memory(
    found: Findings, model: str, result: dict[str, Any], gb_per_s: float, num_bytes: int
) -> None:
    rows, step_ms = result["rows"], result["graphs"]["median_ms"]
    result["read_bytes"] = num_bytes
    result["read_ms"] = num_bytes / gb_per_s / 1e6
    result["of_read_time"] = step_ms / result["read_ms"]
    found.say(f"decode step of {rows:3} rows {step_ms:8.3f} ms, {rows / step_ms * 1e3:8.0f} tok/s")
    found.target(
        f"decode step of {rows} rows over its reading time, {model}",
        result["of_read_time"],
        at_most=OF_READ_TIME,
    )


def _compare_with_own(found: Findings, result: dict[str, Any], way: Way) -> None:
    other = result[way.key]["median_ms"]
    found.say(f"decode step of {result['rows']:3} rows {way.name} {other:8.3f} ms")
    if "graphs" in result:
        result[f"own_of_{way.key}"] = result["graphs"]["median_ms"] / other


def _compare_with_eager(found: Findings, result: dict[str, Any]) -> None:
    eager = result["eager"]["median_ms"]
    found.say(f"decode step of {result['rows']:3} rows without graphs {eager:8.3f} ms")
    if "graphs" not in result:  # they failed
        return
    result["graphs_of_eager"] = result["graphs"]["median_ms"] / eager
    found.target(
        f"decode step of {result['rows']} rows with graphs over without",
        result["graphs_of_eager"],
        at_most=GRAPHS_OF_EAGER,
    )


def _profile(
    found: Findings, executor: GPUExecutor, rows: int, work: Workload, device: str
) -> dict[str, Any]:
    """Return where the time of these steps goes, or why that cannot be known."""
    batches = decode_batches(rows, work)[: work.warm_up]
    try:
        runs = profiled_runs(lambda: _run_pipelined(executor, batches), device)
    except Exception as error:  # noqa: BLE001 - a profiler that does not work here is no fault of ours
        found.say(f"    {line_of(error)}")
        return {"unavailable": line_of(error)}
    profile = where_time_goes(runs, len(batches))
    found.say(
        f"    of {profile['span_us']:.0f} µs with a profiler {profile['busy_us']:.0f} in kernels, "
        f"{profile['pauses_us']:.0f} in {profile['pauses_per_step']:.0f} pauses:"
    )
    for kernel in profile["kernels"][:SHOWN_KERNELS]:
        found.say(
            f"    {kernel['us_per_step']:8.1f} µs  {kernel['per_step']:5.1f} × "
            f"{kernel['median_us']:.2f}  {kernel['name']}"
        )
    return profile


@contextmanager
def executor_on(
    model: Path, work: Workload, flags: PlaneFlags, way: Way = OWN
) -> Iterator[GPUExecutor]:
    """Build the CUDA executor as a plane builds it, without serving; give its memory back."""
    built: list[BuiltExecutor] = []

    def build(name: str, context: ExecutorContext) -> BuiltExecutor:
        built.append(build_executor(name, context))
        return built[-1]

    with tempfile.TemporaryDirectory() as directory, way.taken():
        plane = ComputePlane(
            ComputePlaneConfig(
                listen=f"unix:{directory}/compute.sock",
                model=str(model),
                executor="cuda",
                block_size=BLOCK_SIZE,
                max_num_blocks=work.num_blocks,
                max_rows=max(work.batches),
                cuda_graph=way.uses_graphs,
                **asdict(flags),
            ),
            build=build,
        )
        yield built.pop().executor
    del plane
    gc.collect()
    if flags.device != "cpu":
        import torch

        torch.cuda.empty_cache()


def step_milliseconds(executor: GPUExecutor, rows: int, work: Workload) -> list[float]:
    """Return the mean time of a step in each run of greedy decode steps."""
    batches = decode_batches(rows, work)
    for batch in batches[: work.warm_up]:
        executor.execute(batch)
    times = []
    for _ in range(work.repeats):
        began = time.perf_counter()
        _run_pipelined(executor, batches)
        times.append((time.perf_counter() - began) * 1e3 / work.steps)
    return times


def _run_pipelined(executor: GPUExecutor, batches: Sequence[ExecutionBatch]) -> None:
    """Run steps as the device thread does: the next one is launched before the last is read."""
    if not isinstance(executor, PipelinedExecutor):
        raise TypeError(f"{type(executor).__name__} launches no steps")
    under_way = None
    for batch in batches:
        launched = executor.launch(batch)
        if under_way is not None:
            under_way.wait()
            under_way.answer()
        under_way = launched
    if under_way is not None:
        under_way.wait()
        under_way.answer()


def decode_batches(rows: int, work: Workload) -> list[ExecutionBatch]:
    """Return the steps of a run, in which each row grows by a token a step."""
    return [
        decode_batch(rows, work.context + step, work.blocks_of_row) for step in range(work.steps)
    ]


def decode_batch(rows: int, context: int, blocks_of_row: int) -> ExecutionBatch:
    """Return a step of `rows` greedy rows, the last of `context` tokens of each.

    Rows share no block. What lies in the pool is whatever it was made with: its speed is the same.
    """
    tables = np.arange(rows * blocks_of_row, dtype=np.int32).reshape(rows, blocks_of_row)
    ones = np.ones(rows, dtype=np.int32)
    return ExecutionBatch(
        input_tokens=np.arange(rows, dtype=np.int32) + 2,
        positions=ones * (context - 1),
        seq_lens=ones * context,
        block_tables=tables,
        is_prefill=np.zeros(rows, dtype=np.bool_),
        prompt_lens=ones,
        query_lens=ones,
        sampled_rows=np.arange(rows, dtype=np.int32),
        sampling=[SamplingRow(0.0, 1.0, row, 0, context) for row in range(rows)],
    )
