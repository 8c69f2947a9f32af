"""Products of experts: each row meets its expert's weights, to the bits of a product alone."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from kernels.cpu.catalogue import INT8_PRODUCTS, expert_product
from kernels.cpu.int8_sizes import int8_scratch_bytes
from kernels.cpu.operands import ExpertProduct, Product
from kernels.cpu.operation import CHUNKS, KERNEL, RECORD_WORDS, StepWord
from kernels.cpu.routing_sizes import EXPERT_CALL_BYTES
from tests.kernels.cpu.operation_calls import (
    BEHIND_SCRATCH,
    Int8Rows,
    packed_weights,
    product,
    quantised,
    random_blocks,
    run,
    step_header,
)
from tests.kernels.cpu.routing_driver import Mixture, drawn

LABELS = ["Q4_1", "Q8_0", "Q4_0"]
K, N, EXPERTS = 96, 400, 9
UNTOUCHED = np.float32(-3.5)


def weights_of(label: str) -> np.ndarray:
    """Return the packed weights of all experts, [EXPERTS, bytes]."""
    random = np.random.default_rng(5)
    blocks = [random_blocks(label, N, K, random) for _ in range(EXPERTS)]
    packed = np.stack([packed_weights(label, rows, K) for rows in blocks])
    aligned = np.zeros(packed.nbytes + 64, np.uint8)
    at = -aligned.ctypes.data % 64
    out = aligned[at : at + packed.nbytes].reshape(packed.shape)
    out[:] = packed
    return out


def multiply(
    label: str, mixture: Mixture, rows: Int8Rows, weights: np.ndarray, chunks: Iterable[int],
    parts: int,
) -> np.ndarray:  # fmt: skip
    num_rows = mixture.num_tokens * mixture.per_token
    out = np.full((num_rows + 2, N + 5), UNTOUCHED, np.float32)
    shared, record = np.zeros(RECORD_WORDS, np.int64), np.zeros(RECORD_WORDS, np.int64)
    shared[KERNEL], shared[CHUNKS] = INT8_PRODUCTS[label].address, parts
    shared[Product.INPUT] = rows.values.ctypes.data
    shared[Product.INPUT_SCALES] = rows.scales.ctypes.data
    shared[Product.INPUT_SCALED_SUMS] = rows.scaled_sums.ctypes.data
    shared[Product.INPUT_SUMS] = rows.sums.ctypes.data
    shared[Product.INPUT_PAIR_SUMS] = rows.pair_sums.ctypes.data
    shared[Product.INPUT_BEGINS] = rows.begins.ctypes.data
    shared[Product.WEIGHTS] = weights.ctypes.data
    shared[Product.K], shared[Product.N] = K, N
    shared[Product.OUT], shared[Product.OUT_STRIDE] = out.ctypes.data, out.shape[1]
    shared[Product.ROWS_WORD] = StepWord.NUM_TOKENS
    shared[Product.OUT_FIRST_WORD] = StepWord.ZERO
    record[ExpertProduct.RECORD] = shared.ctypes.data
    record[ExpertProduct.RUNS] = mixture.runs.ctypes.data
    record[ExpertProduct.WEIGHTS_BYTES] = weights.shape[1]
    record[ExpertProduct.INPUT_BYTES], record[ExpertProduct.GROUP_BYTES] = K, 4 * (K // 32)
    record[ExpertProduct.OUT_BYTES] = 4 * out.shape[1]
    header, _ = step_header(mixture.num_tokens, K)
    size = -(-(int8_scratch_bytes(K) + EXPERT_CALL_BYTES) // 64) * 64
    scratch = np.full(64 + size + BEHIND_SCRATCH, 0xFF, np.uint8)
    scratch = scratch[-scratch.ctypes.data % 64 :][: size + BEHIND_SCRATCH]
    header[StepWord.SCRATCH], header[StepWord.SCRATCH_BYTES] = scratch.ctypes.data, size
    shared_before, header_before = shared.copy(), header.copy()
    run(expert_product, record, header, chunks)
    np.testing.assert_array_equal(shared, shared_before)
    np.testing.assert_array_equal(header, header_before)
    assert (scratch[size:] == 0xFF).all()
    assert (out[num_rows:] == UNTOUCHED).all()
    assert (out[:, N:] == UNTOUCHED).all()
    return out[:num_rows, :N]


@pytest.mark.spread(24)
@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize(("tokens", "per_token"), [(1, 1), (1, 3), (7, 2), (40, 3), (70, 9)])
@pytest.mark.parametrize(("chunks", "parts"), [(1, 1), (1, 4), (5, 4), (40, 3), (7, 8), (5, 12)])
def test_rows_have_the_bits_that_they_have_alone_with_their_expert(
    label: str, tokens: int, per_token: int, chunks: int, parts: int
) -> None:
    """Chunks of one part and of several experts, in an order that is not theirs."""
    mixture = drawn(tokens, EXPERTS, per_token).routed()
    num_rows = tokens * per_token
    random = np.random.default_rng(tokens)
    rows = quantised(random.standard_normal((num_rows, K), np.float32))
    weights = weights_of(label)
    found = multiply(label, mixture, rows, weights, range(chunks)[::-1], parts)
    experts = np.empty(num_rows, np.int32)
    experts[mixture.places[:tokens]] = mixture.chosen[:tokens]
    for row in range(num_rows):
        expected = np.empty((1, N), np.float32)
        product(label, weights[experts[row]], rows.rows(row, row + 1), 1, N, expected)
        np.testing.assert_array_equal(found[row], expected[0])


def test_experts_without_rows_are_not_looked_at() -> None:
    mixture = drawn(4, EXPERTS, 1)
    mixture.logits[:, 6] = 100
    mixture.routed()
    weights = weights_of("Q4_1")
    weights[np.arange(EXPERTS) != 6] = 0xFF  # NaN
    rows = quantised(np.random.default_rng(0).standard_normal((4, K), np.float32))
    assert np.isfinite(multiply("Q4_1", mixture, rows, weights, range(5), 4)).all()
