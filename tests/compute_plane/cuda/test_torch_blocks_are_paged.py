"""Where blocks lie changes no bit; copies and swaps move them bit for bit, in order."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from compute_plane.cuda.block_pools import BlockPools, plan_copies
from compute_plane.cuda.drivers import CpuDriver
from compute_plane.cuda.reference_operations import ReferenceOperations
from compute_plane.executor.interface import BlockCopy, CopyKind
from tests.compute_plane.cuda.torch_executors import SPEC, torch_executor
from tests.golden.batch_driver import BatchDriver, DrivenSequence

NUM_BLOCKS, NUM_HOST_BLOCKS = 6, 3


def pools_of_random_bytes(seed: int) -> BlockPools:
    pools = BlockPools(
        SPEC, CpuDriver(), dtype=torch.bfloat16, block_size=2, num_blocks=NUM_BLOCKS,
        num_host_blocks=NUM_HOST_BLOCKS,
    )  # fmt: skip
    random = np.random.default_rng(seed)
    for pool in (pools.device, pools.host):
        content = random.integers(0, 1 << 16, tuple(pool.shape), dtype=np.uint16)
        pool.view(torch.int16).copy_(torch.from_numpy(content.view(np.int16)))
    return pools


def block_copies() -> st.SearchStrategy[list[BlockCopy]]:
    device, host = st.integers(0, NUM_BLOCKS - 1), st.integers(0, NUM_HOST_BLOCKS - 1)
    kinds = {
        CopyKind.WITHIN: (device, device),
        CopyKind.SWAP_OUT: (device, host),
        CopyKind.SWAP_IN: (host, device),
    }
    runs = [
        st.lists(st.builds(BlockCopy, *ends, st.just(kind)), min_size=1, max_size=4)
        for kind, ends in kinds.items()
    ]
    some = st.lists(st.one_of(runs), max_size=5)
    return some.map(lambda drawn: [copy for run in drawn for copy in run])


@settings(max_examples=100, deadline=None)
@given(block_copies())
@example([BlockCopy(1, 5), BlockCopy(5, 3)])
@example([BlockCopy(1, 5), BlockCopy(4, 1)])
@example([BlockCopy(1, 5), BlockCopy(2, 5)])
def test_waves_of_copies_leave_what_one_copy_after_the_other_leaves(
    copies: list[BlockCopy],
) -> None:
    pools = pools_of_random_bytes(1)
    device, host = (pool.view(torch.int16).numpy().copy() for pool in (pools.device, pools.host))
    for copy in copies:
        source = host if copy.kind is CopyKind.SWAP_IN else device
        target = host if copy.kind is CopyKind.SWAP_OUT else device
        target[copy.destination] = source[copy.source]
    plan = plan_copies(copies)
    pairs = plan.pairs.copy()
    for wave in plan.waves:  # the copies of a wave happen in no order
        if wave.kind is CopyKind.WITHIN:
            pairs[wave.first : wave.end] = pairs[wave.first : wave.end][::-1]
    pools.run(plan, torch.from_numpy(pairs), ReferenceOperations())
    np.testing.assert_array_equal(pools.device.view(torch.int16), device)
    np.testing.assert_array_equal(pools.host.view(torch.int16), host)


def test_a_wave_ends_only_where_copies_of_one_kind_meet() -> None:
    within = [BlockCopy(*pair) for pair in ((1, 5), (2, 6), (5, 7), (8, 2), (9, 1))]
    swaps = [BlockCopy(1, 5, CopyKind.SWAP_OUT), BlockCopy(2, 1, CopyKind.SWAP_OUT)]
    waves = [(wave.first, wave.end) for wave in plan_copies([*within, *swaps]).waves]
    assert waves == [(0, 2), (2, 5), (5, 7)]


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**16), st.lists(st.integers(1, 30), min_size=1, max_size=5))
def test_the_same_step_in_other_blocks_has_the_same_bits(seed: int, lengths: list[int]) -> None:
    random = np.random.default_rng(seed)
    rows = [random.integers(0, SPEC.vocab_size, length).tolist() for length in lengths]
    found = []
    for placing, block_size in ((0, 4), (seed, 4), (1, 8)):
        executor = torch_executor(keep_logits=True, block_size=block_size)
        driver = BatchDriver(executor, num_blocks=260, block_size=block_size, seed=placing)
        sequences = [DrivenSequence(list(row)) for row in rows]
        logits = []
        for _ in range(2):  # a prefill, then a decode
            batch = driver.batch(sequences)
            output = executor.execute(batch)
            driver.commit(sequences, batch, output)
            assert output.logits is not None
            logits.append(output.logits.tobytes())
        found.append(logits)
    assert found[0] == found[1] == found[2]
