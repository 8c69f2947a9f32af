"""Gemma 2, whose scores have a cap, on the kernels, in the simulator: as by the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from compute_plane.model.spec import ModelSpec
from tests.compute_plane.cuda.simulated_launcher import SimulatedLauncher
from tests.compute_plane.cuda.steps_on_kernels import logits_of, operations_on
from tests.compute_plane.executor.tiny_llama import tiny_spec

PROMPTS = [4, 5, 6, 7, 8], [11]


def small(head_dim: int = 64, cap: float | None = 0.7) -> ModelSpec:
    """Return a shape whose first layer has windows."""
    return replace(
        tiny_spec(head_dim=head_dim), vocab_size=41, num_heads=2, num_kv_heads=1, hidden_size=32,
        intermediate_size=64, architecture="gemma2", scores_cap=cap, logits_cap=5.0, window=3,
        layers_with_window=frozenset({0}),
    )  # fmt: skip


def names_of(dtype: str, head_dim: int) -> set[str]:
    """Return the kernels of both kinds of layers, for prompts and for decode."""
    shape = f"{dtype}_d{head_dim}_g2_b16"
    kinds = ("attention_decode", "attention_prefill")
    return {f"{kind}_{shape}{own}_cap" for kind in kinds for own in ("", "_window")}


@pytest.mark.wide
@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [
        pytest.param("bfloat16", 64, marks=pytest.mark.slow),
        ("float32", 64),
        pytest.param("bfloat16", 256, marks=pytest.mark.slow),
        pytest.param("float32", 128, marks=pytest.mark.slow),
    ],
)
def test_a_model_says_what_the_reference_operations_say(dtype: str, head_dim: int) -> None:
    spec, launcher = small(head_dim), SimulatedLauncher()
    found = logits_of(spec, {}, dtype, launcher, PROMPTS)
    expected = logits_of(spec, {}, dtype, None, PROMPTS)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=0.15 if dtype == "bfloat16" else 1e-3)
        assert np.abs(other).max() > 0.5
    without = logits_of(small(head_dim, cap=None), {}, dtype, None, PROMPTS)
    assert np.abs(without[-1] - expected[-1]).max() > (0.05 if dtype == "float32" else 0.01)
    launched = {name for name, _ in launcher.launched}
    # Of a prompt's last layer one token is left, a row of its own.
    alone = {f"attention_prefill_{dtype}_d{head_dim}_g2_b16_cap"}
    expected_names = names_of(dtype, head_dim) - alone
    assert {name for name in launched if name.startswith("attention")} == expected_names
    assert "cap_logits" in launched


@pytest.mark.parametrize("head_dim", [128, 256])
def test_there_are_kernels_for_the_sizes_that_models_have(head_dim: int) -> None:
    launcher = SimulatedLauncher(runs=False)
    operations = operations_on(launcher, small(head_dim), {}, "bfloat16")
    assert names_of("bfloat16", head_dim) <= {one.name for one in operations.variants}
