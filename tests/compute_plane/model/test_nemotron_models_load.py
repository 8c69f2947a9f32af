"""What files of Nemotron-H say, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.loader import load_model
from compute_plane.model.mamba2 import Mamba2
from compute_plane.model.spec import Mixture
from tests.compute_plane.model.nemotron_models import KINDS, NemotronModel
from tests.compute_plane.model.recorded_models import with_keys


def both(tiny, folder: Path, made: NemotronModel, **config) -> list[Path]:
    return [
        tiny.directory(folder / "hf", made, config=config),
        tiny.gguf(folder / "m.gguf", made),
    ]


def test_files_say_what_each_layer_is(tiny, tmp_path: Path) -> None:
    made = NemotronModel(pattern="M-M*-")
    for path in both(tiny, tmp_path, made):
        spec = load_model(str(path)).spec
        assert spec.attending_layers() == (3,)
        assert spec.layers_with_state() == (0, 2)
        assert spec.layers_without_mixer == {1, 4}
        assert spec.layers_without_mlp == {0, 2, 3}
        assert (spec.turns, spec.mixture, spec.intermediate_size) == (False, None, 96)
        epsilon = spec.rms_norm_eps
        assert epsilon == pytest.approx(1e-5)
        states = frozenset({0, 2})
        assert spec.recurrence == Mamba2(4, 32, 64, 4, epsilon, states, num_groups=2)
        assert spec.num_parameters == sum(values.size for values in made.weights.values())


def test_files_say_what_experts_are(tiny, tmp_path: Path) -> None:
    made = NemotronModel(pattern="ME*E")
    for path in both(tiny, tmp_path, made):
        spec = load_model(str(path)).spec
        assert spec.mixture == Mixture(6, 2, True, "sigmoid", 1.75, True, 48)
        assert [spec.mixture_of(layer) is None for layer in range(4)] == [True, False, True, False]
        assert spec.layers_without_mixer == {1, 3}
        assert spec.num_parameters == sum(values.size for values in made.weights.values())


@pytest.mark.parametrize("pattern", ["M-M*-", "ME*"])
def test_both_kinds_of_files_give_the_same_tensors(tiny, tmp_path: Path, pattern: str) -> None:
    directory, file = both(tiny, tmp_path, NemotronModel(pattern=pattern))
    one, other = load_model(str(directory)).source, load_model(str(file)).source
    assert list(one.names) == list(other.names)
    for name in one.names:
        found, expected = one.tensor(name).to_float32(), other.tensor(name).to_float32()
        np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "kinds",
    [
        {"layers_block_type": ["mamba", "mlp", "attention", "mlp"]},
        {"layers_block_type": None, "hybrid_override_pattern": "M-*-"},
        {"layers_block_type": None, "layer_types": [KINDS[letter] for letter in "M-*-"]},
    ],
)
def test_layers_are_named_in_several_ways(tiny, tmp_path: Path, kinds) -> None:
    path = tiny.directory(tmp_path / "m", NemotronModel(pattern="M-*-"), config=kinds)
    spec = load_model(str(path)).spec
    assert (spec.layers_with_state(), spec.attending_layers()) == ((0,), (2,))


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"moe_latent_size": 32}, UnsupportedModelError, "moe_latent_size must be none, got 32"),
        ({"mlp_hidden_act": "silu"}, UnsupportedModelError, "mlp_hidden_act must be relu2"),
        ({"mamba_hidden_act": "gelu"}, UnsupportedModelError, "mamba_hidden_act must be silu"),
        ({"use_conv_bias": False}, UnsupportedModelError, "use_conv_bias must be true"),
        ({"use_bias": True}, UnsupportedModelError, "use_bias"),
        ({"attention_bias": True}, UnsupportedModelError, "attention_bias = true"),
        ({"mlp_bias": True}, UnsupportedModelError, "mlp_bias = true"),
        ({"time_step_limit": [0.0, 0.5]}, UnsupportedModelError, "bounds of time steps"),
        ({"num_hidden_layers": 3}, ModelFileError, "num_hidden_layers is 3, but 4 layers"),
        ({"layers_block_type": ["mamba", "x"]}, ModelFileError, "layers_block_type must be"),
        (
            {"layers_block_type": ["mamba", "moe", "attention", "mlp"]},
            UnsupportedModelError,
            "one MLP beside layers with experts",
        ),
        ({"layers_block_type": []}, ModelFileError, "1 to 4096 layers, got 0"),
        ({"n_groups": 3}, ModelFileError, "num_groups must divide 4 heads"),
        (
            {"layers_block_type": ["mamba", "mlp"] * 2},
            ModelFileError,
            "at least one of the model's layers must attend",
        ),
    ],
)
def test_what_is_another_model_is_refused(tiny, tmp_path, config, error, message) -> None:
    path = tiny.directory(tmp_path / "m", NemotronModel(pattern="M-*-"), config=config)
    with pytest.raises(error, match=message):
        load_model(str(path))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"feed_forward_length": [96, 96]}, "feed_forward_length must have a number for each of 4"),
        ({"feed_forward_length": [0, 96, 0, 80]}, "must be the same in all layers where it is"),
        ({"ssm.group_count": 3}, "num_groups must divide 4 heads"),
        ({"moe_latent_size": 32}, "moe_latent_size is not supported"),
    ],
)
def test_numbers_of_gguf_files_that_cannot_be_are_refused(tiny, tmp_path, keys, message) -> None:
    made = NemotronModel(pattern="M-*-")

    def change(writer) -> None:
        for key in keys:
            writer.kv_data[0].pop(f"{made.in_gguf}.{key}", None)
        with_keys(made.in_gguf, keys)(writer)

    path = tiny.gguf(tmp_path / "m.gguf", made, change=change)
    with pytest.raises(ModelFileError, match=message):
        load_model(str(path))


def test_what_predicts_ahead_is_left_out(tiny, tmp_path: Path) -> None:
    made = NemotronModel(pattern="ME*E")
    count = sum(values.size for values in made.weights.values())
    made.weights["mtp.layers.0.norm.weight"] = np.ones(64, np.float32)
    path = tiny.directory(tmp_path / "m", made)
    assert load_model(str(path)).spec.num_parameters == count
