"""What `make gpu` measures of prefill attention is tested here: the simulator is the device."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest
import torch

from bench.gpu import prefill_speed
from bench.gpu.latent_shapes import PREFILL_SHAPES, LatentPrefillShape
from bench.gpu.prefill_rivals import torch_sdpa
from bench.gpu.prefill_speed import PrefillShape, Problem, measure_prefill
from kernels.cuda.attention_prefill import PrefillVariant
from kernels.cuda.attention_wide import WidePrefillVariant
from kernels.cuda.latent_attention import LatentPrefillVariant
from tests.simt import launch

# Two rows of two query tokens behind three others; one tile each.
SHAPE = PrefillShape(2, 2, 3, PrefillVariant("float32", 64, 2, 16), num_kv_heads=1)
WIDE = PrefillShape(2, 2, 3, WidePrefillVariant("float32", 512, 2, 16), num_kv_heads=2)
LATENTS = LatentPrefillShape(2, 2, 3, LatentPrefillVariant("float32", 2, 256, 32, 16))

CTYPES = {"float32*": ctypes.c_float, "int32*": ctypes.c_int32}
SCALARS = {"float32": np.float32, "int32": np.int32, "int64": np.int64}


class SimulatedKernel:
    """Stands for a LoadedKernel: finds the arrays behind the pointers and simulates the launch."""

    def __init__(self, shape=SHAPE):
        self._shape = shape

    def launch(self, grid, _stream, *arguments):
        shape, variant = self._shape, self._shape.variant
        rows, heads = shape.rows, shape.rows * shape.query_len * shape.num_heads
        out, query = heads * shape.out_elements, heads * shape.query_elements
        pool = math.prod(shape.pool_shape(rows))
        sizes = iter((out, query, pool, rows, rows, rows + 1, rows, rows, out))  # no sinks
        bound = [
            np.ctypeslib.as_array((CTYPES[kind] * next(sizes)).from_address(argument))
            if kind in CTYPES
            else SCALARS[kind](argument)
            for kind, argument in zip(variant.arguments, arguments, strict=True)
        ]
        launch(variant.kernel(), grid, variant.threads, bound)


class IdleKernel:
    def launch(self, *_):
        pass


@pytest.fixture
def measure(monkeypatch):
    """Measure with one run of each thing, a second long."""
    monkeypatch.setattr(prefill_speed, "REPEATS", 1)

    def timer(queue_work, repeats):
        for _ in range(repeats):
            queue_work()
        return [1000.0] * repeats

    def run(kernel, rivals, said=print, shape=SHAPE):
        return measure_prefill(shape, kernel, timer, said, device="cpu", rivals=rivals)

    return run


@pytest.mark.wide
def test_a_measurement_counts_what_causal_attention_needs_and_checks_the_answers(measure):
    result = measure(SimulatedKernel(), {"torch_sdpa": torch_sdpa})

    # Two products of two flops; the two tokens of a row see four and five.
    assert result["flop"] == 4 * 2 * (4 + 5) * 2 * 64
    assert result["tflop_per_s"] == pytest.approx(result["flop"] / 1e12)
    assert result["tiles"] == 2
    assert result["max_error_of_checked_tokens"] <= 1e-5
    assert result["faults"] == []
    assert result["rivals"]["torch_sdpa"]["max_error_of_checked_tokens"] <= 1e-5
    assert result["rivals"]["torch_sdpa"]["flop"] == result["flop"]


@pytest.mark.wide
def test_a_measurement_of_latents_counts_what_is_computed_with_them(measure):
    result = measure(SimulatedKernel(LATENTS), {"torch_sdpa": torch_sdpa}, shape=LATENTS)

    # Two flops for each element of a row, two for each of its latent; two rows of two heads.
    assert result["flop"] == 2 * (288 + 256) * 2 * (4 + 5) * 2
    assert result["tiles"] == 2
    assert result["max_error_of_checked_tokens"] <= 1e-5
    assert result["faults"] == []
    assert result["rivals"] == {}


@pytest.mark.wide
def test_a_measurement_with_heads_of_512_checks_the_answers_and_has_no_rivals(measure):
    result = measure(SimulatedKernel(WIDE), {"torch_sdpa": torch_sdpa}, shape=WIDE)

    assert result["flop"] == 4 * 2 * (4 + 5) * 4 * 512
    assert result["max_error_of_checked_tokens"] <= 1e-5
    assert result["faults"] == []
    assert result["rivals"] == {}


def test_gemmas_heads_of_512_are_measured_on_a_prompt_and_behind_a_long_context():
    shapes = [one for one in prefill_speed.SHAPES if one.query_elements == 512]
    assert [(one.query_len, one.context, one.num_heads) for one in shapes] == [
        (8192, 0, 32), (512, 32768, 32),
    ]  # fmt: skip
    assert not any(one.has_rivals for one in shapes)
    assert SHAPE.has_rivals


def test_latents_of_two_models_are_measured_on_prompts_and_behind_long_contexts():
    assert set(PREFILL_SHAPES) <= set(prefill_speed.SHAPES)
    found = {(shape.num_heads, shape.context > 0) for shape in PREFILL_SHAPES}
    assert found == {(heads, is_behind) for heads in (16, 128) for is_behind in (False, True)}
    seen = 512 * 32768 + 512 * 513 // 2
    assert PREFILL_SHAPES[-1].flop == 2176 * 128 * seen


@pytest.mark.parametrize("shape", [SHAPE, WIDE, LATENTS], ids=lambda shape: shape.name)
def test_a_measurement_of_a_kernel_that_writes_nothing_is_a_fault(measure, shape):
    assert measure(IdleKernel(), {}, shape=shape)["faults"] == ["error inf exceeds 1e-05"]


def test_a_rival_that_fails_is_reported_with_its_reason(measure):
    said = []

    def missing(_problem):
        raise ImportError("No module named 'rival'\nand more")

    result = measure(IdleKernel(), {"rival": missing}, said.append)

    assert result["rivals"] == {"rival": {"unavailable": "ImportError: No module named 'rival'"}}
    assert said == ["rival: ImportError: No module named 'rival'"]


@pytest.mark.wide
@pytest.mark.parametrize("context", [0, 3])
def test_torchs_attention_attends_to_the_same_tokens(context):
    shape = PrefillShape(2, 5, context, PrefillVariant("float32", 64, 2, 16), num_kv_heads=2)
    torch.manual_seed(0)
    problem = Problem(shape, "cpu")

    assert problem.error_of_some_tokens(torch_sdpa(problem)()) <= 1e-5
