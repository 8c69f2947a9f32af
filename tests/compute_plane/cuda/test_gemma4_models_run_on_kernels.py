"""Gemma 4 on the kernels, in the simulator: as by the reference operations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from compute_plane.cuda.operands import LayerAttention, PrefillRows, QueryTiles
from compute_plane.model.heads import Heads
from compute_plane.model.spec import ModelSpec
from compute_plane.model.tensor import TensorFormat
from tests.compute_plane.cuda.simulated_launcher import SimulatedLauncher
from tests.compute_plane.cuda.steps_on_kernels import Formats, logits_of, operations_on
from tests.compute_plane.executor.tiny_llama import tiny_spec, with_gemma4

PROMPTS = [4, 5, 6], [11]
FORMATS: dict[str, Formats] = {
    "dense": {},
    "quantised": {"": TensorFormat.Q8_0},
    "no stack": {"down_proj": TensorFormat.F32, "": TensorFormat.Q4_1},
}


def small(kind: str, head_dim: int = 64) -> ModelSpec:
    """Return a shape with windows, whose global heads are twice as large as `head_dim`."""
    spec = replace(
        tiny_spec(), vocab_size=41, num_heads=2, num_kv_heads=1, head_dim=head_dim, hidden_size=32,
        intermediate_size=64,
    )  # fmt: skip
    return replace(with_gemma4(spec, has_experts=kind == "experts"), window=3)


def check(spec: ModelSpec, formats: Formats, dtype: str) -> list[str]:
    """Compare logits; return the names of the kernels that were launched."""
    launcher = SimulatedLauncher()
    found = logits_of(spec, formats, dtype, launcher, PROMPTS)
    expected = logits_of(spec, formats, dtype, None, PROMPTS)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=0.15 if dtype == "bfloat16" else 1e-3)
        assert np.abs(other).max() > 0.5
    return [name for name, _ in launcher.launched]


OF_HEADS = {
    "attention_decode_bfloat16_d64_g2_b16_window",
    "attention_decode_bfloat16_d128_g2_b16",
    "attention_prefill_bfloat16_d64_g2_b16_window",
    "rope_write_kv_bfloat16_d64_b16_norms_normed_values",
    "rope_write_kv_bfloat16_d128_b16_norms_normed_values",
}


@pytest.mark.slow  # minutes each
@pytest.mark.parametrize("kind", ["inputs", "experts"])
def test_a_model_says_what_the_reference_operations_say(kind: str) -> None:
    launched = check(small(kind), {}, "bfloat16")
    expected = OF_HEADS | {"cap_logits", "rms_norm_add_normed_scaled_bfloat16_e32"}
    expected |= {"gelu_apart_bfloat16"} if kind == "inputs" else {"route_experts_e7_c3_factors"}
    assert expected <= set(launched)
    # Of a prompt's last global layer one token is left, a row of its own.
    prefill = [name for name in launched if name.startswith("attention_prefill_bfloat16_d128")]
    assert len(prefill) == (1 if kind == "inputs" else 0)
    inputs = [name for name in launched if name == "gelu_apart_bfloat16"]
    assert len(inputs) == (3 * 5 if kind == "inputs" else 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("formats", "dtype"),
    [("dense", "float32"), *((formats, "bfloat16") for formats in FORMATS if formats != "dense")],
)
@pytest.mark.parametrize("kind", ["inputs", "experts"])
def test_a_model_of_another_format_says_what_the_reference_operations_say(
    kind: str, formats: str, dtype: str
) -> None:
    check(small(kind), FORMATS[formats], dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_heads_of_the_sizes_that_models_have_are_attended(dtype: str) -> None:
    launched = check(small("inputs", head_dim=256), {}, dtype)
    assert {f"wide_decode_{dtype}_d512_g2_b16", f"wide_prefill_{dtype}_d512_g2_b16"} <= set(
        launched
    )
    assert f"attention_decode_{dtype}_d256_g2_b16_window" in launched


@pytest.mark.parametrize("kind", ["inputs", "experts"])
@pytest.mark.parametrize("formats", FORMATS)
def test_there_are_kernels_for_the_sizes_that_models_have(kind: str, formats: str) -> None:
    launcher = SimulatedLauncher(runs=False)
    operations = operations_on(launcher, small(kind, head_dim=256), FORMATS[formats], "bfloat16")
    assert len(operations.tile_tokens) == 2
    local, others = operations.tile_tokens
    assert local > others


def test_a_model_of_another_kind_has_none_of_these() -> None:
    launcher = SimulatedLauncher(runs=False)
    names = {
        one.name for one in operations_on(launcher, tiny_spec(head_dim=64), {}, "bfloat16").variants
    }
    assert not [name for name in names if "apart" in name or "cap_" in name or "scaled" in name]


def test_prompts_go_by_the_tile_list_of_their_heads() -> None:
    spec, launcher = small("inputs"), SimulatedLauncher(runs=False)
    operations = operations_on(launcher, spec, {}, "bfloat16")

    def numbers(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    def floats(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    counts = 5, 9
    tiles = tuple(QueryTiles(numbers(count), numbers(count)) for count in counts)
    rows = PrefillRows(numbers(1, 2), numbers(1), numbers(2), tiles)
    for heads, count, window in zip(spec.kinds_of_heads, counts, (3, None), strict=True):
        query = floats(20, heads.num_heads, heads.head_dim)
        pool = floats(1, 1, 2, heads.num_kv_heads, 16, heads.head_dim)
        launcher.launched.clear()
        operations.attention_prefill(query, query, pool, 0, rows, LayerAttention(window))
        ((name, grid),) = launcher.launched
        assert f"_d{heads.head_dim}_" in name
        assert grid == (heads.num_kv_heads, count, 1)


def test_scratch_memory_is_that_of_the_heads_that_need_most() -> None:
    launcher = SimulatedLauncher(runs=False)
    found = [
        operations_on(
            launcher, replace(spec, window=None, layers_with_window=frozenset()), {}, "bfloat16"
        ).decode_scratch_bytes(4, 4000)
        for spec in (small("inputs"), replace(small("inputs"), global_heads=Heads(4, 4, 128)))
    ]
    assert found[1] > found[0] > 0
