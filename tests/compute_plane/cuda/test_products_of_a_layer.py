"""A layer's products of few rows are one launch each, and give what several launches give."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench.gpu.cases.quantized_matmul import draw_matrix
from compute_plane.cuda.dense_kernels import MOST_ROWS
from compute_plane.cuda.layer_products import Hidden, LayerProducts
from compute_plane.cuda.matrices import Projection, QuantizedMatrix
from kernels.cuda.quantized_formats import GATE_TURN, packed_bytes
from kernels.cuda.quantized_layout import pack_matrix
from kernels.cuda.quantized_matrix import QuantizedMatrix as StoredMatrix
from tests.compute_plane.cuda.noted_products import (
    EPS,
    FEATURES,
    SIZE,
    VOCAB,
    Recording,
    dense,
    drawn,
)


def a_layer(operations: Recording, num_rows: int, dtype: torch.dtype = torch.float32):
    """Run what a layer does with its products; return what comes out, and the calls of each."""
    products = LayerProducts(operations, EPS)
    hidden = Hidden(drawn(num_rows, SIZE, dtype=dtype))
    norm, found, calls = drawn(SIZE, dtype=dtype), [], []
    for _ in range(2):
        found.append(products.normed(hidden, norm, dense(SIZE * 2, SIZE, dtype)))
        calls.append(operations.take())
        products.add(hidden, found[-1][:, :SIZE].contiguous(), dense(SIZE, SIZE, dtype))
        calls.append(operations.take())
        down = dense(SIZE, FEATURES, dtype)
        found.append(products.gated(hidden, norm, dense(2 * FEATURES, SIZE, dtype), down))
        calls.append(operations.take())
        products.add(hidden, found[-1], down)
        calls.append(operations.take())
    found.append(products.logits(hidden, norm, dense(VOCAB, SIZE, dtype)))
    calls.append(operations.take())
    return found, calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_few_rows_are_one_launch_each_and_give_what_several_give(dtype):
    found, calls = a_layer(Recording(), MOST_ROWS, dtype)
    expected, others = a_layer(Recording(most_rows=0), MOST_ROWS, dtype)

    assert calls == [["dense_matmul"]] * 9
    layer = [[], ["add_rms_norm", "gate_mul"], []]
    assert others == [["rms_norm"], *layer, ["add_rms_norm"], *layer, ["add_rms_norm"]]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert one.equal(other)
    assert found[-1].dtype == torch.float32


@pytest.mark.parametrize("num_parts", [2, 4])
def test_a_product_in_parts_is_summed_by_the_norm_that_adds_it(num_parts):
    """In bfloat16 it is nearer to float32 than a product that was rounded first."""
    found, calls = a_layer(Recording(most_rows=0, num_parts=num_parts), 20)
    expected, others = a_layer(Recording(most_rows=0), 20)

    assert calls == others
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)

    halves, _ = a_layer(Recording(most_rows=0, num_parts=num_parts), 20, torch.bfloat16)
    whole, _ = a_layer(Recording(most_rows=0), 20, torch.bfloat16)
    torch.testing.assert_close(halves[0], whole[0])  # nothing was added yet
    torch.testing.assert_close(halves[-1], whole[-1], atol=0.5, rtol=0.05)
    for one in halves:
        assert one.dtype == (torch.float32 if one is halves[-1] else torch.bfloat16)


def test_norm_and_gate_are_told_what_the_library_multiplies_with_behind_them():
    operations = Recording(most_rows=3, num_parts=2)
    products = LayerProducts(operations, EPS)
    qkv, gate_up, down = dense(48, SIZE), dense(2 * FEATURES, SIZE), dense(SIZE, FEATURES)
    for num_rows in (3, 4):
        hidden = Hidden(drawn(num_rows, SIZE))
        products.normed(hidden, drawn(SIZE), qkv)
        products.gated(hidden, drawn(SIZE), gate_up, down)
        products.logits(hidden, drawn(SIZE), Projection((*qkv.parts, *gate_up.parts)))

    told = [(one.weight.shape, one.num_parts) for one in operations.told]
    assert told == [((48, SIZE), 1), ((2 * FEATURES, SIZE), 1), ((SIZE, FEATURES), 2)]

    operations.told.clear()
    added = Hidden(drawn(3, SIZE), drawn(3, SIZE))  # which no product of ours normalises
    products.normed(added, drawn(SIZE), qkv)
    assert operations.take()[-1] == "add_rms_norm"
    assert [one.weight.shape for one in operations.told] == [(48, SIZE)]


def test_parts_beside_the_stream_are_chosen_and_summed_by_row():
    parts, residual = drawn(2, 5, SIZE), drawn(5, SIZE)
    hidden = Hidden(residual, parts).rows(torch.tensor([3, 1]))
    assert hidden.sums().equal((residual + parts.sum(0))[[3, 1]])


def test_more_rows_than_the_kernels_share_go_to_the_library():
    assert a_layer(Recording(), MOST_ROWS + 1)[1] == a_layer(Recording(most_rows=0), 1)[1]


def test_where_a_product_does_not_normalise_the_norm_goes_before_it():
    found, calls = a_layer(Recording(normalises=False), 3)
    expected, _ = a_layer(Recording(most_rows=0), 3)

    normed, added = ["rms_norm", "dense_matmul"], ["dense_matmul"]
    assert calls == [normed, added] * 4 + [normed]
    for one, other in zip(found, expected, strict=True):
        assert one.equal(other)


@pytest.mark.parametrize(
    ("num_rows", "expected"), [(3, ["quantized_gate"]), (4, ["quantized_matmul", "gate_mul"])]
)
def test_a_quantised_gate_is_one_launch_with_its_product_of_few_rows(
    num_rows: int, expected: list[str]
) -> None:
    matrix = draw_matrix(np.random.default_rng(7), "Q8_0", 2 * FEATURES, SIZE // 32)
    places = np.arange(2 * FEATURES).reshape(2, -1, GATE_TURN).swapaxes(0, 1).reshape(-1)
    stored = StoredMatrix(matrix.quants[places], matrix.scales[places])
    packed, order = torch.from_numpy(pack_matrix("Q8_0", stored)), torch.arange(SIZE).flip(0).int()
    gate = QuantizedMatrix("Q8_0", packed, 2 * FEATURES, SIZE, order, in_turns=True)
    operations, norm = Recording(most_rows=0, gated_rows=3), torch.ones(SIZE)
    hidden = Hidden(drawn(num_rows, SIZE))

    down = dense(SIZE, FEATURES)
    found = LayerProducts(operations, EPS).gated(hidden, norm, Projection((gate,)), down)

    assert operations.take() == ["rms_norm", *expected]
    normed = torch.nn.functional.rms_norm(hidden.residual, (SIZE,), norm, EPS).flip(1)
    weights = torch.from_numpy(matrix.quants * np.repeat(matrix.scales.astype("f4"), 32, axis=1))
    gates, ups = (normed @ weights.t()).split(FEATURES, dim=1)
    torch.testing.assert_close(found, torch.nn.functional.silu(gates) * ups, atol=1e-4, rtol=1e-4)


def test_a_quantised_matrix_between_dense_ones_leaves_its_sum_to_the_next_norm():
    operations = Recording()
    products = LayerProducts(operations, EPS)
    packed = torch.zeros(packed_bytes("Q8_0", SIZE, SIZE), dtype=torch.uint8)
    quantised = Projection((QuantizedMatrix("Q8_0", packed, SIZE, SIZE),))
    start, norm, x = drawn(3, SIZE), drawn(SIZE), drawn(3, SIZE)
    hidden = Hidden(start.clone())
    products.add(hidden, x, quantised)
    assert hidden.added is not None
    hidden.added = drawn(3, SIZE) * 2  # for zeros would show nothing
    added = hidden.added

    first = products.normed(hidden, norm, dense(VOCAB, SIZE))

    assert operations.take() == ["quantized_matmul", "add_rms_norm"]
    assert hidden.added is None
    assert hidden.residual.equal(start + added)
    again = products.normed(hidden, norm, dense(VOCAB, SIZE))
    assert operations.take() == ["dense_matmul"]
    assert again.equal(first)


def test_what_is_beside_the_stream_is_not_lost_to_a_second_product():
    hidden = Hidden(drawn(3, SIZE), drawn(3, SIZE))

    with pytest.raises(ValueError, match="added after a norm"):
        LayerProducts(Recording(), EPS).add(hidden, drawn(3, SIZE), dense(SIZE, SIZE))


def test_rows_of_the_stream_are_copies_with_what_is_beside_them():
    hidden = Hidden(drawn(4, SIZE), drawn(4, SIZE) + 1)
    rows = hidden.rows(torch.tensor([3, 1]))

    assert rows.residual.equal(hidden.residual[[3, 1]])
    assert rows.added is not None
    assert hidden.added is not None
    assert rows.added.equal(hidden.added[[3, 1]])
    assert Hidden(hidden.residual).rows(torch.tensor([0])).added is None


def test_what_is_normalised_before_it_is_added_has_a_norm_that_adds_it():
    """Then no product has the norm ahead of it in itself, nor the addition behind it."""
    norms = drawn(3, SIZE) + 2
    gate_up, down = dense(2 * FEATURES, SIZE), dense(SIZE, FEATURES)
    found, calls = [], []
    for operations in (Recording(normalises=False), Recording(most_rows=0)):
        products, hidden = LayerProducts(operations, EPS), Hidden(drawn(4, SIZE))
        x = products.normed(hidden, norms[0], dense(SIZE, SIZE))
        products.add(hidden, x, dense(SIZE, SIZE), norms[1])
        gated = products.gated(hidden, norms[0], gate_up, down)
        products.add(hidden, gated, down, norms[2])
        some = hidden.rows(torch.tensor([2, 0]))
        calls.append(operations.take())
        found.append((some.sums(), products.normalised(some, norms[0]), some))

    few = ["rms_norm", "dense_matmul", "dense_matmul", "add_rms_norm", "dense_matmul"]
    assert calls == [[*few, "dense_matmul"], ["rms_norm", "add_rms_norm", "gate_mul"]]
    rms_norm = torch.nn.functional.rms_norm
    stream = drawn(4, SIZE)
    x = rms_norm(stream, (SIZE,), norms[0], EPS) @ dense(SIZE, SIZE).parts[0].values.t()
    stream = stream + rms_norm(x @ dense(SIZE, SIZE).parts[0].values.t(), (SIZE,), norms[1], EPS)
    both = rms_norm(stream, (SIZE,), norms[0], EPS) @ gate_up.parts[0].values.t()
    gates, ups = both.split(FEATURES, dim=1)
    x = torch.nn.functional.silu(gates) * ups @ down.parts[0].values.t()
    stream = stream + rms_norm(x, (SIZE,), norms[2], EPS)
    for sums, normed, hidden in found:
        torch.testing.assert_close(sums, stream[[2, 0]], atol=1e-4, rtol=1e-4)
        expected = rms_norm(stream[[2, 0]], (SIZE,), norms[0], EPS)
        torch.testing.assert_close(normed, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(hidden.residual, stream[[2, 0]], atol=1e-4, rtol=1e-4)
        assert hidden.added is hidden.norm is None


def test_without_a_norm_ahead_the_stream_itself_is_multiplied():
    """As EXAONE 4 has it; what is beside the stream is added before, once."""
    norms = drawn(2, SIZE) + 2
    gate_up, down = dense(2 * FEATURES, SIZE), dense(SIZE, FEATURES)
    found, calls = [], []
    for operations in (Recording(normalises=True), Recording(most_rows=0)):
        products, hidden = LayerProducts(operations, EPS), Hidden(drawn(4, SIZE))
        x = products.normed(hidden, None, dense(SIZE, SIZE))
        products.add(hidden, x, dense(SIZE, SIZE), norms[0])
        gated = products.gated(hidden, None, gate_up, down)
        assert hidden.added is hidden.norm is None
        products.add(hidden, gated, down, norms[1])
        calls.append(operations.take())
        found.append(hidden.sums())

    few = ["dense_matmul", "dense_matmul", "add_rms_norm", "dense_matmul", "dense_matmul"]
    assert calls == [few, ["add_rms_norm", "gate_mul"]]
    rms_norm, stream = torch.nn.functional.rms_norm, drawn(4, SIZE)
    matrix = dense(SIZE, SIZE).parts[0].values
    stream = stream + rms_norm(stream @ matrix.t() @ matrix.t(), (SIZE,), norms[0], EPS)
    gates, ups = (stream @ gate_up.parts[0].values.t()).split(FEATURES, dim=1)
    x = torch.nn.functional.silu(gates) * ups @ down.parts[0].values.t()
    stream = stream + rms_norm(x, (SIZE,), norms[1], EPS)
    for sums in found:
        torch.testing.assert_close(sums, stream, atol=1e-4, rtol=1e-4)
