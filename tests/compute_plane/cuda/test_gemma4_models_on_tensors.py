"""Layers of Gemma 4 on torch's CPU device: blocks of two parts, keys of others, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from compute_plane.cuda.block_pools import EIGHT_BITS, BlockPools, layer_bytes, plan_copies
from compute_plane.cuda.drivers import CpuDriver
from compute_plane.cuda.host_layers_plan import device_bytes, working_bytes
from compute_plane.cuda.layer_products import AddedNorm, Hidden
from compute_plane.cuda.model import angles_of_layers
from compute_plane.cuda.reference_blocks import read_blocks
from compute_plane.cuda.reference_operations import ReferenceOperations
from compute_plane.cuda.weight_plan import plan_weights
from compute_plane.executor.interface import BlockCopy, CopyKind
from compute_plane.executor.registry import ExecutorContext, build_executor
from compute_plane.model.heads import Heads
from compute_plane.model.spec import ModelSpec
from compute_plane.model.tensor import TensorFormat
from planes.errors import ConfigError
from tests.compute_plane.cuda.torch_executors import tiny_model, torch_executor
from tests.compute_plane.executor.tiny_llama import (
    pool_for,
    tiny_executor,
    tiny_spec,
    with_gemma4,
    with_heads_of_two_sizes,
)
from tests.compute_plane.executor.tiny_weights import tiny_weights
from tests.golden.batch_driver import BatchDriver, DrivenSequence

SPEC = with_gemma4(tiny_spec(quantisable=True))
EXPERTS = with_gemma4(tiny_spec(quantisable=True), has_experts=True)
NUM_BLOCKS, BLOCK_SIZE = 40, 16
PROMPTS = range(3, 40), [50, 51], [60], range(70, 95)
TOLERANCE = 2e-3


def context(spec: ModelSpec, tmp_path: Path, **changes: object) -> ExecutorContext:
    wants = ExecutorContext(
        spec=spec, model=tiny_model(spec), block_size=16, num_blocks=24, dtype="float32",
        kv_cache_dtype="auto", instruction_set="auto", device="cpu", max_tokens=64, num_threads=1,
        kernel_cache=tmp_path,
    )  # fmt: skip
    return replace(wants, **changes)  # type: ignore[arg-type]


def test_a_block_has_a_part_for_each_kind_of_heads() -> None:
    pools = BlockPools(
        SPEC, CpuDriver(), dtype=torch.float32, block_size=4, num_blocks=3, num_host_blocks=2
    )
    local, others = pools.parts
    # Of five layers the last two have no keys of their own.
    assert local.shape == (3, 2, 2, SPEC.num_kv_heads, 4, 16)
    assert others.shape == (3, 1, 2, 1, 4, 32)
    assert pools.device.shape == (3, local[0].numel() + others[0].numel())
    assert pools.block_bytes == 4 * pools.device.shape[1]
    pools.device.copy_(torch.arange(pools.device.numel()).view(3, -1))
    for block in range(3):
        both = torch.cat([part[block].reshape(-1) for part in pools.parts])
        assert torch.equal(both, pools.device[block])


def test_a_copy_of_a_block_is_one_of_all_its_parts() -> None:
    pools = BlockPools(
        SPEC, CpuDriver(), dtype=torch.float32, block_size=4, num_blocks=3, num_host_blocks=2
    )
    pools.device.normal_(generator=torch.Generator().manual_seed(1))
    before = [part.clone() for part in pools.parts]
    copies = plan_copies(
        [
            BlockCopy(0, 2),
            BlockCopy(1, 1, CopyKind.SWAP_OUT),
            BlockCopy(1, 0, CopyKind.SWAP_IN),
        ]
    )
    pools.run(copies, torch.from_numpy(copies.pairs), ReferenceOperations())
    for part, old in zip(pools.parts, before, strict=True):
        assert torch.equal(part, old[[1, 1, 0]])
    assert pools.digest(0) == pools.digest(1) != pools.digest(2)


@pytest.mark.parametrize("pool_dtype", EIGHT_BITS)
def test_parts_of_blocks_may_have_eight_bits(pool_dtype: torch.dtype) -> None:
    written = []
    for dtype in (torch.float32, pool_dtype):
        made = torch_executor(SPEC, pool_dtype=dtype, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        driver = BatchDriver(made, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        sequence = DrivenSequence(list(PROMPTS[0])[:BLOCK_SIZE])
        assert not made.execute(driver.batch([sequence])).failed_rows
        written.append(
            [
                read_blocks(part, 0, np.array(sequence.blocks), heads.head_dim)
                for part, heads in zip(made._pools.parts, SPEC.kinds_of_heads, strict=True)
            ]
        )
    # Layer 0 and layer 1, which reads what attention to eight bits gives.
    for (exact, found), allowed in zip(zip(*written, strict=True), (0.05, 0.3), strict=True):
        error = np.abs(found - exact).max(axis=-1) / np.abs(exact).max(axis=-1)
        assert 1e-4 < error.max() < allowed


@pytest.mark.parametrize("kind", ["inputs", "experts"])
def test_whole_and_in_chunks_it_says_what_the_cpu_executor_says(kind: str) -> None:
    spec = SPEC if kind == "inputs" else EXPERTS
    sequences = [DrivenSequence(list(prompt)) for prompt in PROMPTS]
    pool = pool_for(spec, NUM_BLOCKS, BLOCK_SIZE)
    with tiny_executor(spec, tiny_weights(spec), pool, dtype="float32", keep_logits=True) as cpu:
        driver = BatchDriver(cpu, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        expected = cpu.execute(driver.batch(sequences)).logits
    assert expected is not None
    for chunk in (None, 9):
        made = torch_executor(spec, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, keep_logits=True)
        driver = BatchDriver(made, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        left = [DrivenSequence(list(prompt)) for prompt in PROMPTS]
        found: dict[int, np.ndarray] = {}
        while left:
            batch = driver.batch(left, chunk)
            output = made.execute(batch)
            assert output.logits is not None
            for row, logits in zip(batch.sampled_rows, output.logits, strict=True):
                found[left[row].tokens[0]] = logits
            for sequence, length in zip(left, batch.seq_lens, strict=True):
                sequence.num_computed = int(length)
            left = [one for one in left if one.num_computed < len(one.tokens)]
        logits = np.array([found[prompt[0]] for prompt in PROMPTS])
        np.testing.assert_allclose(logits, expected, atol=TOLERANCE)
        assert np.abs(expected).max() > 1


def test_layers_turn_by_the_angles_of_their_heads_and_those_alike_share_them() -> None:
    angles = angles_of_layers(SPEC, 30, torch.device("cpu"))
    assert [cosines.shape[1] for cosines, _ in angles] == [8, 16, 8, 8, 16]
    assert angles[0] is angles[2] is angles[3]
    assert angles[1] is angles[4]
    assert angles[1][1][1:, 4:].abs().max() < 1e-5 < angles[1][1][1:, :4].abs().min()


def test_layers_have_the_memory_of_their_own_heads_and_inputs_are_counted() -> None:
    plan = plan_weights(SPEC, tiny_model(SPEC).source, "float32")
    of_layers = {Heads(6, 2, 16): 10**6, Heads(6, 1, 32): 10**7}
    counted = device_bytes(SPEC, plan, item_bytes=4, layer_bytes=of_layers, max_tokens=8)
    own = [layer.num_bytes for layer in plan.layers]
    blocks = [10**6, 10**7, 10**6, 0, 0]
    assert list(counted.layers) == [a + b for a, b in zip(own, blocks, strict=True)]
    width = SPEC.num_layers * SPEC.layer_input_size
    second = 4 * (width * (SPEC.vocab_size + SPEC.hidden_size) + SPEC.layer_input_size)
    assert plan.layer_inputs_bytes == second
    working = working_bytes(SPEC, 4, 8)
    assert counted.first == plan.embedding.num_bytes + second + working
    without = working_bytes(replace(SPEC, layer_input_size=0), 4, 8)
    assert working >= without + 4 * 8 * width
    sizes = layer_bytes(SPEC, torch.int8, 16, 3)
    assert sizes == {
        heads: 3 * 2 * heads.num_kv_heads * 16 * (heads.head_dim + 4) for heads in of_layers
    }


@pytest.mark.parametrize("what", ["keys of earlier layers", "inputs"])
def test_a_model_whose_layers_read_what_others_have_is_not_cut(what: str, tmp_path: Path) -> None:
    spec = replace(SPEC, kv_sources=(), late_mlp_size=None)
    if what != "inputs":
        spec = replace(SPEC, layer_input_size=0)
    spec = replace(spec, num_parameters=1)
    wants = context(spec, tmp_path, gpu_memory_limit=129 << 20)
    with pytest.raises(ConfigError, match=r"^gpu_memory_limit: .* as a whole, .* at least 0\.1\d+"):
        build_executor("cuda", wants)
    build_executor("cuda", replace(wants, gpu_memory_limit=1 << 30))


@pytest.mark.parametrize("kv_dtype", ["int8", "float8"])
def test_large_heads_are_not_kept_in_eight_bits(kv_dtype: str, tmp_path: Path) -> None:
    spec = with_heads_of_two_sizes(tiny_spec(head_dim=256))
    with pytest.raises(ConfigError, match=r"^kv_cache_dtype: .* heads of 512 elements .* float32"):
        build_executor("cuda", context(spec, tmp_path, kv_cache_dtype=kv_dtype))


def test_all_its_matrices_may_be_quantised() -> None:
    """Second embedding, what inputs go through, shared experts and those of tokens."""
    for spec in (SPEC, EXPERTS):
        made = torch_executor(spec, formats={"": TensorFormat.Q8_0}, keep_logits=True)
        driver = BatchDriver(made, num_blocks=260, block_size=4)
        output = made.execute(driver.batch([DrivenSequence(list(range(3, 12)))]))
        assert not output.failed_rows
        assert output.logits is not None
        assert 0.5 < np.abs(output.logits).max() < 5


def test_a_stream_on_its_way_elsewhere_has_its_factor() -> None:
    rows, added = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[3.0, 4.0], [1.0, 1.0]])
    hidden = Hidden(rows, added, AddedNorm(torch.tensor([2.0, 1.0]), 0.0))
    hidden.multiply(0.5)
    normed = added / added.square().mean(1, keepdim=True).sqrt() * torch.tensor([2.0, 1.0])
    expected = (rows + normed) / 2
    torch.testing.assert_close(hidden.sums(), expected)
    torch.testing.assert_close(hidden.rows(torch.tensor([1])).sums(), expected[1:])
    plain = Hidden(rows, added)
    plain.multiply(0.5)
    torch.testing.assert_close(plain.sums(), (rows + added) / 2)
    with pytest.raises(ValueError, match="only while something is beside it"):
        Hidden(rows).multiply(0.5)
