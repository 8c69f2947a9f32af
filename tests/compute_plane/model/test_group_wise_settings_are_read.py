"""What a checkpoint says of its quantisation: read, or refused by field and value."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.group_config import read_quantization
from compute_plane.model.json_file import JsonObject
from tests.compute_plane.model.group_checkpoints import Scheme

CT = "compressed-tensors"
GPTQ, AWQ, PACKED = (
    Scheme(method, symmetric=method != "awq").config() for method in ("gptq", "awq", CT)
)
(WEIGHTS,) = (group["weights"] for group in PACKED["config_groups"].values())


def with_group(**changes) -> dict:
    return PACKED | {"config_groups": {"group_0": {"weights": WEIGHTS} | changes}}


def with_weights(**changes) -> dict:
    return with_group(weights=WEIGHTS | changes)


REFUSED = {
    "quant_method must be gptq, awq, compressed-tensors, fp8 or fbgemm_fp8, got none": {"bits": 4},
    "quant_method must be gptq, awq, compressed-tensors, fp8 or fbgemm_fp8, got bitsandbytes": GPTQ
    | {"quant_method": "bitsandbytes"},
    "bits must be 4 or 8, got 3": GPTQ | {"bits": 3},
    "group_size must be -1 or a multiple of 32, got 0": GPTQ | {"group_size": 0},
    "group_size must be -1 or a multiple of 32, got 16": AWQ | {"group_size": 16},
    "group_size must be -1 or a multiple of 32, got -2": GPTQ | {"group_size": -2},
    "checkpoint_format must be gptq or gptq_v2, got marlin": GPTQ | {"checkpoint_format": "marlin"},
    "quantization_config.format must be gptq or gptq_v2, got bitblas": {
        key: value for key, value in GPTQ.items() if key != "checkpoint_format"
    }
    | {"format": "bitblas"},
    "is_marlin_format is not supported, got True": GPTQ | {"is_marlin_format": True},
    "pack_dtype must be int32, got int64": GPTQ | {"pack_dtype": "int64"},
    "dynamic: settings for single modules are not supported, got +:.*down": GPTQ
    | {"dynamic": {"+:.*down": {"bits": 8}}},
    "format must be gptq or gptq_v2, got marlin": GPTQ | {"format": "marlin"},
    "rotation is not supported, got 'hadamard'": GPTQ | {"rotation": "hadamard"},
    "checkpoint_format must be gemm, got gemv": AWQ | {"checkpoint_format": "gemv"},
    "quantization_config.bits must be 4, got 8": AWQ | {"bits": 8},
    "version must be gemm, got gemv": AWQ | {"version": "GEMV"},
    "zero_point must be true, got false": AWQ | {"zero_point": False},
    "format must be pack-quantized, float-quantized or naive-quantized, got int": PACKED
    | {"format": "int-quantized"},
    "kv_cache_scheme is not supported, got {'num_bits': 8}": PACKED
    | {"kv_cache_scheme": {"num_bits": 8}},
    "sparsity_config.format must be dense, got sparse-24-bitmask": PACKED
    | {"sparsity_config": {"format": "sparse-24-bitmask"}},
    "transform_config is not supported": PACKED | {"transform_config": {"a": 1}},
    "config_groups must have 1 group, got 0": PACKED | {"config_groups": {}},
    "config_groups must have 1 group, got 2": PACKED
    | {"config_groups": {"a": {"weights": WEIGHTS}, "b": {"weights": WEIGHTS}}},
    "config_groups.group_0 has no weights": with_group(weights=None),
    "group_0.input_activations is not supported": with_group(input_activations={"num_bits": 8}),
    "weights.num_bits must be 4 or 8, got 2": with_weights(num_bits=2),
    "weights.type must be int, got float": with_weights(type="float"),
    "weights.dynamic is not supported, got True": with_weights(dynamic=True),
    "weights.strategy must be group or channel, got block": with_weights(strategy="block"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_quantisation_that_is_not_read_is_refused_by_field_and_value(tmp_path, words):
    config = JsonObject(tmp_path / "config.json", {"quantization_config": REFUSED[words]})
    with pytest.raises(UnsupportedModelError) as caught:
        read_quantization(config)
    assert words in caught.value.message
    assert caught.value.message.startswith(f"{tmp_path / 'config.json'}: quantization_config.")


def test_two_names_of_one_setting_must_agree(tmp_path):
    section = GPTQ | {"checkpoint_format": "gptq", "format": "gptq_v2"}
    config = JsonObject(tmp_path / "config.json", {"quantization_config": section})
    with pytest.raises(ModelFileError, match=r"checkpoint_format gptq and .*format gptq_v2 contra"):
        read_quantization(config)


@pytest.mark.parametrize(
    "section", [{"quant_method": "gptq", "bits": 4}, GPTQ | {"bits": "4"}, GPTQ | {"sym": 1}]
)
def test_a_setting_that_is_missing_or_of_a_wrong_type_is_the_file_s_fault(tmp_path, section):
    config = JsonObject(tmp_path / "config.json", {"quantization_config": section})
    with pytest.raises(ModelFileError, match=r"quantization_config\.\w+ (is missing|must be)"):
        read_quantization(config)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=9), inner, max_size=2)
    ),
    max_leaves=4,
)


@pytest.mark.wide
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_settings_are_read_or_refused_in_one_line(data):
    section = copy.deepcopy(data.draw(st.sampled_from([GPTQ, AWQ, PACKED])))
    place = section
    while True:
        key = data.draw(st.sampled_from(sorted(place)))
        if not isinstance(place[key], dict) or data.draw(st.booleans()):
            break
        place = place[key]
    renamed = data.draw(st.text(max_size=9)) if data.draw(st.booleans()) else key
    place[renamed] = place.pop(key) if renamed != key else data.draw(JSON)
    fault = None
    try:
        read_quantization(JsonObject(Path("c.json"), {"quantization_config": section}))
    except ModelFileError as error:
        fault = error
    if fault is not None:
        assert fault.message.startswith("c.json: quantization_config")
        assert fault.message.isprintable()
        assert len(fault.message) < 500
