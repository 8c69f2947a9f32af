"""Blocks are shared, copied and swapped by every executor alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from compute_plane.executor.interface import BlockCopy, CopyKind, GPUExecutor
from tests.compute_plane.cuda.cut_executors import BLOCK_SIZE, NUM_BLOCKS, SPEC, cut_executor
from tests.compute_plane.cuda.torch_executors import torch_executor
from tests.compute_plane.executor.tiny_llama import pool_for, tiny_executor
from tests.compute_plane.executor.tiny_weights import tiny_weights
from tests.golden.batch_driver import BatchDriver, DrivenSequence


@pytest.fixture(params=["cpu", "cuda", "layers on the host"])
def executor(request) -> Iterator[GPUExecutor]:
    """One over a pool of NaN with four blocks of a host pool."""
    with ExitStack() as resources:
        if request.param == "cpu":
            pool = pool_for(SPEC, NUM_BLOCKS, BLOCK_SIZE, num_host_blocks=4)
            cpu = tiny_executor(SPEC, tiny_weights(SPEC), pool, keep_logits=True)
            yield resources.enter_context(cpu)
        elif request.param == "cuda":
            yield torch_executor(
                SPEC, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_host_blocks=4,
                keep_logits=True,
            )  # fmt: skip
        else:
            cut = cut_executor(num_host_blocks=4)
            resources.callback(cut.close)
            yield cut


@pytest.fixture
def driver(executor: GPUExecutor) -> BatchDriver:
    return BatchDriver(executor, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, SPEC.vocab_size, length).tolist()


def test_rows_may_share_a_block_that_one_of_them_fills_in_the_same_step(
    driver: BatchDriver,
) -> None:
    tokens = prompt(5, 11)
    [expected] = driver.generate([DrivenSequence(list(tokens))], 1)
    filler, reader = DrivenSequence(list(tokens[:8])), DrivenSequence(list(tokens))
    filler.blocks = [driver.free.pop(), driver.free.pop()]
    reader.blocks, reader.num_computed = list(filler.blocks), 8
    for order in ([filler, reader], [reader, filler]):  # the reader's row may come first
        output = driver.executor.execute(driver.batch(order))
        assert output.next_tokens[order.index(reader)] == expected[0]


def test_a_copied_block_serves_a_fork_and_leaves_the_original_alone(driver: BatchDriver) -> None:
    parent = DrivenSequence(prompt(6, 6))
    driver.generate([parent], 1)
    fork = DrivenSequence([*parent.tokens[:-1], parent.tokens[-1] ^ 1], num_computed=6)
    fork.blocks = [parent.blocks[0], driver.free.pop()]
    copy = BlockCopy(source=parent.blocks[1], destination=fork.blocks[1])
    together = driver.executor.execute(replace(driver.batch([parent, fork]), copies=[copy]))
    for row, sequence in enumerate((parent, fork)):
        [alone] = driver.generate([DrivenSequence(list(sequence.tokens))], 1)
        assert together.next_tokens[row] == alone[0]


def test_a_sequence_goes_on_bit_for_bit_from_blocks_that_were_swapped_out_and_in(
    driver: BatchDriver,
) -> None:
    logits = []
    for is_swapped in (False, True):
        sequence = DrivenSequence(prompt(7, 7))
        driver.generate([sequence], 1)
        copies = []
        if is_swapped:
            olds, sequence.blocks = sequence.blocks, [driver.free.pop(), driver.free.pop()]
            places = list(zip(olds, (3, 1), sequence.blocks, strict=True))
            copies = [BlockCopy(old, host, CopyKind.SWAP_OUT) for old, host, _ in places]
            copies += [BlockCopy(0, old) for old in olds]  # what was there is gone
            copies += [BlockCopy(host, new, CopyKind.SWAP_IN) for _, host, new in places]
        output = driver.executor.execute(replace(driver.batch([sequence]), copies=copies))
        assert output.logits is not None
        logits.append(output.logits.tobytes())
    assert logits[0] == logits[1]
