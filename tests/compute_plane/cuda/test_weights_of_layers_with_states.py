"""What layers with states are multiplied with, and attention's gates: as few products as can be."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from compute_plane.cuda.dense_kernels import DenseKernels
from compute_plane.cuda.layer_products import Hidden, LayerProducts
from compute_plane.cuda.matrices import DenseMatrix, Projection, QuantizedMatrix
from compute_plane.cuda.weight_plan import plan_weights
from compute_plane.cuda.weights import (
    DeviceAttention,
    DeviceConvolution,
    DeviceDeltaNet,
    DeviceMamba2,
)
from compute_plane.errors import DeviceUnavailableError
from compute_plane.model import (
    delta_net_layout,
    layout,
    mamba2_layout,
    short_convolution_layout,
)
from compute_plane.model.tensor import TensorFormat
from tests.compute_plane.cuda.noted_products import EPS, SIZE, Recording, dense, drawn
from tests.compute_plane.cuda.simulated_launcher import SimulatedLauncher
from tests.compute_plane.cuda.steps_on_kernels import Formats
from tests.compute_plane.cuda.torch_executors import tiny_model, tiny_plan
from tests.compute_plane.executor.tiny_llama import (
    tiny_spec,
    with_convolutions,
    with_delta_net,
    with_mamba2,
)

CPU = torch.device("cpu")
SPEC = with_delta_net(tiny_spec(quantisable=True))
QKV, Z, GATES = 2 * 64 + 256, 256, 8
Q4_1, Q8_0, F32, BF16 = (TensorFormat[name] for name in ("Q4_1", "Q8_0", "F32", "BF16"))
FORMATS: dict[str, tuple[Formats, list[tuple[str, int]]]] = {
    "dense": ({}, [("dense", QKV + Z + GATES)]),
    "quantised": ({"": Q4_1}, [("Q4_1", QKV + Z + GATES)]),
    "gates apart": (
        {"in_proj_b": F32, "in_proj_a": F32, "": Q4_1}, [("Q4_1", QKV + Z), ("dense", GATES)],
    ),
    "each another": (
        {"in_proj_qkv": Q4_1, "in_proj_z": Q8_0, "": F32},
        [("Q4_1", QKV), ("Q8_0", Z), ("dense", GATES)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_all_that_a_token_brings_is_one_product_where_formats_allow(name: str) -> None:
    formats, expected = FORMATS[name]
    plan = tiny_plan(SPEC, torch.bfloat16, formats)
    layers = plan.place(CPU).layers
    mixer = layers[0].mixer
    assert isinstance(mixer, DeviceDeltaNet)
    found = [
        (part.format if isinstance(part, QuantizedMatrix) else "dense", part.num_outputs)
        for part in mixer.inputs.parts
    ]
    assert found == expected
    assert mixer.inputs.num_outputs == SPEC.recurrence.num_inputs  # type: ignore[union-attr]
    assert isinstance(layers[1].mixer, DeviceAttention)
    assert layers[1].mixer.gate is not None
    assert layers[1].mixer.gate.num_outputs == SPEC.query_size
    held = sum(
        vector.nbytes for vector in (mixer.convolution, mixer.rates, mixer.time_bias, mixer.norm)
    )
    held += mixer.inputs.num_bytes + mixer.o.num_bytes
    assert held == sum(one.num_bytes for one in (*plan.layers[0].mixer.matrices,
                                                 *plan.layers[0].mixer.vectors))  # fmt: skip


def test_what_is_no_product_is_float32_and_columns_of_the_convolution_are_rows() -> None:
    source = tiny_model(SPEC).source

    def stored(role: str, part: str = layout.WEIGHT) -> np.ndarray:
        return source.tensor(layout.layer_tensor(0, role, part)).to_float32()

    mixer = tiny_plan(SPEC, torch.bfloat16).place(CPU).layers[0].mixer
    assert isinstance(mixer, DeviceDeltaNet)
    assert mixer.convolution.is_contiguous()
    np.testing.assert_array_equal(mixer.convolution, stored(delta_net_layout.CONVOLUTION).T)
    for vector, role, part in (
        (mixer.rates, delta_net_layout.MIXER, delta_net_layout.RATES),
        (mixer.time_bias, delta_net_layout.MIXER, delta_net_layout.TIME_BIAS),
        (mixer.norm, delta_net_layout.NORM, layout.WEIGHT),
    ):
        np.testing.assert_array_equal(vector, stored(role, part))


def test_a_convolution_is_no_matrix_whose_format_is_told() -> None:
    plan = tiny_plan(SPEC, torch.bfloat16, {"": Q4_1})
    assert plan.weight_format == "Q4_1"
    assert plan.place(CPU).conversions == ()
    assert not plan.has_dense
    assert tiny_plan(SPEC, torch.bfloat16, {"in_proj_b": F32, "": Q4_1}).has_dense


@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize("most_rows", [0, 16])
@pytest.mark.parametrize("has_added", [False, True])
def test_rows_that_two_products_read_are_normalised_once(
    normalises: bool, most_rows: int, has_added: bool
) -> None:
    operations = Recording(normalises=normalises, most_rows=most_rows)
    products = LayerProducts(operations, EPS)  # type: ignore[arg-type]
    norm, one, other = drawn(SIZE), dense(SIZE * 2, SIZE), dense(SIZE, SIZE)

    def hidden() -> Hidden:
        return Hidden(drawn(5, SIZE), drawn(5, SIZE) / 3 if has_added else None)

    found = products.both_normed(hidden(), norm, one, other)
    calls = operations.take()
    expected = [products.normed(hidden(), norm, projection) for projection in (one, other)]
    for product, alone in zip(found, expected, strict=True):
        torch.testing.assert_close(product, alone, atol=1e-5, rtol=1e-5)
    norms = [name for name in calls if name.endswith("rms_norm")]
    of_products = ["dense_matmul"] * 2 if most_rows else []
    if normalises and most_rows and not has_added:
        norms = []
    else:
        assert norms == ["add_rms_norm" if has_added else "rms_norm"]
    assert calls == [*norms, *of_products]


def test_two_products_take_what_is_quantised_or_in_parts() -> None:
    operations = Recording(most_rows=0)
    products = LayerProducts(operations, EPS)  # type: ignore[arg-type]
    both = Projection((*dense(SIZE, SIZE).parts, *dense(SIZE * 2, SIZE).parts))
    assert all(isinstance(part, DenseMatrix) for part in both.parts)
    found, _ = products.both_normed(Hidden(drawn(5, SIZE)), drawn(SIZE), both, dense(SIZE, SIZE))
    alone = products.normed(Hidden(drawn(5, SIZE)), drawn(SIZE), both)
    torch.testing.assert_close(found, alone)


def test_there_are_kernels_for_every_product_and_norms_of_many_digits_are_launches_apart() -> None:
    kernels = DenseKernels(SimulatedLauncher(runs=False), SPEC, "bfloat16")
    rounded = {outputs for writes, outputs, _ in kernels._products if writes == "rounded"}
    qkv = SPEC.query_size + 2 * SPEC.kv_size
    assert rounded == {qkv, SPEC.query_size, QKV + Z + GATES}
    assert not any(variant.normalises for variant in kernels.variants)
    plain = replace(SPEC, architecture="qwen3", recurrence=None)
    kernels = DenseKernels(SimulatedLauncher(runs=False), plain, "bfloat16")
    rounded = {outputs for writes, outputs, _ in kernels._products if writes == "rounded"}
    assert rounded == {qkv}
    assert any(variant.normalises for variant in kernels.variants)


CHANNELS = 96
LFM2 = with_convolutions(tiny_spec(quantisable=True))


@pytest.mark.parametrize(
    ("formats", "expected"),
    [({}, "dense"), ({"": Q4_1}, "Q4_1"), ({"out_proj": F32, "": Q8_0}, "Q8_0")],
    ids=["dense", "quantised", "out apart"],
)
def test_a_convolution_has_two_products_and_its_taps(formats: Formats, expected: str) -> None:
    plan = tiny_plan(LFM2, torch.bfloat16, formats)
    layers = plan.place(CPU).layers
    mixer = layers[0].mixer
    assert isinstance(mixer, DeviceConvolution)
    (part,) = mixer.inputs.parts
    assert (part.format if isinstance(part, QuantizedMatrix) else "dense") == expected
    assert (mixer.inputs.num_outputs, mixer.o.num_outputs) == (3 * CHANNELS, CHANNELS)
    assert mixer.o_bias is None
    name = layout.layer_tensor(0, short_convolution_layout.CONVOLUTION)
    stored = tiny_model(LFM2).source.tensor(name).to_float32()
    assert mixer.convolution.is_contiguous()
    np.testing.assert_array_equal(mixer.convolution, stored.T)
    held = mixer.convolution.nbytes + mixer.inputs.num_bytes + mixer.o.num_bytes
    planned = plan.layers[0].mixer
    assert held == sum(one.num_bytes for one in (*planned.matrices, *planned.vectors))
    assert isinstance(layers[1].mixer, DeviceAttention)
    assert layers[1].mixer.gate is None
    assert layers[1].mixer.head_norms is not None


def test_there_are_kernels_for_the_products_of_convolutions() -> None:
    kernels = DenseKernels(SimulatedLauncher(runs=False), LFM2, "bfloat16")
    found = {(writes, outputs) for writes, outputs, _ in kernels._products}
    qkv = LFM2.query_size + 2 * LFM2.kv_size
    assert {("rounded", qkv), ("rounded", 3 * CHANNELS), ("added", CHANNELS)} <= found
    assert any(variant.normalises for variant in kernels.variants)


GRANITE4 = with_mamba2(tiny_spec(quantisable=True))
XBC, INNER, HEADS = 256 + 2 * 64, 256, 8


@pytest.mark.parametrize(
    ("formats", "expected"),
    [
        ({}, [("dense", XBC + INNER + HEADS)]),
        ({"": Q4_1}, [("Q4_1", XBC + INNER + HEADS)]),
        ({"in_proj_d": F32, "": Q8_0}, [("Q8_0", XBC + INNER), ("dense", HEADS)]),
    ],
    ids=["dense", "quantised", "d apart"],
)
def test_mamba2_has_two_products_and_vectors_in_float32(
    formats: Formats, expected: list[tuple[str, int]]
) -> None:
    plan = tiny_plan(GRANITE4, torch.bfloat16, formats)
    mixer = plan.place(CPU).layers[0].mixer
    assert isinstance(mixer, DeviceMamba2)
    assert [
        (part.format if isinstance(part, QuantizedMatrix) else "dense", part.num_outputs)
        for part in mixer.inputs.parts
    ] == expected
    assert mixer.o.num_outputs == GRANITE4.hidden_size
    assert mixer.o_bias is None
    source, own = tiny_model(GRANITE4).source, mamba2_layout

    def stored(role: str, part: str = layout.WEIGHT) -> np.ndarray:
        return source.tensor(layout.layer_tensor(0, role, part)).to_float32()

    assert mixer.convolution.is_contiguous()
    np.testing.assert_array_equal(mixer.convolution, stored(own.CONVOLUTION).T)
    vectors = {
        (own.CONVOLUTION, layout.BIAS): mixer.bias,
        (own.MIXER, own.RATES): mixer.rates,
        (own.MIXER, own.TIME_BIAS): mixer.time_bias,
        (own.MIXER, own.SKIPS): mixer.skips,
        (own.NORM, layout.WEIGHT): mixer.norm,
    }
    for name, vector in vectors.items():
        np.testing.assert_array_equal(vector, stored(*name))
    held = mixer.convolution.nbytes + sum(vector.nbytes for vector in vectors.values())
    held += mixer.inputs.num_bytes + mixer.o.num_bytes
    planned = plan.layers[0].mixer
    assert held == sum(one.num_bytes for one in (*planned.matrices, *planned.vectors))


def test_there_are_kernels_for_the_products_of_mamba2() -> None:
    kernels = DenseKernels(SimulatedLauncher(runs=False), GRANITE4, "bfloat16")
    found = {(writes, outputs) for writes, outputs, _ in kernels._products}
    assert {("rounded", XBC + INNER + HEADS), ("added", GRANITE4.hidden_size)} <= found


def test_a_kind_of_layers_that_is_not_written_for_tensors_is_refused() -> None:
    @dataclass(frozen=True)
    class Another:
        layers: frozenset[int] = frozenset({0})

    spec = replace(LFM2, recurrence=Another())  # type: ignore[arg-type]
    with pytest.raises(DeviceUnavailableError, match="layers have Another in place of attention"):
        plan_weights(spec, tiny_model(LFM2).source, "float32")
