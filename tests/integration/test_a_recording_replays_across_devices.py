"""What one executor recorded replays on another one, within the tolerance of their number formats.

The CPU executor and the CUDA executor, which without `--device` runs on torch's CPU device, on the
same tiny weights; each is recorded and replayed on the other. One wrong weight is noticed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from compute_plane.executor.registry import BuiltExecutor, ExecutorContext, build_executor
from compute_plane.executor.simulated import VOCAB_SIZE
from control_plane.core.generation_params import GenerationParams
from hetero_infer.replay.comparison import (
    BFLOAT16_TOLERANCE,
    FLOAT32_TOLERANCE,
    QUANTISED_TOLERANCE,
)
from tests.compute_plane.executor.tiny_llama import KERNEL_HEAD_DIM, tiny_spec
from tests.compute_plane.executor.tiny_sources import model_in_memory
from tests.compute_plane.executor.tiny_weights import tiny_weights
from tests.compute_plane.model.llama_weights import LlamaWeights
from tests.compute_plane.rpc.plane_harness import BLOCK_SIZE, Harness
from tests.devices import Target
from tests.hetero_infer.replay.replay_bench import PROMPTS, Prompt, record, replay
from tests.judging import REFERENCE

SPEC = dataclasses.replace(tiny_spec(head_dim=KERNEL_HEAD_DIM), vocab_size=VOCAB_SIZE)

RECORDED: list[Prompt] = [
    *PROMPTS,
    ("greedy", GenerationParams(max_tokens=12, temperature=0.0, seed=6, ignore_eos=True)),
    (
        "adjusted",
        GenerationParams(
            max_tokens=8, seed=7, top_k=20, top_p=0.8, repetition_penalty=1.3, ignore_eos=True
        ),
    ),
]
NUM_TOKENS = sum(params.max_tokens * params.n for _, params in RECORDED)


class ModelHarness(Harness):
    """A plane in this process with an executor over a tiny random model."""

    def __init__(
        self,
        directory: Path,
        target: Target,
        weights: LlamaWeights,
        block_size: int,
        dtype: str = "float32",
        kv_dtype: str = "auto",
    ) -> None:
        self._target, self._weights = target, weights
        self._dtype, self._kv_dtype = dtype, kv_dtype
        super().__init__(directory, block_size=block_size, num_threads=1)

    def _build(self, _: str, context: ExecutorContext) -> BuiltExecutor:
        own = dataclasses.replace(
            context,
            spec=SPEC,
            model=model_in_memory(SPEC, self._weights),
            device=self._target.device,
            dtype=self._dtype,
            kv_cache_dtype=self._kv_dtype,
        )
        self.built = build_executor(self._target.executor, own)
        return self.built

    def close(self) -> None:
        self.channel.close()
        self.plane.stop()


Planes = Callable[..., ModelHarness]


@pytest.fixture
def planes(cuda_target, tmp_path_factory) -> Iterator[Planes]:
    made: list[ModelHarness] = []

    def make(target: Target, weights: LlamaWeights | None = None, **options) -> ModelHarness:
        # A socket's path must be short.
        directory = tmp_path_factory.mktemp("p")
        weights = tiny_weights(SPEC) if weights is None else weights
        block_size = cuda_target.block_size(BLOCK_SIZE)  # a recording is of one size
        made.append(ModelHarness(directory, target, weights, block_size, **options))
        return made[-1]

    yield make
    for plane in made:
        plane.close()


@pytest.mark.parametrize("is_recorded_on_cuda", [False, True])
def test_each_replays_what_the_other_one_recorded(
    planes, cuda_target, tmp_path, is_recorded_on_cuda
):
    ways = [REFERENCE, cuda_target]
    recorded, replaying = ways[::-1] if is_recorded_on_cuda else ways
    record(planes(recorded), tmp_path / "run", RECORDED)
    report = replay(planes(replaying), tmp_path / "run")
    assert report.num_differences == 0, report.differences
    assert report.num_tokens == report.num_compared == NUM_TOKENS
    assert report.rules is not None
    assert not report.rules.is_exact
    assert report.rules.tolerance == FLOAT32_TOLERANCE
    assert 0 < report.largest_gap < FLOAT32_TOLERANCE
    assert report.num_blocks == 0


def test_another_number_format_replays_within_its_own_tolerance(planes, cuda_target, tmp_path):
    record(planes(REFERENCE), tmp_path / "run", RECORDED)
    report = replay(planes(cuda_target, dtype="bfloat16"), tmp_path / "run")
    assert report.num_differences == 0, report.differences
    assert report.rules is not None
    assert report.rules.tolerance == BFLOAT16_TOLERANCE
    assert report.largest_gap > FLOAT32_TOLERANCE


@pytest.mark.wide
@pytest.mark.parametrize("kv_dtypes", [("int8", "int8"), ("float8", "float8"), ("auto", "float8")])
def test_blocks_of_eight_bits_replay_within_their_own_tolerance(
    planes, cuda_target, tmp_path, kv_dtypes
):
    """On a GPU steps are in bfloat16, as kernels for such blocks are."""
    dtype = "float32" if cuda_target.device == "cpu" else "bfloat16"
    recorded, replaying = kv_dtypes
    record(planes(REFERENCE, kv_dtype=recorded), tmp_path / "run", RECORDED)
    report = replay(planes(cuda_target, dtype=dtype, kv_dtype=replaying), tmp_path / "run")
    assert report.num_differences == 0, report.differences
    assert report.num_tokens == report.num_compared == NUM_TOKENS
    assert report.rules is not None
    assert report.rules.tolerance == QUANTISED_TOLERANCE
    assert 0 < report.largest_gap < QUANTISED_TOLERANCE
    if recorded != replaying:  # the same blocks may give nearly the same logits, as on AVX2
        assert report.largest_gap > FLOAT32_TOLERANCE


def test_one_wrong_weight_is_noticed(planes, cuda_target, tmp_path):
    record(planes(REFERENCE), tmp_path / "run", RECORDED)
    wrong = tiny_weights(SPEC)
    wrong.layers[1].mlp_norm[5] *= 2
    report = replay(planes(cuda_target, wrong), tmp_path / "run", finds_all=True)
    assert report.num_differences > 0
    assert {found.what for found in report.differences} <= {"log-probability", "token"}
    assert report.largest_gap > FLOAT32_TOLERANCE


def test_an_executor_repeats_its_own_recording_to_the_bit(planes, cuda_target, tmp_path):
    record(planes(cuda_target), tmp_path / "run", RECORDED)
    report = replay(planes(cuda_target), tmp_path / "run")
    assert report.num_differences == 0, report.differences
    assert report.rules is not None
    assert report.rules.is_exact
    assert report.num_blocks * cuda_target.block_size(BLOCK_SIZE) > 40  # tokens
