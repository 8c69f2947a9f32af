"""Models with latents on the kernels, in the simulator: as the reference operations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from compute_plane.config import ComputePlaneConfig
from compute_plane.cuda.kernel_operations import KernelOperations
from compute_plane.errors import DeviceUnavailableError
from compute_plane.model.latents import Latents
from compute_plane.model.tensor import TensorFormat
from kernels.cuda.attention_tiles import most_tiles
from kernels.cuda.latent_attention import LatentPrefillVariant
from kernels.cuda.latent_attention_layout import MAX_HEADS
from planes.settings import settings_of
from tests.compute_plane.cuda.simulated_launcher import SimulatedLauncher
from tests.compute_plane.cuda.steps_on_kernels import Formats, logits_of, operations_on
from tests.compute_plane.executor.tiny_llama import tiny_spec

LATENTS = Latents(256, 32, 32, 32, 64, 0.1)
SPEC = replace(
    tiny_spec(), vocab_size=41, num_layers=2, num_heads=2, num_kv_heads=1, hidden_size=64,
    intermediate_size=64, architecture="deepseek2", latents=LATENTS, head_dim=288, rotary_dim=32,
)  # fmt: skip
FORMATS: dict[str, Formats] = {"dense": {}, "quantised": {"": TensorFormat.Q4_1}}


def check_model(formats: Formats, dtype: str) -> None:
    launcher, prompts = SimulatedLauncher(), ([4, 5, 6, 7], [11])
    found = logits_of(SPEC, formats, dtype, launcher, prompts)
    expected = logits_of(SPEC, formats, dtype, None, prompts)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=0.15 if dtype == "bfloat16" else 1e-3)
        assert np.abs(other).max() > 0.5
    names = [name for name, _ in launcher.launched]
    for kernel in ("latent_write", "latent_decode", "latent_prefill"):
        assert any(name.startswith(kernel) for name in names), kernel


@pytest.mark.wide
def test_a_model_in_float32_on_kernels_says_what_the_reference_operations_say() -> None:
    check_model({}, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("formats", FORMATS)
def test_a_model_in_sixteen_bits_on_kernels_says_what_the_reference_operations_say(
    formats: str,
) -> None:
    check_model(FORMATS[formats], "bfloat16")


def test_a_model_has_the_kernels_of_latents_and_no_other_attention() -> None:
    operations = operations_on(SimulatedLauncher(runs=False), SPEC, {}, "bfloat16")
    names = [variant.name for variant in operations.variants]
    for kernel in ("latent_write", "latent_decode", "latent_prefill"):
        assert any(name.startswith(kernel) for name in names), kernel
    assert not [name for name in names if name.startswith(("rope_write", "attention_"))]


@pytest.mark.parametrize(
    ("changes", "pool", "words"),
    [
        ({"rank": 320}, None, "rank must be"),
        ({"turning": 48}, None, "turning must be"),
        ({}, "int8", "kv_cache_dtype must be"),
    ],
)
def test_what_no_kernel_takes_is_refused(
    changes: dict[str, int], pool: str | None, words: str
) -> None:
    spec = replace(SPEC, latents=replace(LATENTS, **changes))
    with pytest.raises(DeviceUnavailableError, match=words):
        KernelOperations(
            SimulatedLauncher(runs=False), spec, "bfloat16", 16, pool_dtype=pool or "bfloat16"
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("num_heads", [1, 17, MAX_HEADS])
def test_a_grid_holds_the_tiles_of_the_largest_batch_that_may_be_asked_for(
    dtype: str, num_heads: int
) -> None:
    """A tile of many heads has one token; a grid's first axis holds any number, others 65 535."""
    settings = {setting.name: setting.rule for setting in settings_of(ComputePlaneConfig)}
    num_tokens = int(settings["max_tokens_per_batch"].maximum or 0)
    num_rows = int(settings["max_rows"].maximum or 0)
    variant = LatentPrefillVariant(dtype, num_heads, 512, 64, 16)
    num_tiles = most_tiles(num_tokens, num_rows, variant.tile_tokens)
    assert num_tokens > 65535
    tiles, units, planes = variant.grid(num_tiles)
    assert (tiles, planes) == (num_tiles, 1)
    assert units <= 65535
