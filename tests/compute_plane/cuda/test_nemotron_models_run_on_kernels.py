"""Models whose layers are one thing each on the kernels, in the simulator: as by the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from compute_plane.model.spec import Mixture
from compute_plane.model.tensor import TensorFormat
from tests.compute_plane.cuda.simulated_launcher import SimulatedLauncher
from tests.compute_plane.cuda.steps_on_kernels import Formats, logits_of, operations_on
from tests.compute_plane.cuda.torch_executors import tiny_plan
from tests.compute_plane.executor.tiny_llama import tiny_spec, with_single_layers

SMALL = replace(
    tiny_spec(), vocab_size=41, num_heads=2, num_kv_heads=1, head_dim=64, hidden_size=32,
    intermediate_size=64,
)  # fmt: skip
MIXTURE = Mixture(5, 2, scores="sigmoid", corrects_choice=True, shared_size=96)
SPECS = {
    "dense": with_single_layers(SMALL, "M-*-"),
    "experts": replace(with_single_layers(SMALL, "-M*-"), mixture=MIXTURE),
}
FORMATS: dict[str, Formats] = {
    "dense": {},
    "quantised": {"": TensorFormat.Q4_1},
    "no stack": {"down_proj": TensorFormat.F32, "": TensorFormat.Q8_0},
}
PROMPTS = [4, 5, 6], [11]


def check(kind: str, formats: Formats, dtype: str) -> list[str]:
    """Compare logits; return the names of the kernels that were launched."""
    launcher = SimulatedLauncher()
    found = logits_of(SPECS[kind], formats, dtype, launcher, PROMPTS)
    expected = logits_of(SPECS[kind], formats, dtype, None, PROMPTS)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=0.15 if dtype == "bfloat16" else 1e-3)
        assert np.abs(other).max() > 0.5
    return [name for name, _ in launcher.launched]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("dense", marks=pytest.mark.wide),
        pytest.param("experts", marks=pytest.mark.slow),
    ],
)
def test_a_model_says_what_the_reference_operations_say(kind: str) -> None:
    launched = check(kind, {}, "bfloat16")
    assert "relu2_bfloat16" in launched
    assert "gated_row_norm_bfloat16_i128" in launched
    assert not [name for name in launched if "silu" in name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("formats", "dtype"),
    [("dense", "float32"), *((formats, "bfloat16") for formats in FORMATS if formats != "dense")],
)
@pytest.mark.parametrize("kind", SPECS)
def test_a_model_of_another_format_says_what_the_reference_operations_say(
    kind: str, formats: str, dtype: str
) -> None:
    check(kind, FORMATS[formats], dtype)


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("formats", FORMATS)
def test_a_model_has_no_kernels_that_gate(kind: str, formats: str) -> None:
    launcher = SimulatedLauncher(runs=False)
    operations = operations_on(launcher, SPECS[kind], FORMATS[formats], "bfloat16")
    names = [variant.name for variant in operations.variants]
    assert "relu2_bfloat16" in names
    assert not [name for name in names if "gated_matmul" in name or "_mul_" in name]


def test_a_layer_has_one_norm_and_what_is_behind_it() -> None:
    weights = tiny_plan(SPECS["experts"], torch.float32).place(torch.device("cpu"))
    parts = [
        [part is not None for part in (one.attn_norm, one.mixer, one.mlp_norm, one.feedforward)]
        for one in weights.layers
    ]
    mixer, feedforward = [True, True, False, False], [False, False, True, True]
    assert parts == [feedforward, mixer, mixer, feedforward]
