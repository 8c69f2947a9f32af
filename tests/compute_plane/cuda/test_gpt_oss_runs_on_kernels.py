"""gpt-oss on the kernels in the simulator: sinks, biases everywhere, a clamped gate."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from compute_plane.cuda.expert_products import ExpertProducts
from compute_plane.cuda.experts import DeviceExperts
from compute_plane.cuda.layer_products import Hidden, LayerProducts
from compute_plane.cuda.matrices import DenseMatrix, Projection
from compute_plane.cuda.reference_experts import ReferenceExperts
from compute_plane.cuda.reference_operations import ReferenceOperations
from compute_plane.model import layout
from compute_plane.model.expert_layout import DOWN, GATE, ROUTER, UP, expert_role
from compute_plane.model.spec import Mixture
from compute_plane.model.tensor import TensorFormat, TensorSource
from kernels.reference.clamped_mul import clamped_mul
from tests.compute_plane.cuda.simulated_launcher import SimulatedLauncher
from tests.compute_plane.cuda.steps_on_kernels import Formats, logits_of, operations_on
from tests.compute_plane.cuda.torch_executors import tiny_model, tiny_plan
from tests.compute_plane.executor.tiny_llama import tiny_spec

MIXTURE = Mixture(5, 2)
SPEC = replace(
    tiny_spec(), vocab_size=41, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=64,
    hidden_size=32, intermediate_size=64, architecture="gpt-oss", mixture=MIXTURE, window=5,
    layers_with_window=frozenset({0}),
)  # fmt: skip
Q4_1, Q8_0 = TensorFormat.Q4_1, TensorFormat.Q8_0
PUBLISHED: Formats = {"experts": TensorFormat.MXFP4, "_proj": Q8_0}
APART: Formats = {"gate_proj": Q8_0, "experts": Q4_1}
FORMATS = pytest.mark.parametrize(
    ("formats", "products"),
    [
        (
            {},
            (
                "dense_experts_clamped_gated_biased_bfloat16_m8_n32",
                "dense_experts_rounded_biased_bfloat16_m8_n32",
            ),
        ),
        (
            PUBLISHED,
            (
                "quantized_experts_mxfp4_bfloat16_m8_gated_clamped_biased",
                "quantized_experts_mxfp4_bfloat16_m8_biased",
            ),
        ),
        (
            APART,
            (
                "quantized_experts_q8_0_bfloat16_m8_biased",
                "quantized_experts_q4_1_bfloat16_m8_biased",
                "clamped_mul_bfloat16",
                "quantized_experts_q4_1_bfloat16_m8_biased",
            ),
        ),
    ],
    ids=["dense", "as published", "apart"],
)  # fmt: skip


def dense_weights(projection: Projection) -> torch.Tensor:
    """Return the only matrix of a projection in float32."""
    (matrix,) = projection.parts
    if isinstance(matrix, DenseMatrix):
        return matrix.values.float()
    rows = torch.empty(matrix.num_outputs, matrix.num_inputs)
    ReferenceOperations().embedding(rows, matrix, torch.arange(matrix.num_outputs))
    return rows


def as_tensors_say(x: np.ndarray, source: TensorSource) -> np.ndarray:
    """Return what the first layer's experts add to tokens, from what its tensors hold."""

    def stored(role: str, part: str = layout.WEIGHT) -> np.ndarray:
        values = source.tensor(layout.layer_tensor(0, role, part)).to_float32()
        return values.reshape(-1) if part == layout.BIAS else values

    def product(rows: np.ndarray, role: str) -> np.ndarray:
        return rows @ stored(role).T + stored(role, layout.BIAS)

    x = x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5)
    logits, added = product(x, ROUTER), np.zeros_like(x)
    for token, row in enumerate(logits):
        chosen = np.argsort(-row)[: MIXTURE.experts_per_token]
        weights = np.exp(row[chosen] - row[chosen].max())
        for expert, weight in zip(chosen, weights / weights.sum(), strict=True):
            gate, up, down = (expert_role(expert, part) for part in (GATE, UP, DOWN))
            both = [product(x[token : token + 1], part) for part in (gate, up)]
            gated = np.empty_like(both[0])
            clamped_mul(np.concatenate(both, axis=1), gated)
            added[token] += weight * product(gated, down)[0]
    return added


@pytest.mark.parametrize("formats", [{}, PUBLISHED, APART], ids=["dense", "as published", "apart"])
@pytest.mark.parametrize("are_few", [True, False])
def test_experts_with_biases_add_what_their_tensors_say(
    formats: Formats, are_few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not are_few:
        monkeypatch.setattr(ReferenceExperts, "takes", lambda *_: False)
    experts = tiny_plan(SPEC, torch.float32, formats).place(torch.device("cpu")).layers[0]
    assert isinstance(experts.feedforward, DeviceExperts)
    x = np.random.default_rng(5).standard_normal((4, 32), np.float32) * 3
    operations = ReferenceOperations(SPEC.activation)
    hidden = Hidden(torch.from_numpy(x.copy()))
    layer = ExpertProducts(operations, LayerProducts(operations, 1e-5), MIXTURE)
    layer.add(hidden, torch.ones(32), experts.feedforward)
    found = hidden.residual if hidden.added is None else hidden.residual + hidden.added
    expected = as_tensors_say(x, tiny_model(SPEC, formats).source)
    np.testing.assert_allclose(found.numpy() - x, expected, atol=1e-4, rtol=1e-4)


@FORMATS
@pytest.mark.wide
def test_experts_with_biases_add_what_the_reference_operations_add(
    formats: Formats, products: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReferenceExperts, "takes", lambda *_: False)  # as with many tokens
    launcher, dtype = SimulatedLauncher(), torch.bfloat16
    experts = tiny_plan(SPEC, dtype, formats).place(torch.device("cpu")).layers[0].feedforward
    assert isinstance(experts, DeviceExperts)
    x = np.random.default_rng(5).standard_normal((4, 32), np.float32)
    norm, found = torch.full((32,), 4.0, dtype=dtype), []
    for operations in (
        operations_on(launcher, SPEC, formats, "bfloat16"),
        ReferenceOperations(SPEC.activation),
    ):
        layer = ExpertProducts(operations, LayerProducts(operations, 1e-5), MIXTURE)
        hidden = Hidden(torch.from_numpy(x).to(dtype))
        layer.add(hidden, norm, experts)
        found.append(hidden.residual if hidden.added is None else hidden.residual + hidden.added)
    torch.testing.assert_close(*found, atol=0.12, rtol=0.02)
    assert [name for name, _ in launcher.launched] == [
        "rms_norm_bfloat16_e32", "router_logits_bfloat16_t8_biased", "route_experts_e5_c2",
        *products, "add_experts_bfloat16_c2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("formats", "num_rows", "launched"),
    [
        ({}, 3, ["dense_matmul_added_biased_bfloat16_m8_n16"]),
        ({}, 17, []),
        ({"o_proj": Q8_0}, 3, ["quantized_matmul_q8_0_bfloat16_m8_biased"]),
    ],
)
def test_the_bias_behind_attention_is_part_of_its_product(
    formats: Formats, num_rows: int, launched: list[str]
) -> None:
    launcher, dtype = SimulatedLauncher(), torch.bfloat16
    layer = tiny_plan(SPEC, dtype, formats).place(torch.device("cpu")).layers[0]
    assert layer.mixer.o_bias is not None
    assert layer.mixer.o_bias.abs().max() > 0.1
    x = np.random.default_rng(5).standard_normal((num_rows, 128), np.float32)
    found = []
    for operations in (
        operations_on(launcher, SPEC, formats, "bfloat16"),
        ReferenceOperations(SPEC.activation),
    ):
        hidden = Hidden(torch.ones(num_rows, 32, dtype=dtype))
        products = LayerProducts(operations, 1e-5)
        products.add(hidden, torch.from_numpy(x).to(dtype), layer.mixer.o, bias=layer.mixer.o_bias)
        found.append(hidden.sums())
    torch.testing.assert_close(*found, atol=0.03, rtol=0.01)
    assert [name for name, _ in launcher.launched] == launched
    plain = torch.from_numpy(x).to(dtype).float() @ dense_weights(layer.mixer.o).t() + 1
    torch.testing.assert_close(
        found[0] - plain, layer.mixer.o_bias.float().expand_as(plain), atol=0.05, rtol=0.05
    )


@FORMATS
@pytest.mark.slow
def test_a_model_on_kernels_says_what_the_reference_operations_say(
    formats: Formats, products: tuple[str, ...]
) -> None:
    launcher, spec = SimulatedLauncher(), replace(SPEC, num_layers=3)
    found = logits_of(spec, formats, "bfloat16", launcher)
    expected = logits_of(spec, formats, "bfloat16", None)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=0.1)
        assert np.abs(other).max() > 0.5
    names = {name for name, _ in launcher.launched}
    attention = {name for name in launcher.prepared if name.startswith("attention_")}
    assert attention <= names
    assert all("sinks" in name for name in attention)
    of_experts = {"route_experts_e5_c2", "add_experts_bfloat16_c2", *products}
    assert {name for name in names if "experts_" in name} == of_experts - {"clamped_mul_bfloat16"}
