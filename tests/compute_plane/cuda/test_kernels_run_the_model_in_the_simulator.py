"""The executor on the CUDA kernels, run by the SIMT simulator, against the reference operations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from compute_plane.cuda.block_pools import KV_DTYPES
from compute_plane.cuda.executor import CudaExecutor
from compute_plane.cuda.kernel_operations import KernelOperations
from compute_plane.cuda.next_product import NextProduct
from compute_plane.cuda.reference_blocks import read_blocks, write_tokens
from compute_plane.cuda.reference_operations import ReferenceOperations
from compute_plane.cuda.weights import DTYPES
from compute_plane.errors import DeviceUnavailableError
from compute_plane.executor.interface import (
    BlockCopy,
    ExecutionBatch,
    ExecutionOutput,
    LogitBias,
    Penalties,
    SamplingRow,
)
from compute_plane.model.spec import Mixture
from kernels.cuda import attention_decode
from tests.compute_plane.cuda.simulated_launcher import SimulatedLauncher
from tests.compute_plane.cuda.torch_executors import RecordingDriver, torch_executor
from tests.compute_plane.executor.tiny_llama import tiny_spec
from tests.golden.batch_driver import BatchDriver, DrivenSequence, int32

SPEC = replace(
    tiny_spec(), vocab_size=41, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64,
    hidden_size=32, intermediate_size=64,
)  # fmt: skip
NUM_BLOCKS, BLOCK_SIZE = 12, 16


def executor(
    dtype: str, pool_dtype: str | None, operations: KernelOperations | None
) -> CudaExecutor:
    """Return an executor over zeros: a row's own tile may not hold NaN in prefill attention."""
    made = torch_executor(
        SPEC, RecordingDriver(), dtype=DTYPES[dtype], pool_dtype=KV_DTYPES[pool_dtype or dtype],
        num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, operations=operations, keep_logits=True,
    )  # fmt: skip
    made._pools.device.zero_()
    return made


def first_step(driver: BatchDriver, rows: list[DrivenSequence]) -> ExecutionBatch:
    """Two prefills, over the edge of a block, with the log-probabilities of one."""
    batch = driver.batch(rows)
    targets = int32([*rows[0].tokens[1:], 3])
    return replace(
        batch, prompt_logprob_rows=[0], prompt_logprob_targets=[targets], prompt_num_logprobs=[2]
    )


def second_step(driver: BatchDriver, rows: list[DrivenSequence]) -> ExecutionBatch:
    """A decode of a fork from a copied block beside a prefill; every way to draw."""
    fork = rows[0].blocks[0]
    rows[0].blocks[0] = driver.free.pop()
    batch = driver.batch(rows)
    history = int32(rows[0].tokens)
    bias = LogitBias(int32([7]), np.array([2.5], dtype=np.float32))
    ways = [
        SamplingRow(0.0, 1.0, 0, 0, 9, num_logprobs=3),
        SamplingRow(0.9, 0.8, 5, 0, 9, penalties=Penalties(1.2, 0.5, 0.1, history, 2)),
        SamplingRow(1.3, 1.0, 6, 1, 9, top_k=5, min_p=0.01),
        SamplingRow(0.0, 1.0, 0, 0, 9, logit_bias=bias, num_logprobs=0),
    ]
    copies = [BlockCopy(fork, rows[0].blocks[0]), BlockCopy(rows[0].blocks[0], driver.free[0])]
    return replace(batch, sampling=ways, sampled_rows=int32([0, 1, 1, 0]), copies=copies)


def outputs(made: CudaExecutor) -> tuple[list[ExecutionOutput], torch.Tensor]:
    """Run both steps and one that is replayed from a graph; return what they gave, and the pool."""
    made.capture_decode_graph(4)
    driver = BatchDriver(made, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, seed=3)
    rows = [DrivenSequence([1 + i % 40 for i in range(18)]), DrivenSequence([5, 6, 7])]
    found = []
    batch = first_step(driver, rows)
    found.append(made.execute(batch))
    for row, token in zip(rows, (11, 12), strict=True):  # whatever was drawn
        row.num_computed = len(row.tokens)
        row.tokens.append(token)
    rows[1].tokens += [13, 14]
    found.append(made.execute(second_step(driver, rows)))
    for row in rows:
        row.num_computed = len(row.tokens)
        row.tokens.append(15)
    found.append(made.execute(driver.batch(rows)))
    return found, made._pools.device


def values_of(pool: torch.Tensor, head_dim: int = SPEC.head_dim) -> torch.Tensor:
    """Return the numbers of a whole pool, float32 [N, L, 2, G, B, D]."""
    layers = [
        read_blocks(pool, layer, np.arange(len(pool)), head_dim) for layer in range(pool.shape[1])
    ]
    return torch.from_numpy(np.concatenate(layers, axis=1))


@pytest.mark.parametrize(
    ("dtype", "pool_dtype", "tolerance"),
    [
        ("float32", None, 1e-4),
        ("bfloat16", None, 0.15),
        ("float16", None, 0.03),
        ("bfloat16", "int8", 0.2),
        ("float16", "float8", 0.5),
    ],
)
@pytest.mark.slow
def test_steps_on_kernels_give_what_the_reference_operations_give(
    dtype: str, pool_dtype: str | None, tolerance: float
) -> None:
    launcher = SimulatedLauncher()
    operations = KernelOperations(launcher, SPEC, dtype, BLOCK_SIZE, pool_dtype=pool_dtype)
    found, pool = outputs(executor(dtype, pool_dtype, operations))
    expected, expected_pool = outputs(executor(dtype, pool_dtype, None))
    torch.testing.assert_close(values_of(pool), values_of(expected_pool), atol=tolerance, rtol=0)
    for one, other in zip(found, expected, strict=True):
        assert not one.failed_rows
        np.testing.assert_allclose(one.logits, other.logits, atol=tolerance)
        for logprobs, others in zip(one.prompt_logprobs, other.prompt_logprobs, strict=True):
            np.testing.assert_allclose(logprobs, others, atol=tolerance)
        for own, of_other in zip(one.sample_logprobs, other.sample_logprobs, strict=True):
            assert own.top.token_ids.shape == of_other.top.token_ids.shape
            np.testing.assert_allclose(own.top.logprobs, of_other.top.logprobs, atol=tolerance)
        if dtype == "float32":
            assert one.next_tokens.tolist() == other.next_tokens.tolist()
    names = {name for name, _ in launcher.launched}
    # No step has 9 to 16 tokens, and no product so many inputs that they are split.
    expected_ones = [v for v in operations.variants if getattr(v, "columns", 8) == 8]
    assert names == {v.name for v in expected_ones if not getattr(v, "num_parts", 0)}


@pytest.mark.parametrize(
    ("architecture", "pool_dtype"),
    [
        pytest.param("llama", "bfloat16", marks=pytest.mark.slow),
        pytest.param("llama", "int8", marks=pytest.mark.slow),
        pytest.param("llama", "float8", marks=pytest.mark.slow),
        pytest.param("qwen2", "bfloat16", marks=pytest.mark.slow),
        pytest.param("qwen3", "int8", marks=pytest.mark.wide),
        pytest.param("qwen3moe", "bfloat16", marks=pytest.mark.slow),
        pytest.param("gemma3", "bfloat16", marks=pytest.mark.wide),
        pytest.param("gemma3", "float8", marks=pytest.mark.slow),
        pytest.param("exaone4", "bfloat16", marks=pytest.mark.slow),
        pytest.param("olmo2", "bfloat16", marks=pytest.mark.wide),
        pytest.param("minimax-m2", "bfloat16", marks=pytest.mark.wide),
    ],
)
def test_a_decode_beside_a_prefill_on_kernels_gives_the_reference_s_logits_and_token(
    architecture: str, pool_dtype: str
) -> None:
    spec = replace(SPEC, architecture=architecture, num_layers=1, num_heads=2, num_kv_heads=1)
    if architecture == "qwen3moe":
        spec = replace(spec, mixture=Mixture(5, 2))
    if architecture == "minimax-m2":
        mixture = Mixture(5, 2, scores="sigmoid", corrects_choice=True)
        spec = replace(spec, mixture=mixture, rotary_dim=spec.head_dim // 2)
    if architecture == "gemma3":
        layers = frozenset({0})
        spec = replace(spec, head_dim=256, window=2, layers_with_window=layers)
        spec = replace(spec, local_rope_theta=50.0, layers_with_local_rope=layers)
    size, found = spec.head_dim, []
    kernels = KernelOperations(
        SimulatedLauncher(), spec, "bfloat16", BLOCK_SIZE, pool_dtype=pool_dtype
    )
    for operations in (None, kernels):
        made = torch_executor(
            spec, dtype=torch.bfloat16, pool_dtype=KV_DTYPES[pool_dtype], num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE, operations=operations, keep_logits=True,
        )  # fmt: skip
        pool = made._pools.device
        content = np.linspace(-1, 1, NUM_BLOCKS * 2 * BLOCK_SIZE * size, dtype=np.float32)
        tokens = torch.arange(NUM_BLOCKS * BLOCK_SIZE)
        write_tokens(pool, 0, tokens, content.reshape(-1, 2, 1, size))
        driver = BatchDriver(made, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        rows = [DrivenSequence([4, 5, 6]), DrivenSequence([7, 8, 9], num_computed=2)]
        batch = driver.batch(rows)
        batch = replace(batch, sampled_rows=int32([1]), sampling=batch.sampling[1:])
        found.append((made.execute(batch), values_of(pool, size)))
    (expected, expected_pool), (output, values) = found
    # A step of eight bits where a sum of 16 bits was rounded otherwise.
    allowed = {"float8": 0.2, "int8": 0.06}.get(pool_dtype, 0.02)
    torch.testing.assert_close(values, expected_pool, atol=allowed, rtol=0)
    np.testing.assert_allclose(output.logits, expected.logits, atol=0.1)
    assert output.next_tokens == expected.next_tokens


@pytest.mark.parametrize("num_parts", [0, 2, 4])
def test_what_a_norm_adds_may_come_in_parts(num_parts: int) -> None:
    generator = torch.Generator().manual_seed(num_parts)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    size = SPEC.hidden_size
    shape = (num_parts, 3, size) if num_parts else (3, size)
    x, start, weight = drawn(*shape), drawn(3, size).bfloat16(), drawn(size).bfloat16()
    found = []
    kernels = KernelOperations(SimulatedLauncher(), SPEC, "bfloat16", BLOCK_SIZE)
    for operations in (kernels, ReferenceOperations()):
        residual, out = start.clone(), torch.empty_like(start)
        given = x if num_parts else x.bfloat16()
        operations.add_rms_norm(out, residual, given, weight, 1e-5)
        found.append((residual, out))
    (residual, out), (expected, normed) = found
    assert residual.equal(expected)
    torch.testing.assert_close(out, normed, atol=0.02, rtol=0.01)


@pytest.mark.wide
def test_rows_are_normed_and_gated_whatever_is_fetched_beside_them() -> None:
    launcher, size = SimulatedLauncher(), SPEC.hidden_size
    operations = KernelOperations(launcher, SPEC, "bfloat16", BLOCK_SIZE)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator).bfloat16() for shape in ((3, size), size))
    placed = NextProduct(torch.zeros(3000, 32, dtype=torch.bfloat16), num_parts=2)
    scattered = NextProduct(torch.zeros(32, 3000, dtype=torch.bfloat16).t())
    found = []
    for then, fetches in ((None, True), (placed, True), (scattered, True), (placed, False)):
        launcher.fetches_ahead = fetches
        outs = [torch.empty_like(x) for _ in range(2)] + [x.new_empty((3, size // 2))]
        residual = x.clone()
        operations.rms_norm(outs[0], x, weight, 1e-5, then)
        operations.add_rms_norm(outs[1], residual, x, weight, 1e-5, then)
        operations.gate_mul(outs[2], x, then=then)
        found.append([*outs, residual])
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert one.equal(other)
    grids = [[grid for _, grid in launcher.launched[i : i + 3]] for i in range(0, 12, 3)]
    assert grids[0] == grids[2] == grids[3] == [(3, 1, 1)] * 3
    assert [rows for rows, _, _ in grids[1]] == [3] * 3
    assert all(columns > 1 for _, columns, _ in grids[1])


def test_few_rows_are_split_over_more_blocks_of_threads_in_one_launch() -> None:
    launcher = SimulatedLauncher(runs=False)
    operations = KernelOperations(launcher, SPEC, "float16", BLOCK_SIZE)
    query, pool = (
        torch.zeros(shape, dtype=torch.float16) for shape in ((3, 4, 64), (4, 2, 2, 2, 16, 64))
    )
    tables, lengths = torch.zeros((3, 200), dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    for longest in (3000, 100):
        operations.attention_decode(query, query, pool, 1, tables, lengths, longest)
    (decode, grid), (_, short_grid) = launcher.launched
    assert [decode] == [
        variant.name for variant in operations._attention._kinds[SPEC.heads].decode.values()
    ]
    assert grid[0::2] == short_grid[0::2] == (2, 3)
    assert grid[1] > 1
    assert short_grid[1] == 1


@pytest.mark.slow
def test_split_rows_have_the_bits_of_rows_that_are_not_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launcher = SimulatedLauncher()
    random = np.random.default_rng(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.from_numpy(random.standard_normal(shape, dtype=np.float32))

    query, pool = drawn(1, 4, 64), drawn(40, 2, 2, 2, BLOCK_SIZE, 64)
    tables = torch.from_numpy(random.permutation(40).astype(np.int32))[None]
    lengths, found = torch.tensor([300], dtype=torch.int32), []
    for plan_splits in (attention_decode.plan_splits, lambda *_: 1):
        monkeypatch.setattr(attention_decode, "plan_splits", plan_splits)
        operations = KernelOperations(launcher, SPEC, "float32", BLOCK_SIZE)
        found.append(torch.empty_like(query))
        operations.attention_decode(found[-1], query, pool, 1, tables, lengths, 640)
    assert found[0].equal(found[1])
    grids = [grid for _, grid in launcher.launched]
    assert grids[0][1] > 1
    assert grids[-1][1] == 1
    assert len(grids) == 2


@pytest.mark.wide
def test_rows_of_which_some_are_split_have_the_bits_of_rows_of_which_none_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One multiprocessor, so that few rows leave a last wave that is not full."""
    random = np.random.default_rng(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.from_numpy(random.standard_normal(shape, dtype=np.float32))

    launcher = SimulatedLauncher()
    launcher.num_multiprocessors = 1
    query, pool = drawn(4, 2, 64), drawn(60, 2, 2, 1, BLOCK_SIZE, 64)
    tables = torch.from_numpy(random.permutation(60).astype(np.int32).reshape(4, 15))
    lengths, found = torch.tensor([240, 1, 130, 200], dtype=torch.int32), []
    for plan_tail in (attention_decode.plan_tail, lambda *_: (1, 0)):
        monkeypatch.setattr(attention_decode, "plan_tail", plan_tail)
        spec = replace(SPEC, num_heads=2, num_kv_heads=1)
        operations = KernelOperations(launcher, spec, "float32", BLOCK_SIZE)
        found.append(torch.empty_like(query))
        operations.attention_decode(found[-1], query, pool, 1, tables, lengths, 640)
    assert found[0].equal(found[1])
    (_, split), (_, whole) = launcher.launched
    assert split == (1, 3, 1 + 1)  # a row over three blocks, and three rows of one
    assert whole == (1, 1, 4)


@pytest.mark.parametrize(
    ("changes", "dtype", "block_size", "field"),
    [
        ({"head_dim": 80}, "float32", 16, "head_size"),
        ({}, "float32", 8, "block_size"),
        ({"hidden_size": 26}, "bfloat16", 16, "hidden_size"),
        ({"intermediate_size": 36}, "float16", 16, "num_features"),
        ({"num_heads": 34}, "float32", 16, "group"),
        ({"vocab_size": 1 << 23}, "float32", 16, "vocab_size"),
    ],
)
def test_a_model_that_no_kernel_is_written_for_is_refused(
    changes: dict[str, int], dtype: str, block_size: int, field: str
) -> None:
    with pytest.raises(DeviceUnavailableError, match="kernels do not take this model") as info:
        KernelOperations(SimulatedLauncher(), replace(SPEC, **changes), dtype, block_size)
    assert info.value.field == field
