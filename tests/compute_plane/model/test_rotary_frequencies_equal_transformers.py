from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from compute_plane.model.rope import inverse_frequencies
from compute_plane.model.spec import FrequencyDivisors, Llama3Scaling, ModelSpec, faults_of

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


@pytest.mark.parametrize("theta", [10000.0, 100000.0, 500000.0, 1e6])
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128])
@pytest.mark.parametrize("scaling", [None, Llama3Scaling(8.0, 1.0, 4.0, 8192)], ids=str)
def test_frequencies_are_those_of_transformers(theta, head_dim, scaling):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_type": "default", "rope_theta": theta}
    if scaling is not None:
        parameters |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context_length,
        }
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters=parameters,
    )
    spec = dataclasses.replace(SPEC, rope_theta=theta, head_dim=head_dim, rope_scaling=scaling)
    frequencies = inverse_frequencies(spec)
    assert frequencies.dtype == np.float32
    expected = LlamaRotaryEmbedding(config).inv_freq.numpy()
    if (theta, head_dim, scaling) == (100000.0, 64, None):  # the default model
        np.testing.assert_array_equal(frequencies, expected)
    np.testing.assert_array_max_ulp(frequencies, expected, maxulp=1 if scaling is None else 4)


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
        ({"rope_scaling": FrequencyDivisors((1.0,))}, "32 divisors, got 1"),
        ({"rope_scaling": FrequencyDivisors((0.0,) * 32)}, "must be positive and finite, got 0.0"),
        ({"rope_scaling": Llama3Scaling(0.0, 1, 4, 8)}, "factors must be positive"),
        ({"rope_scaling": Llama3Scaling(8, 4, 4, 8)}, "below high_freq_factor"),
        ({"rope_scaling": Llama3Scaling(8, 1, 4, 0)}, "original_max_position_embeddings"),
    ],
)
def test_numbers_that_make_no_model_are_faults(changes, words):
    faults = faults_of(dataclasses.replace(SPEC, **changes))
    assert len(faults) == (0 if words is None else 1)
    assert all(words in fault for fault in faults)
