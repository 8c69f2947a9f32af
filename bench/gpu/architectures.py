"""Tiny models of the architectures on the device: right, and the same with launches in turn.

Kernels are checked one by one (`numerics`); here whole steps are, as a plane runs them: prompts in
chunks, decode graphs, states and blocks that are gone on from, launches that begin before the one
ahead has ended. Their logits must be the CPU executor's, in float32, within what the dtype allows,
and the same bits in every round as launches that wait for the one ahead give (`step_ways.LATE`).
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from bench.gpu import expected_logits, teacher_steps
from bench.gpu.architecture_shapes import SHAPES, Architecture
from bench.gpu.drawn_models import drawn_model
from bench.gpu.findings import Findings, PartOptions
from bench.gpu.one_by_one import one_by_one
from bench.gpu.step_ways import LATE, OWN, Way
from compute_plane.executor.registry import BuiltExecutor, ExecutorContext, build_executor
from hetero_infer.replay.comparison import BFLOAT16_TOLERANCE, FLOAT32_TOLERANCE

if TYPE_CHECKING:
    from compute_plane.executor.interface import Float32Array
    from compute_plane.model.loader import LoadedModel

ROUNDS: Final = 6
"""So often the steps are taken with launches that begin early: a race is not lost every time."""
NUM_THREADS: Final = 4
"""Of the CPU executor."""
SHARE_OF_TIES: Final = 0.25
"""Of rows of logits that may be off where there are experts."""
MAX_ROWS: Final = 4
MAX_TOKENS: Final = 128
TOLERANCES: Final = {"float32": FLOAT32_TOLERANCE, "bfloat16": BFLOAT16_TOLERANCE}


@dataclass(frozen=True, slots=True)
class Runs:
    """How both executors are built. `device`: of the CUDA executor."""

    kernel_cache: Path
    device: str = "cuda"

    @property
    def dtype(self) -> str:
        """What it computes in, where a model is stored in bfloat16 or fewer bits."""
        return "float32" if self.device == "cpu" else "bfloat16"

    def expected(self, model: LoadedModel) -> list[Float32Array]:
        """Return the logits of the CPU executor, step by step, [K, V] each."""
        built = build_executor("cpu", self._context(model, "cpu", "float32"))
        executor: Any = built.executor
        with executor if hasattr(executor, "__exit__") else nullcontext():
            return teacher_steps.logits_of(executor, teacher_steps.batches(model.spec))

    @contextmanager
    def running(self, model: LoadedModel, way: Way) -> Iterator[BuiltExecutor]:
        """Build the CUDA executor, to go one way; give its memory back."""
        with way.taken():
            yield build_executor("cuda", self._context(model, self.device, "auto"))
        gc.collect()
        if self.device != "cpu":
            import torch

            torch.cuda.empty_cache()

    def build_kernels(self, model: LoadedModel, say: Callable[[str], None]) -> None:
        """Build what nobody has built before, on all cores; a failure shows up later."""
        if self.device == "cpu":
            return
        import torch

        from bench.gpu.model_kernels import kernels_of
        from kernels.cuda.build_ahead import build_ahead

        capability: tuple[int, int] = torch.cuda.get_device_capability()
        variants = kernels_of(model, self.dtype, teacher_steps.BLOCK_SIZE)
        build_ahead(variants, capability, self.kernel_cache / "cuda", progress=say)

    def _context(self, model: LoadedModel, device: str, dtype: str) -> ExecutorContext:
        return ExecutorContext(
            spec=model.spec, model=model, block_size=teacher_steps.BLOCK_SIZE,
            num_blocks=teacher_steps.num_blocks(), dtype=dtype, kv_cache_dtype="auto",
            instruction_set="auto", device=device, max_tokens=MAX_TOKENS, num_threads=NUM_THREADS,
            kernel_cache=self.kernel_cache, max_rows=MAX_ROWS, max_slots=MAX_ROWS,
            keep_logits=True,
        )  # fmt: skip


def architectures(found: Findings, options: PartOptions) -> None:
    """Check all of them on the CUDA device."""
    check_architectures(found, options, Runs(options.kernel_cache))


def check_architectures(
    found: Findings, options: PartOptions, runs: Runs, shapes: Sequence[Architecture] = SHAPES
) -> None:
    """Check shapes one by one; the report gets `architectures`, a row for each.

    What each takes before it, the CPU executor's answers where nobody has brought them and kernels
    that nobody has built, may take long where neither was compiled before.
    """
    results: list[dict[str, Any]] = []
    found.values["architectures"] = results
    expected: list[Float32Array] = []

    def before(number: int) -> None:
        expected.clear()
        model = drawn_model(shapes[number].spec, shapes[number].formats)
        known = expected_logits.read(runs.kernel_cache, shapes[number])
        with found.attempt(f"{shapes[number].name}, on the CPU"):
            expected.extend(known or runs.expected(model))
        with found.attempt(f"{shapes[number].name}, its kernels"):
            runs.build_kernels(model, found.say)

    def check(shape: Architecture) -> None:
        model = drawn_model(shape.spec, shape.formats)
        result: dict[str, Any] = {"model": shape.name, "dtype": runs.dtype}
        results.append(result)
        for fault in check_model(model, runs, expected, result, found.say):
            found.failures.append(f"{shape.name}: {fault}")
            found.say(found.failures[-1])

    one_by_one(found, options, shapes, lambda shape: shape.name, check, before)


def check_model(
    model: LoadedModel,
    runs: Runs,
    expected: Sequence[Float32Array],
    result: dict[str, Any],
    say: Callable[[str], None],
) -> Iterator[str]:
    """Yield what is wrong with a model, as soon as it is known.

    `expected`: logits of each step; empty where there are none. `result` gets the figures.
    """
    steps = teacher_steps.batches(model.spec)
    with runs.running(model, OWN) as built:
        result["graphs"] = captured(built)
        if runs.device != "cpu" and not result["graphs"]:
            yield "no decode graph was captured"
        rounds = [teacher_steps.logits_of(built.executor, steps)]
        if expected:
            yield from _faults_of_logits(model, runs, rounds[0], expected, result, say)
        rounds += (teacher_steps.logits_of(built.executor, steps) for _ in range(ROUNDS - 1))
    del built
    with runs.running(model, LATE) as built:
        in_turn = teacher_steps.logits_of(built.executor, steps)
    del built
    others = [first_other_step(one, in_turn) for one in rounds]
    wrong = [step for step in others if step is not None]
    result["rounds"], result["rounds_of_other_bits"] = len(rounds), len(wrong)
    if wrong:
        yield (
            f"{len(wrong)} of {len(rounds)} rounds of launches that begin early gave other bits "
            f"than launches in turn, from step {min(wrong)} on"
        )


def captured(built: BuiltExecutor) -> list[int]:
    """Return of how many rows there are decode graphs."""
    said = re.search(r"/graphs-([\d-]+)", built.numerics_id)
    return [] if said is None else [int(size) for size in said[1].split("-")]


def _faults_of_logits(
    model: LoadedModel,
    runs: Runs,
    found: Sequence[Float32Array],
    expected: Sequence[Float32Array],
    result: dict[str, Any],
    say: Callable[[str], None],
) -> Iterator[str]:
    tolerance = TOLERANCES[runs.dtype]
    errors = errors_of_rows(found, expected)
    off = [(step, error) for step, error in errors if not error <= tolerance]
    # A near tie between experts goes one way here and another there, and what is said of that
    # token, and a little of those behind it, is something else (ADR 0032).
    allowed = 0.0 if model.spec.mixture is None else SHARE_OF_TIES * len(errors)
    largest = max(error for _, error in errors)
    result |= {
        "tolerance": tolerance, "largest_error": largest, "logits": len(errors),
        "logits_off": len(off),
    }  # fmt: skip
    say(f"{model.spec.name:<28} error {largest:.3f} of {tolerance}, {len(off)} rows beyond it")
    if len(off) > allowed:
        yield f"{len(off)} of {len(errors)} rows of logits are off, the first at step {off[0][0]}"


def errors_of_rows(
    found: Sequence[Float32Array], expected: Sequence[Float32Array]
) -> list[tuple[int, float]]:
    """Return of each row of logits its step and its largest difference, in units of its spread.

    As black-box tests judge (`tests.judging`): a spread below 1 counts as 1.
    """
    errors = []
    for step, (ours, exact) in enumerate(zip(found, expected, strict=True)):
        spread = np.maximum(1.0, exact.std(axis=1))
        largest = np.nan_to_num(np.abs(ours - exact), nan=np.inf).max(axis=1)
        errors += [(step, float(error)) for error in largest / spread]
    return errors


def first_other_step(one: Sequence[Float32Array], other: Sequence[Float32Array]) -> int | None:
    """Return the first step of unequal bits; None if there is none."""
    pairs = enumerate(zip(one, other, strict=True))
    return next((step for step, (a, b) in pairs if a.tobytes() != b.tobytes()), None)
