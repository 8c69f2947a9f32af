"""Experts that all tokens share, on tensors and on the kernels in the simulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from compute_plane.cuda.dense_kernels import DenseKernels
from compute_plane.cuda.expert_products import ExpertProducts
from compute_plane.cuda.experts import DeviceExperts
from compute_plane.cuda.layer_products import Hidden, LayerProducts
from compute_plane.cuda.operations import DeviceOperations
from compute_plane.cuda.reference_experts import ReferenceExperts
from compute_plane.cuda.reference_operations import ReferenceOperations
from compute_plane.cuda.weights import DTYPES, DeviceMlp
from compute_plane.model import layout
from compute_plane.model.expert_layout import (
    CORRECTION,
    DOWN,
    GATE,
    ROUTER,
    SHARED,
    SHARED_GATE,
    UP,
    expert_role,
)
from compute_plane.model.spec import Mixture, ModelSpec
from compute_plane.model.tensor import TensorFormat, TensorSource
from tests.compute_plane.cuda.simulated_launcher import SimulatedLauncher
from tests.compute_plane.cuda.steps_on_kernels import Formats, logits_of, operations_on
from tests.compute_plane.cuda.torch_executors import tiny_model, tiny_plan
from tests.compute_plane.executor.tiny_llama import tiny_spec

Q4_1, Q8_0 = TensorFormat.Q4_1, TensorFormat.Q8_0
DENSE = {"dense_layers": 1, "dense_size": 64}
MIXTURES = {
    "gated": ("qwen2moe", Mixture(5, 2, False, shared_size=32, gates_shared=True)),
    "sigmoids": ("dots1", Mixture(5, 2, True, "sigmoid", 1.75, True, 96, **DENSE)),
    "corrected": ("ernie4_5-moe", Mixture(5, 2, corrects_choice=True, shared_size=32, **DENSE)),
}
KINDS = pytest.mark.parametrize("kind", MIXTURES)


def spec_of(kind: str) -> ModelSpec:
    architecture, mixture = MIXTURES[kind]
    return replace(
        tiny_spec(), vocab_size=41, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=64,
        hidden_size=32, intermediate_size=64, architecture=architecture, mixture=mixture,
    )  # fmt: skip


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def as_tensors_say(x: np.ndarray, spec: ModelSpec, source: TensorSource) -> np.ndarray:
    """Return what the second layer's mixture adds to tokens, from what its tensors hold."""
    mixture = spec.mixture
    assert mixture is not None

    def stored(role: str, part: str = layout.WEIGHT) -> np.ndarray:
        return source.tensor(layout.layer_tensor(1, role, part)).to_float32()

    def mlp(rows: np.ndarray, gate: str, up: str, down: str) -> np.ndarray:
        gates = rows @ stored(gate).T
        return (gates * sigmoid(gates) * (rows @ stored(up).T)) @ stored(down).T

    x = x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5)
    added = mlp(x, *(f"{SHARED}.{part}" for part in (GATE, UP, DOWN)))
    if mixture.gates_shared:
        added *= sigmoid(x @ stored(SHARED_GATE).T)
    logits = x @ stored(ROUTER).T
    scores = sigmoid(logits) if mixture.scores == "sigmoid" else np.exp(logits)
    if mixture.scores == "softmax":
        scores /= scores.sum(1, keepdims=True)
    correction = stored(CORRECTION, layout.BIAS).reshape(-1) if mixture.corrects_choice else 0
    for token, row in enumerate(scores):
        chosen = np.argsort(-(row + correction))[: mixture.experts_per_token]
        total = row[chosen].sum() if mixture.normalises_weights else 1.0
        for expert in chosen:
            weight = mixture.weight_scale * row[expert] / total
            roles = (expert_role(int(expert), part) for part in (GATE, UP, DOWN))
            added[token] += weight * mlp(x[token : token + 1], *roles)[0]
    return added


def experts_of(spec: ModelSpec, dtype: str, formats: Formats) -> DeviceExperts:
    layer = tiny_plan(spec, DTYPES[dtype], formats).place(torch.device("cpu")).layers[1]
    assert isinstance(layer.feedforward, DeviceExperts)
    return layer.feedforward


def added_by(
    operations: DeviceOperations, spec: ModelSpec, experts: DeviceExperts, x: np.ndarray,
    norm: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Return what a mixture adds to tokens x in the norm's dtype."""
    assert spec.mixture is not None
    hidden = Hidden(torch.from_numpy(x.copy()).to(norm.dtype))
    layer = ExpertProducts(operations, LayerProducts(operations, 1e-5), spec.mixture)
    layer.add(hidden, norm, experts)
    return hidden.sums() - torch.from_numpy(x)


@KINDS
@pytest.mark.parametrize("formats", [{}, {"": Q8_0}], ids=["dense", "quantised"])
@pytest.mark.parametrize("are_few", [True, False])
def test_mixtures_with_shared_experts_add_what_their_tensors_say(
    kind: str, formats: Formats, are_few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not are_few:
        monkeypatch.setattr(ReferenceExperts, "takes", lambda *_: False)
    spec, x = spec_of(kind), np.random.default_rng(5).standard_normal((4, 32), np.float32)
    experts = experts_of(spec, "float32", formats)
    found = added_by(ReferenceOperations(), spec, experts, x, torch.ones(32))
    expected = as_tensors_say(x, spec, tiny_model(spec, formats).source)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_parts", [1, 2])
def test_what_many_tokens_get_from_their_experts_joins_what_they_share(
    num_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the library leaves the shared product in parts, for the next norm to add."""
    spec = spec_of("sigmoids")
    operations, experts = ReferenceOperations(), experts_of(spec, "float32", {})
    x = np.random.default_rng(6).standard_normal((4, 32), np.float32)
    monkeypatch.setattr(ReferenceExperts, "takes", lambda *_: False)
    monkeypatch.setattr(operations, "takes_product", lambda *_: False)
    monkeypatch.setattr(operations, "num_product_parts", lambda *_: num_parts)
    found = added_by(operations, spec, experts, x, torch.ones(32))
    expected = as_tensors_say(x, spec, tiny_model(spec, {}).source)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.wide
@KINDS
@pytest.mark.parametrize("formats", [{}, {"": Q4_1}], ids=["dense", "quantised"])
def test_mixtures_on_kernels_add_what_the_reference_operations_add(
    kind: str, formats: Formats
) -> None:
    launcher, spec = SimulatedLauncher(), spec_of(kind)
    experts = experts_of(spec, "bfloat16", formats)
    x = np.random.default_rng(7).standard_normal((4, 32), np.float32)
    norm = torch.ones(32, dtype=torch.bfloat16)
    one, other = (
        added_by(operations, spec, experts, x, norm)
        for operations in (
            operations_on(launcher, spec, formats, "bfloat16"),
            ReferenceOperations(),
        )
    )
    torch.testing.assert_close(one, other, atol=0.1, rtol=0.02)
    assert one.abs().max() > 0.5
    names = [name for name, _ in launcher.launched]
    routes = {
        "gated": "route_experts_e5_c2_over_all",
        "sigmoids": "route_experts_e5_c2_sigmoid_corrected",
        "corrected": "route_experts_e5_c2_corrected",
    }
    assert routes[kind] in names
    of_shared = ("dense_matmul", "quantized_matmul")
    shared = [name for name in names if name.startswith(of_shared)]
    assert ["gated" in name for name in shared] == [True, False]
    assert names.index(shared[-1]) < names.index(routes[kind])


@KINDS
def test_layers_of_both_kinds_have_kernels_for_their_gates(kind: str) -> None:
    """Experts have theirs; those of one MLP, and of a shared one, are products of their own."""
    spec, mixture = spec_of(kind), spec_of(kind).mixture
    assert mixture is not None
    kernels = DenseKernels(SimulatedLauncher(), spec, "bfloat16")
    widths = {outputs for writes, outputs, _ in kernels._products if writes == "gated"}
    assert widths == {mixture.shared_size, mixture.dense_size} - {0}
    plan = tiny_plan(spec, torch.bfloat16, {})
    kinds = [type(layer.feedforward) for layer in plan.place(torch.device("cpu")).layers]
    assert kinds == [DeviceMlp if mixture.dense_layers else DeviceExperts, DeviceExperts]


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("formats", [{}, {"": Q4_1}], ids=["dense", "quantised"])
def test_models_on_kernels_say_what_the_reference_operations_say(
    kind: str, formats: Formats
) -> None:
    spec = spec_of(kind)
    found = logits_of(spec, formats, "bfloat16", SimulatedLauncher())
    expected = logits_of(spec, formats, "bfloat16", None)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=0.15)
        assert np.abs(other).max() > 0.5
