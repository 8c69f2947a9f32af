from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from compute_plane.model.rope import attention_factors, inverse_frequencies
from compute_plane.model.rope_scaling import (
    FrequencyDivisors,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    YarnScaling,
    long_rope_attention_factor,
    scaled_context_length,
    yarn_attention_factor,
)
from compute_plane.model.spec import ModelSpec
from compute_plane.model.spec_faults import faults_of

SPEC = ModelSpec(
    name="m",
    architecture="llama",
    vocab_size=100,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    hidden_size=128,
    intermediate_size=128,
    context_length=131072,
    rope_theta=10000.0,
    rope_scaling=None,
    rms_norm_eps=1e-5,
    tie_embeddings=True,
    num_parameters=0,
    weight_format="F32",
)


SCALINGS = [
    None,
    Llama3Scaling(8.0, 1.0, 4.0, 8192),
    LinearScaling(2.5),
    YarnScaling(4.0, 32768, yarn_attention_factor(4.0)),
    YarnScaling(40.0, 4096, 0.9, beta_fast=24.0, beta_slow=2.0, truncate=False),
    YarnScaling(4.0, 2**31 - 1, 1.0, beta_fast=1e6),  # whose range ends behind the last pair
    YarnScaling(2.0, 6, 1.0),  # whose correction range is empty
]


@pytest.mark.parametrize("theta", [10000.0, 100000.0, 500000.0, 1e6])
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128])
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_frequencies_are_those_of_transformers(theta, head_dim, scaling):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from tests.compute_plane.executor.llama_of_transformers import rope_parameters

    spec = dataclasses.replace(SPEC, rope_theta=theta, head_dim=head_dim, rope_scaling=scaling)
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters=rope_parameters(spec),
    )
    frequencies = inverse_frequencies(spec)
    assert frequencies.dtype == np.float32
    theirs = LlamaRotaryEmbedding(config)
    assert (attention_factors(spec) == np.float32(theirs.attention_scaling)).all()
    expected = theirs.inv_freq.numpy()
    if (theta, head_dim, scaling) == (100000.0, 64, None):  # the default model
        np.testing.assert_array_equal(frequencies, expected)
    np.testing.assert_array_max_ulp(frequencies, expected, maxulp=1 if scaling is None else 4)


@pytest.mark.parametrize("scaling", [None, "longrope"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(128, 96), (96, 96), (64, 16)])
def test_of_heads_that_turn_in_part_the_rest_has_no_frequency(head_dim, rotary_dim, scaling):
    from transformers import Phi3Config
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    divisors = [1.0 + 0.37 * pair for pair in range(rotary_dim // 2)]
    own = {"rope_type": "longrope", "short_factor": divisors, "long_factor": divisors}
    config = Phi3Config(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        pad_token_id=0,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": rotary_dim / head_dim,
        }
        | (own if scaling else {}),
    )
    factor = long_rope_attention_factor(32.0, 4096)
    spec = dataclasses.replace(
        SPEC,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope_scaling=LongRopeScaling(tuple(divisors), 4096, factor) if scaling else None,
    )
    theirs, turning = Phi3RotaryEmbedding(config), rotary_dim // 2
    frequencies, factors = inverse_frequencies(spec), attention_factors(spec)
    assert len(frequencies) == len(factors) == head_dim // 2
    np.testing.assert_array_max_ulp(frequencies[:turning], theirs.inv_freq.numpy(), maxulp=2)
    assert (factors[:turning] == np.float32(theirs.attention_scaling)).all()
    assert (frequencies[turning:] == 0).all()
    assert (factors[turning:] == 1).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"head_dim": 63}, "head_dim must be even"),
        ({"num_kv_heads": 3}, "multiple of num_kv_heads, got 2 and 3"),
        ({"num_kv_heads": 0}, "num_kv_heads must be 1"),
        ({"num_layers": 5000}, "num_layers must be 1 to 4096, got 5000"),
        ({"context_length": 1 << 31}, "context_length must be 1"),
        ({"rope_theta": float("nan")}, "rope_theta must be finite"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps must be between"),
        ({"rope_scaling": FrequencyDivisors((1.0,))}, "each of 32 pairs of a head, got 1"),
        ({"rope_scaling": LongRopeScaling((1.0,), 8, 1.0)}, "each of 32 pairs of a head, got 1"),
        ({"rope_scaling": LongRopeScaling((-1.0,) * 32, 8, 1.0)}, "positive and finite, got -1.0"),
        ({"rope_scaling": LongRopeScaling((1.0,) * 32, 0, 1.0)}, "original_max_position_embeddin"),
        ({"rope_scaling": LongRopeScaling((1.0,) * 32, 8, 0.0)}, "attention_factor must be 1e-06"),
        ({"rotary_dim": 33}, "2 to head_dim (64), got 33"),
        ({"rotary_dim": 66}, "2 to head_dim (64), got 66"),
        ({"rotary_dim": 0}, "2 to head_dim (64), got 0"),
        ({"rope_scaling": FrequencyDivisors((0.0,) * 32)}, "must be positive and finite, got 0.0"),
        ({"rope_scaling": Llama3Scaling(0.0, 1, 4, 8)}, "RoPE factor must be 1e-06 to 1e+06"),
        ({"rope_scaling": Llama3Scaling(8, 4, 4, 8)}, "below high_freq_factor"),
        ({"rope_scaling": Llama3Scaling(8, 1, 4, 0)}, "original_max_position_embeddings"),
        ({"rope_scaling": LinearScaling(-1.0)}, "RoPE factor must be 1e-06 to 1e+06, got -1"),
        ({"rope_scaling": YarnScaling(4, 0, 1)}, "original_max_position_embeddings must be 1"),
        ({"rope_scaling": YarnScaling(4, 9, math.inf)}, "attention_factor must be 1e-06 to"),
        ({"rope_scaling": YarnScaling(4, 9, 1, 1e300)}, "beta_fast must be 1e-06 to 1e+06"),
        ({"rope_scaling": YarnScaling(4, 9, 1, 2, 1e-300)}, "beta_slow must be 1e-06 to"),
        ({"rope_scaling": YarnScaling(4, 9, 1, 2, 3)}, "beta_slow must not be above beta_fast"),
        ({"rope_scaling": YarnScaling(4, 9, 1), "rope_theta": 1.0}, "rope_theta must be more"),
    ],
)
def test_numbers_that_make_no_model_are_faults(changes, words):
    faults = faults_of(dataclasses.replace(SPEC, **changes))
    assert len(faults) == (0 if words is None else 1)
    assert all(words in fault for fault in faults)


@pytest.mark.parametrize(
    ("factor", "mscale", "mscale_all_dim"),
    [(4.0, 0, 0), (1.0, 0, 0), (40.0, 0.707, 1.0), (40.0, 0.707, 0), (8.0, 0, 1.0)],
)
def test_the_attention_factor_of_yarn_is_the_one_of_transformers(factor, mscale, mscale_all_dim):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": factor,
        "original_max_position_embeddings": 4096,
        "mscale": mscale,
        "mscale_all_dim": mscale_all_dim,
    }
    theirs = LlamaRotaryEmbedding(LlamaConfig(rope_parameters=parameters))
    assert yarn_attention_factor(factor, mscale, mscale_all_dim) == theirs.attention_scaling


def test_a_weight_that_cancels_the_attention_factor_makes_no_model():
    factor = yarn_attention_factor(math.e, 1.0, -10.0)
    assert any("attention_factor" in fault for fault in faults_of(
        dataclasses.replace(SPEC, rope_scaling=YarnScaling(math.e, 4096, factor))
    ))  # fmt: skip


def test_scaling_makes_contexts_longer_where_the_file_says_the_length_before_it():
    assert scaled_context_length(4096, None) == 4096
    assert scaled_context_length(4096, Llama3Scaling(8.0, 1.0, 4.0, 512)) == 4096
    assert scaled_context_length(4096, LinearScaling(4.0)) == 16384
    assert scaled_context_length(32768, YarnScaling(4.0, 32768, 1.1)) == 131072
    assert scaled_context_length(131072, YarnScaling(4.0, 32768, 1.1)) == 131072
    assert scaled_context_length(2**31 - 1, LinearScaling(1e308)) == 2**31 - 1
