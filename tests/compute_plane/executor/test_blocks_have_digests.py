from __future__ import annotations

from dataclasses import replace

import pytest

from compute_plane.errors import InvalidBatch
from tests.compute_plane.executor.slot_batches import Plane, start, step
from tests.compute_plane.executor.tiny_llama import pool_for, tiny_executor, tiny_spec
from tests.compute_plane.executor.tiny_weights import tiny_weights
from tests.golden.batch_driver import BatchDriver, DrivenSequence


def digests(plane: Plane, slot: int, text: bytes, blocks: list[int]) -> list[int]:
    batch = step([(slot, 0, len(text))], starts=[start(slot, text, blocks)], digest_blocks=blocks)
    return list(plane.run(batch).block_digests)


def test_blocks_of_equal_content_have_equal_digests_and_others_not():
    plane = Plane()
    first, second = digests(plane, 0, b"sameother", [0, 1, 2]), digests(plane, 1, b"same", [9, 8])
    assert first[0] == second[0]
    assert first[0] != first[1]
    assert plane.tokens(step([(1, 4, 1)])) != []
    again = plane.run(step([(0, 9, 1)], digest_blocks=[9, 0])).block_digests
    assert list(again) == [first[0], first[0]]


def test_a_digest_needs_a_block_of_the_pool_and_a_step_that_runs():
    plane = Plane()
    with pytest.raises(InvalidBatch, match="must be below 64") as refusal:
        digests(plane, 0, b"text", [64])
    assert refusal.value.field == "digest_blocks[0]"
    with pytest.raises(InvalidBatch, match="step with rows"):
        plane.run(step(digest_blocks=[0]))


def test_the_cpu_executor_writes_equal_blocks_in_any_place_and_company():
    spec = tiny_spec(quantisable=True)
    seen = []
    for num_blocks, company in ((40, 0), (80, 5)):
        pool = pool_for(spec, num_blocks, 16, "bfloat16")
        pool.data[:] = 0
        with tiny_executor(spec, tiny_weights(spec), pool) as executor:
            driver = BatchDriver(executor, num_blocks=num_blocks, block_size=16, seed=company)
            prompt = [(7 * i) % spec.vocab_size for i in range(32)]
            others = [DrivenSequence([i + 1] * 20) for i in range(company)]
            batch = driver.batch([*others, mine := DrivenSequence(prompt)])
            output = executor.execute(replace(batch, digest_blocks=mine.blocks))
            seen.append(list(output.block_digests))
    assert seen[0] == seen[1]
    assert seen[0][0] != seen[0][1]
