"""What files of Falcon-H1 say, what becomes of multipliers, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.loader import load_model
from compute_plane.model.mamba2 import Mamba2
from compute_plane.model.quantize import convert_rows, converted_tensor
from compute_plane.model.tensor import RawTensor, TensorFormat
from tests.compute_plane.model.falcon_models import MULTIPLIERS, FalconModel
from tests.compute_plane.model.recorded_models import with_keys

ONES = {
    key: [1.0] * len(value) if isinstance(value, list) else 1.0
    for key, value in MULTIPLIERS.items()
}
LAYER = "model.layers.1."


def both(tiny, folder: Path, made: FalconModel, **config) -> list[Path]:
    return [
        tiny.directory(folder / "hf", made, config=config),
        tiny.gguf(folder / "m.gguf", made),
    ]


@pytest.mark.parametrize("has_norm", [False, True])
def test_all_layers_attend_and_have_a_state(tiny, tmp_path: Path, has_norm: bool) -> None:
    made = FalconModel(has_norm=has_norm)
    for path in both(tiny, tmp_path, made):
        spec = load_model(str(path)).spec
        assert spec.attending_layers() == spec.layers_with_keys() == spec.layers_with_state()
        assert spec.attending_layers() == (0, 1, 2)
        layers, epsilon = frozenset(range(3)), pytest.approx(1e-5)
        expected = Mamba2(6, 32, 64, 4, 1e-5, layers, num_groups=2, has_norm=has_norm)
        assert spec.recurrence == replace(expected, norm_eps=spec.recurrence.norm_eps)
        assert spec.recurrence.norm_eps == epsilon
        assert (spec.rope_theta, spec.rotary_dim) == (pytest.approx(1e11), None)
        assert spec.num_parameters == sum(values.size for values in made.weights.values())


def test_what_is_multiplied_is_the_same_in_both_kinds_of_files(tiny, tmp_path: Path) -> None:
    """A GGUF file has all in its matrices; of a directory most matrices are as they are stored."""
    made = FalconModel(has_norm=True)
    directory, file = (load_model(str(path)) for path in both(tiny, tmp_path, made))
    spec, one, other = directory.spec, directory.source, file.source
    assert list(one.names) == list(other.names)

    def products(source, *roles: str) -> np.ndarray:
        """Of the norm ahead and a matrix, or of a matrix and the norm ahead of it."""
        first, second = (source.tensor(f"{LAYER}{role}.weight").to_float32() for role in roles)
        return first * second

    down_of, gate_of = MULTIPLIERS["mlp_multipliers"][::-1]
    units = down_of / gate_of
    norm = "input_layernorm"
    for role in ("mamba.in_proj_z", "mamba.in_proj_d"):
        found, expected = (products(source, role, norm) for source in (one, other))
        np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=role)
    rows, taps = (
        [source.tensor(f"{LAYER}mamba.{role}.weight").to_float32() for source in (one, other)]
        for role in ("in_proj_xbc", "conv1d")
    )
    norms = [source.tensor(f"{LAYER}{norm}.weight").to_float32() for source in (one, other)]
    convolved = [
        tap[:, :1] * row * weight for tap, row, weight in zip(taps, rows, norms, strict=True)
    ]
    np.testing.assert_allclose(*convolved, rtol=1e-6)
    for first, second, name in (
        ("self_attn.o_proj", "self_attn.v_proj", "attention"),
        ("mamba.out_proj", "mamba.norm", "a state"),
    ):
        ratio = [
            np.abs(source.tensor(f"{LAYER}{first}.weight").to_float32()).mean()
            * np.abs(source.tensor(f"{LAYER}{second}.weight").to_float32()).mean()
            for source in (one, other)
        ]
        if name == "attention":
            ratio = [of * np.abs(w).mean() for of, w in zip(ratio, norms, strict=True)]
        assert ratio[0] * units == pytest.approx(ratio[1], rel=1e-5), name
    assert spec.embedding_scale * units == pytest.approx(MULTIPLIERS["embedding_multiplier"])
    assert spec.rms_norm_eps * units**2 == pytest.approx(1e-5)
    assert spec.logits_scale == MULTIPLIERS["lm_head_multiplier"]
    kept = ("q_proj", "k_proj", "o_proj", "out_proj", "gate_proj", "up_proj", "down_proj", "in_z")
    assert not any(one.tensor(name).is_multiplied for name in one.names if kept in name.split("."))


def test_without_multipliers_nothing_is_multiplied(tiny, tmp_path: Path) -> None:
    path = tiny.directory(tmp_path / "hf", FalconModel(), config=ONES)
    spec = load_model(str(path)).spec
    assert spec.factors is None
    assert (spec.embedding_scale, spec.score_scale, spec.logits_scale) == (1, None, 1)


def test_what_is_left_out_of_a_config_is_what_transformers_takes(tiny, tmp_path: Path) -> None:
    left_out = dict.fromkeys((*MULTIPLIERS, "mamba_d_ssm", "rms_norm_eps", "mamba_d_head"))
    path = tiny.directory(
        tmp_path / "hf",
        FalconModel(mamba_heads=4, mamba_head_dim=32),
        config={**left_out, "mamba_expand": 2, "mamba_d_head": "auto"},
    )
    of = load_model(str(path)).spec.recurrence
    assert (of.num_heads, of.head_dim) == (4, 32)  # mamba_d_ssm of null is twice what is hidden


FORMATS = (TensorFormat.F32, TensorFormat.F16, TensorFormat.BF16, TensorFormat.INT8)


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("factor", [0.3, np.array([0.3, 2.0, 7.0], np.float32)])
def test_what_is_multiplied_is_rounded_once(stored: TensorFormat, factor) -> None:
    random, path = np.random.default_rng(3), Path("memory")
    if stored is TensorFormat.INT8:
        blocks = random.integers(0, 256, (3, 2, 36), np.uint8)
        blocks[:, :, :4] = random.uniform(0.1, 1, (3, 2, 1)).astype(np.float32).view(np.uint8)
        rows = blocks.reshape(3, -1)
    else:
        values = random.standard_normal((3, 64), np.float32)
        rows = convert_rows(values.view(np.uint8), FORMATS[0], stored, path=path, name="w")
    plain = RawTensor("w", "w", path, stored, (3, 64), rows)
    tensor, before = replace(plain, factor=factor), rows.copy()
    exact = plain.to_float32() * tensor.factors()
    np.testing.assert_array_equal(tensor.to_float32(), exact)
    some, bounds = np.array([2, 0]), {TensorFormat.F32: 2**-23, TensorFormat.BF16: 2**-8}
    if stored is TensorFormat.INT8:  # its scales are rounded, to float16
        bounds[TensorFormat.Q8_0] = 2**-10
    for target, bound in bounds.items():
        found = converted_tensor(tensor, target, some)
        values = convert_rows(found, target, FORMATS[0], path=path, name="w").view(np.float32)
        np.testing.assert_allclose(values, exact[some], rtol=bound)
    np.testing.assert_array_equal(tensor.rows(), before)  # the file's are not changed


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"mamba_conv_bias": False}, UnsupportedModelError, "mamba_conv_bias must be true"),
        ({"mamba_proj_bias": True}, UnsupportedModelError, "mamba_proj_bias must be false"),
        ({"projectors_bias": True}, UnsupportedModelError, "projectors_bias must be false"),
        ({"mamba_use_mlp": False}, UnsupportedModelError, "mamba_use_mlp must be true"),
        ({"attn_layer_indices": [1]}, UnsupportedModelError, "attn_layer_indices must be none"),
        ({"time_step_limit": [0.0, 0.5]}, UnsupportedModelError, "bounds of time steps"),
        ({"attention_bias": True}, UnsupportedModelError, "attention_bias = true"),
        ({"mlp_bias": True}, UnsupportedModelError, "mlp_bias = true"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act must be silu"),
        (
            {"mamba_rms_norm": True, "mamba_norm_before_gate": True},
            UnsupportedModelError,
            "mamba_norm_before_gate must be false where mamba_rms_norm is true",
        ),
        ({"mamba_d_ssm": 190}, ModelFileError, "mamba_d_ssm 190 is not a multiple"),
        ({"mamba_d_head": 64}, ModelFileError, "mamba_d_head must be 32"),
        ({"mamba_n_groups": 4}, ModelFileError, "num_groups must divide 6 heads"),
        ({"ssm_multipliers": [1.0] * 4}, ModelFileError, "ssm_multipliers must have 5 numbers"),
        ({"mlp_multipliers": [0.5, 0.0]}, ModelFileError, "multipliers of mlp_out must be 0.0001"),
        ({"key_multiplier": -1.0}, ModelFileError, "multipliers of keys must be 0.0001 to 10000"),
    ],
)
def test_what_is_another_model_is_refused(tiny, tmp_path, config, error, message) -> None:
    path = tiny.directory(tmp_path / "m", FalconModel(), config=config)
    with pytest.raises(error, match=message):
        load_model(str(path))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"ssm.group_count": 4}, "num_groups must divide 6 heads"),
        ({"ssm.inner_size": 190}, "ssm.inner_size 190 is not a multiple"),
        ({"ssm.state_size": 60}, "state_size must be a multiple of 32"),
        ({"attention.scale": 0.5}, "attention.scale"),
    ],
)
def test_numbers_of_gguf_files_that_cannot_be_are_refused(tiny, tmp_path, keys, message) -> None:
    made = FalconModel()

    def change(writer) -> None:
        for key in keys:
            writer.kv_data[0].pop(f"{made.in_gguf}.{key}", None)
        with_keys(made.in_gguf, keys)(writer)

    path = tiny.gguf(tmp_path / "m.gguf", made, change=change)
    with pytest.raises(ModelFileError, match=message):
        load_model(str(path))


def test_scores_have_what_queries_and_keys_are_multiplied_by(tiny, tmp_path: Path) -> None:
    path = tiny.directory(tmp_path / "hf", FalconModel(), config={**ONES, "key_multiplier": 0.25})
    spec = load_model(str(path)).spec
    assert spec.score_scale == pytest.approx(0.25 / math.sqrt(32))
