from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from kernels.cpu.kv_layout import VALUE_BYTES, KvLayout, decode_blocks, encode_blocks
from kernels.cpu.rope_write import LOG2_E
from kernels.reference.quantized_kv import LARGEST, from_float8
from kernels.reference.rope import UNCHANGED, HeadChanges, rope_write_kv
from tests.kernels.cpu.attention_driver import Setting, frequencies_of

SHAPES = [(9, 3, 64, 16), (2, 1, 2, 1), (4, 2, 40, 24), (2, 2, 80, 8), (3, 1, 30, 5)]


def drawn_changes(num_heads: int, num_kv_heads: int, head_dim: int, seed: int) -> HeadChanges:
    """Return a bias that outweighs what it is added to, and norms."""
    random = np.random.default_rng(seed)
    bias = random.standard_normal((num_heads + 2 * num_kv_heads) * head_dim, np.float32) * 8
    query, key = random.uniform(0.5, 2, (2, head_dim)).astype(np.float32)
    return HeadChanges(bias, (query, key), 1e-6)


def parts_of(changes: HeadChanges) -> dict[str, HeadChanges]:
    """Return what architectures have of them: nothing, biases, norms; and both."""
    norms = replace(changes, bias=None)
    return {
        "nothing": UNCHANGED, "biases": HeadChanges(changes.bias), "norms": norms, "both": changes,
        "norms of values, too": replace(norms, norms_values=True),
    }  # fmt: skip


def units_off(got: np.ndarray, exact: np.ndarray) -> float:
    return float((np.abs(got - exact) / np.spacing(np.abs(exact).astype(np.float32))).max())


def test_cosines_and_sines_are_within_two_units_up_to_far_positions() -> None:
    setting = Setting(KvLayout("float32", 1, 1, 16, 128), 1, 8192)
    positions = np.concatenate([np.arange(3000), np.arange(128000, 131072), [2**20, 2**24]])
    qkv = np.zeros((len(positions), 3 * 128), np.float32)
    for theta in (10000.0, 500000.0):
        frequencies = (theta ** (-np.arange(0, 128, 2) / 128)).astype(np.float32)
        _, cosines, sines = setting.rope(qkv, frequencies, positions, np.arange(len(positions)))
        angles = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)
        assert units_off(cosines, np.cos(angles)) <= 2
        # At 0 the sine is exactly 0, whose unit is that of the smallest number.
        assert units_off(sines, np.sin(angles)) <= 2


def test_cosines_and_sines_of_each_pair_are_multiplied_by_its_factor() -> None:
    setting = Setting(KvLayout("float32", 1, 1, 16, 40), 1, 8)
    positions = np.arange(100)
    qkv = np.zeros((100, 3 * 40), np.float32)
    factors = np.linspace(0.5, 1.5, 20, dtype=np.float32)
    plain, scaled = (
        setting.rope(qkv, frequencies_of(40), positions, positions, factors=each)
        for each in (1, factors)
    )
    for one, other in zip(plain[1:], scaled[1:], strict=True):
        np.testing.assert_array_equal(other, one * factors)


def test_a_pair_without_a_frequency_stays_as_it_is_at_every_position() -> None:
    setting = Setting(KvLayout("float32", 1, 1, 16, 40), 1, 8)
    frequencies = frequencies_of(40)
    frequencies[14:] = 0
    qkv = np.random.default_rng(1).standard_normal((9, 3 * 40)).astype(np.float32)
    queries, cosines, sines = setting.rope(qkv, frequencies, np.arange(9) * 1000, np.arange(9))
    assert (cosines[:, 14:] == 1).all()
    assert (sines[:, 14:] == 0).all()
    unturned = [*range(14, 20), *range(34, 40)]
    scale = np.float32(LOG2_E / np.sqrt(40))
    np.testing.assert_array_equal(queries[:, unturned], qkv[:, unturned] * scale)


@pytest.mark.parametrize("dtype", list(VALUE_BYTES))
def test_queries_grow_by_the_factor_of_their_position_and_keys_do_not(dtype: str) -> None:
    random = np.random.default_rng(4)
    layout = KvLayout(dtype, 1, 2, 16, 40)
    positions = np.array([0, 99, 100, 199, 200, 399, 350, 5])
    places = random.permutation(8 * 16)[: len(positions)]
    qkv = random.standard_normal((len(positions), (4 + 4) * 40)).astype(np.float32)
    factors = np.array([1, 2, 0.5, 4], np.float32)
    found = []
    for growth in (None, (factors, 100)):
        setting = Setting(layout, 4, 8)
        queries, *_ = setting.rope(
            qkv, frequencies_of(40), positions, places, first_token=3, chunks=3, growth=growth
        )
        found.append((queries, setting.data))
    (plain, pool), (grown, same_pool) = found
    np.testing.assert_array_equal(grown, plain * factors[[0, 0, 1, 1, 2, 3, 3, 0], None])
    np.testing.assert_array_equal(same_pool, pool)


@pytest.mark.parametrize("what", ["nothing", "biases", "norms", "both", "norms of values, too"])
@pytest.mark.parametrize("dtype", list(VALUE_BYTES))
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "block_size"), SHAPES)
def test_queries_and_the_pool_are_those_of_the_reference(
    dtype: str, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, what: str
) -> None:
    changes = parts_of(drawn_changes(num_heads, num_kv_heads, head_dim, 5))[what]
    random = np.random.default_rng(head_dim)
    layout = KvLayout(dtype, 2, num_kv_heads, block_size, head_dim)
    setting = Setting(layout, num_heads, 8)
    before = setting.data.copy()
    num_tokens = min(23, 6 * block_size)
    places = random.permutation(8 * block_size)[:num_tokens]
    positions = random.integers(0, 5000, num_tokens)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = random.standard_normal((num_tokens, width)).astype(np.float32)
    queries, cosines, sines = setting.rope(
        qkv, frequencies_of(head_dim), positions, places, layer=1, first_token=2, chunks=3,
        changes=changes,
    )  # fmt: skip
    shape = (8, 2, 2, num_kv_heads, block_size, head_dim)
    pool = np.full(shape, np.nan, np.float32)
    rotated = np.empty((num_tokens, num_heads, head_dim), np.float32)
    rope_write_kv(qkv, cosines, sines, pool, 1, places, rotated, changes)
    scale = np.float32(math.log2(math.e) / math.sqrt(head_dim))
    close = 1e-6 if changes.bias is None else 1e-5
    np.testing.assert_allclose(queries, rotated.reshape(num_tokens, -1) * scale, 0, close)
    written = ~np.isnan(pool)
    expected = decode_blocks(layout, encode_blocks(layout, np.nan_to_num(pool)))
    got = decode_blocks(layout, setting.data)
    # Rounded from values that differ in the last place: one step of the pool's type at most.
    step = {"float32": 1e-6, "bfloat16": 2.0**-7, "int8": 1 / 100, "float8": 2.0**-3}[dtype]
    difference = np.abs(got - expected)[written]
    assert (difference <= step * np.maximum(np.abs(expected[written]), 1)).all()
    assert np.mean(difference > close) < 0.02
    # Nothing else of the pool was touched, but for the padding of the tokens' own elements.
    blocks = np.unique(places // block_size)
    others = np.setdiff1d(np.arange(8), blocks)
    np.testing.assert_array_equal(setting.data[others], before[others])
    np.testing.assert_array_equal(
        setting.data[:, : layout.layer_bytes], before[:, : layout.layer_bytes]
    )


@pytest.mark.parametrize("what", ["nothing", "both"])
@pytest.mark.parametrize("dtype", list(VALUE_BYTES))
def test_a_token_is_the_same_bits_whoever_is_written_beside_it(dtype: str, what: str) -> None:
    changes = parts_of(drawn_changes(4, 2, 48, 6))[what]
    random = np.random.default_rng(1)
    layout = KvLayout(dtype, 1, 2, 16, 48)
    qkv = random.standard_normal((16, 8 * 48)).astype(np.float32)
    positions, places = np.arange(100, 116), np.arange(16)
    together, alone = Setting(layout, 4, 1), Setting(layout, 4, 1)
    queries, _, _ = together.rope(
        qkv, frequencies_of(48), positions, places, chunks=4, workers=2, changes=changes
    )
    for token in [*range(1, 16, 2), *range(0, 16, 2)]:
        one = slice(token, token + 1)
        query, _, _ = alone.rope(
            np.ascontiguousarray(qkv[one]), frequencies_of(48), positions[one], places[one],
            changes=changes,
        )  # fmt: skip
        np.testing.assert_array_equal(query[0], queries[token])
    np.testing.assert_array_equal(alone.data, together.data)


@pytest.mark.parametrize("dtype", list(LARGEST))
def test_a_row_has_the_codes_and_the_scale_of_the_specification(dtype: str) -> None:
    """At position 0 keys are as they come. Rows of all sizes, of zeros, of halves between codes."""
    layout = KvLayout(dtype, 1, 1, 16, 64)
    setting = Setting(layout, 1, 1)
    random = np.random.default_rng(7)
    qkv = random.standard_normal((16, 3 * 64)).astype(np.float32)
    qkv *= np.float32(10) ** random.integers(-6, 7, qkv.shape)
    qkv[3] *= np.float32(1e-30)
    qkv[4, 64:] = 0
    qkv[5, 64:] = 1e-42 * random.integers(-1, 2, 128)  # whose inverse is infinite
    halves = from_float8(np.arange(0x7F, dtype=np.uint8)) if dtype == "float8" else np.arange(128)
    halves = (halves[1:] + halves[:-1]).astype(np.float32) / 2
    qkv[6, 64:] = LARGEST[dtype]
    qkv[6, 65:128] = halves[:63]
    qkv[6, 129:] = -halves[63:126]
    qkv[7, [70, 150]] = np.finfo(np.float32).max  # beside which all else is nothing
    setting.rope(qkv, frequencies_of(64), np.zeros(16, np.int64), np.arange(16))
    rows = qkv[:, 64:].reshape(16, 2, 64).swapaxes(0, 1)[None, None, :, None]
    expected = encode_blocks(layout, np.ascontiguousarray(rows))
    np.testing.assert_array_equal(setting.data, expected)


@pytest.mark.parametrize("dtype", list(LARGEST))
def test_a_token_with_a_nan_or_an_infinity_poisons_its_own_values_only(dtype: str) -> None:
    layout = KvLayout(dtype, 1, 1, 16, 32)
    setting = Setting(layout, 1, 1)
    qkv = np.random.default_rng(2).standard_normal((3, 96)).astype(np.float32)
    qkv[1, 40], qkv[1, 70] = np.nan, np.inf
    setting.rope(qkv, frequencies_of(32), np.arange(3), np.arange(3))
    values = decode_blocks(layout, setting.data)[0, 0, :, 0]
    assert np.isnan(values[:, 1]).all()
    assert np.isfinite(values[:, [0, 2]]).all()
