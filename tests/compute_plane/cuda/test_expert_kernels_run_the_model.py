"""The kernels for mixtures of experts: which is taken when, and models on them in the simulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from compute_plane.cuda import build
from compute_plane.cuda.expert_kernels import ExpertKernels, cut_into_tiles, tile_pairs_of
from compute_plane.cuda.expert_products import ExpertProducts, waits_for_experts
from compute_plane.cuda.experts import DeviceExperts
from compute_plane.cuda.kernel_operations import KernelOperations
from compute_plane.cuda.layer_products import Hidden, LayerProducts
from compute_plane.cuda.reference_operations import ReferenceOperations
from compute_plane.cuda.weights import DTYPES
from compute_plane.errors import DeviceUnavailableError
from compute_plane.model.spec import Mixture, ModelSpec
from compute_plane.model.tensor import TensorFormat
from kernels.cuda.expert_tiles import most_tiles
from kernels.cuda.route_experts import RouteExpertsVariant
from kernels.reference.mixture import sort_pairs
from tests.compute_plane.cuda.simulated_launcher import SimulatedLauncher
from tests.compute_plane.cuda.steps_on_kernels import (
    BLOCK_SIZE,
    Formats,
    logits_of,
    operations_on,
)
from tests.compute_plane.cuda.torch_executors import tiny_plan
from tests.compute_plane.executor.tiny_llama import tiny_spec

MIXTURE = Mixture(5, 2)
SPEC = replace(
    tiny_spec(), vocab_size=41, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=64,
    hidden_size=32, intermediate_size=64, architecture="mixtral", mixture=MIXTURE,
)  # fmt: skip
Q4_0, Q4_1, Q8_0 = TensorFormat.Q4_0, TensorFormat.Q4_1, TensorFormat.Q8_0


def experts_of(formats: Formats, dtype: str = "bfloat16", spec: ModelSpec = SPEC) -> DeviceExperts:
    """Return the experts of a tiny model's first layer."""
    weights = tiny_plan(spec, DTYPES[dtype], formats).place(torch.device("cpu"))
    experts = weights.layers[0].feedforward
    assert isinstance(experts, DeviceExperts)
    return experts


def kernels_for(
    formats: Formats, launcher: SimulatedLauncher, dtype: str = "bfloat16"
) -> ExpertKernels:
    made = ExpertKernels(launcher, SPEC, dtype, tiny_plan(SPEC, DTYPES[dtype], formats).experts)
    launcher.prepare(made.variants)
    return made


@pytest.mark.parametrize("tile_pairs", [8, 16, 32])
def test_torch_cuts_the_tiles_that_the_kernel_cuts(tile_pairs: int) -> None:
    random = np.random.default_rng(tile_pairs)
    for num_tokens, num_experts in ((1, 1), (40, 3), (7, 12), (200, 5)):
        chosen = random.integers(0, num_experts, (num_tokens, 1), np.int32)
        num_tiles = most_tiles(num_tokens, num_experts, tile_pairs) + 2
        order, tiles = np.empty(num_tokens, np.int32), np.empty((num_tiles, 3), np.int32)
        sort_pairs(chosen, num_experts, tile_pairs, order, tiles)
        counts = torch.from_numpy(np.bincount(chosen[:, 0], minlength=num_experts))
        found = cut_into_tiles(counts, tile_pairs, num_tiles)
        assert found.dtype == torch.int32
        np.testing.assert_array_equal(found.numpy(), tiles)


@pytest.mark.wide
def test_many_tokens_are_sorted_by_torch_as_few_are_by_a_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launcher, experts = SimulatedLauncher(), experts_of({"": Q4_1})
    made = kernels_for({"": Q4_1}, launcher)
    x = torch.from_numpy(np.random.default_rng(3).standard_normal((21, 32), np.float32)).bfloat16()
    few = made.route(x, experts, MIXTURE)
    monkeypatch.setattr(RouteExpertsVariant, "takes", lambda *_: False)
    many = made.route(x, experts, MIXTURE)
    assert [name for name, _ in launcher.launched] == [
        "router_logits_bfloat16_t8", "route_experts_e5_c2", "router_logits_bfloat16_t8",
    ]  # fmt: skip
    torch.testing.assert_close(many.weights, few.weights, atol=1e-6, rtol=0)
    assert torch.equal(many.order, few.order)
    assert torch.equal(many.tiles, few.tiles)
    assert many.tile_pairs == few.tile_pairs == 32
    assert many.weights.is_contiguous()


@pytest.mark.parametrize(
    ("formats", "dtype", "capability", "most"),
    [
        ({}, "bfloat16", (9, 0), 16),
        ({}, "bfloat16", (8, 0), 160),
        ({}, "float16", (9, 0), 160),
        ({}, "float32", (9, 0), 0),
        ({"": Q4_0}, "float16", (9, 0), 640),
        ({"": Q8_0}, "bfloat16", (9, 0), 320),
        ({"gate_proj": Q8_0, "": Q4_0}, "bfloat16", (9, 0), 320),
        ({"down": Q8_0}, "bfloat16", (9, 0), 16),
    ],
)
def test_kernels_take_as_many_tokens_as_weights_allow(
    formats: Formats, dtype: str, capability: tuple[int, int], most: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    launcher = SimulatedLauncher(runs=False)
    monkeypatch.setattr(launcher, "device", torch.device("cuda", 0))
    made, experts = kernels_for(formats, launcher, dtype), experts_of(formats, dtype)
    assert bool(made.variants) == bool(most)
    assert not made.takes(most + 1, experts)
    assert most == 0 or made.takes(most, experts)


def test_experts_that_lie_apart_are_not_taken() -> None:
    launcher = SimulatedLauncher(runs=False)
    spec = replace(SPEC, intermediate_size=48)
    formats = {"gate_proj": Q8_0, "up_proj": Q4_1}
    made = ExpertKernels(
        launcher, spec, "bfloat16", tiny_plan(spec, torch.bfloat16, formats).experts
    )
    assert not made.takes(1, experts_of(formats, spec=spec))
    assert made.variants == []


def test_a_tile_has_room_for_twice_what_an_expert_has_on_average() -> None:
    dense, quantised = experts_of({}), experts_of({"": Q4_1})
    counts = (1, 20, 21, 40, 41, 80, 81, 400)
    assert [tile_pairs_of(count, quantised) for count in counts] == [8, 8, 16, 16, 32, 32, 32, 32]
    assert [tile_pairs_of(count, dense) for count in counts] == [8, 8, 16, 16, 16, 16, 16, 16]


@pytest.mark.parametrize(
    ("formats", "dtype", "capability", "most_rows"),
    [
        ({}, "bfloat16", (9, 0), 100),
        ({}, "bfloat16", (8, 0), 100),
        ({}, "float16", (9, 0), 100),
        ({}, "float32", (9, 0), 0),
        ({"": Q8_0}, "bfloat16", (9, 0), 100),
        ({"down": Q8_0}, "bfloat16", (9, 0), 16),
    ],
)
def test_steps_that_wait_are_not_captured_and_the_log_says_so(
    formats: Formats, dtype: str, capability: tuple[int, int], most_rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    launcher = SimulatedLauncher(runs=False)
    monkeypatch.setattr(launcher, "device", torch.device("cuda", 0))
    weights = tiny_plan(SPEC, DTYPES[dtype], formats).place(torch.device("cpu"))
    operations = ReferenceOperations()
    monkeypatch.setattr(operations, "experts", kernels_for(formats, launcher, dtype))
    monkeypatch.setattr(
        "compute_plane.cuda.expert_products.has_grouped_products",
        lambda _, of: of is torch.bfloat16 and capability == (9, 0),
    )
    with capture_logs() as logs:
        found = build.most_rows_without_waiting(weights, operations, 100)
    assert found == most_rows
    assert [line["most_rows"] for line in logs] == ([] if found == 100 else [found])
    experts = weights.layers[0].feedforward
    assert isinstance(experts, DeviceExperts)
    assert waits_for_experts(128, experts, operations, DTYPES[dtype]) is (most_rows < 100)


def test_a_model_without_experts_has_no_kernels_for_them() -> None:
    spec = replace(SPEC, architecture="llama", mixture=None)
    assert ExpertKernels(SimulatedLauncher(), spec, "bfloat16").variants == []
    assert build.most_rows_without_waiting(
        tiny_plan(spec, torch.bfloat16).place(torch.device("cpu")), ReferenceOperations(), 33
    ) == 33  # fmt: skip


def test_a_mixture_that_no_kernel_is_written_for_is_refused() -> None:
    spec = replace(SPEC, mixture=Mixture(600, 2))
    uses = tiny_plan(SPEC, torch.bfloat16).experts
    with pytest.raises(DeviceUnavailableError, match="experts must be between 1 and 512"):
        KernelOperations(SimulatedLauncher(), spec, "bfloat16", BLOCK_SIZE, experts=uses)


OPERATIONS = pytest.mark.parametrize(
    ("formats", "dtype", "products"),
    [
        ({"gate_proj": Q8_0, "": Q4_1}, "bfloat16", ("quantized_experts_q8_0_bfloat16_m8",
         "quantized_experts_q4_1_bfloat16_m8", "quantized_experts_q4_1_bfloat16_m8")),
        ({"": Q4_0}, "float16", ("quantized_experts_q4_0_float16_m8_gated",
         "quantized_experts_q4_0_float16_m8")),
        ({}, "float16", ("dense_experts_gated_float16_m8_n32",
         "dense_experts_rounded_float16_m8_n32")),
        ({"up_proj": Q4_0}, "bfloat16", ("dense_experts_rounded_bfloat16_m8_n32",
         "quantized_experts_q4_0_bfloat16_m8", "dense_experts_rounded_bfloat16_m8_n32")),
    ],
    ids=["apart", "in turns", "dense", "both"],
)  # fmt: skip


@pytest.mark.wide
@OPERATIONS
def test_experts_on_kernels_add_what_the_reference_operations_add(
    formats: Formats, dtype: str, products: tuple[str, ...]
) -> None:
    launcher, experts = SimulatedLauncher(), experts_of(formats, dtype)
    x = np.random.default_rng(5).standard_normal((4, 32), np.float32)
    norm, found = torch.ones(32, dtype=DTYPES[dtype]), []
    for operations in (operations_on(launcher, SPEC, formats, dtype), ReferenceOperations()):
        layer = ExpertProducts(operations, LayerProducts(operations, 1e-5), MIXTURE)
        hidden = Hidden(torch.from_numpy(x).to(DTYPES[dtype]))
        layer.add(hidden, norm, experts)
        assert hidden.added is None
        found.append(hidden.residual)
    torch.testing.assert_close(*found, atol=0.02, rtol=0.02)
    assert (found[0] - torch.from_numpy(x)).abs().max() > 0.1
    names = [name for name, _ in launcher.launched]
    gates = [] if dtype == "float16" else [f"silu_mul_{dtype}"]
    assert names == [
        f"rms_norm_{dtype}_e32", f"router_logits_{dtype}_t8", "route_experts_e5_c2",
        *products[:-1], *gates, products[-1], f"add_experts_{dtype}_c2",
    ]  # fmt: skip


@pytest.mark.slow
@OPERATIONS
def test_a_mixture_on_kernels_says_what_the_reference_operations_say(
    formats: Formats, dtype: str, products: tuple[str, ...]
) -> None:
    launcher = SimulatedLauncher()
    found = logits_of(SPEC, formats, dtype, launcher)
    expected = logits_of(SPEC, formats, dtype, None)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=0.1)
        assert np.abs(other).max() > 0.5
    names = {name for name, _ in launcher.launched}
    assert {name for name in names if "experts_" in name} == set(products) | {
        "route_experts_e5_c2", f"add_experts_{dtype}_c2",
    }  # fmt: skip
