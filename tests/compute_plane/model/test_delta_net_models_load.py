"""Qwen3-Next and Qwen3.5 from both kinds of files: what they say, and which rows are which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import quants
from gguf.constants import GGMLQuantizationType as GgmlType

from compute_plane.model import delta_net_layout, expert_layout, layout
from compute_plane.model.delta_net import DeltaNet
from compute_plane.model.layout import layer_tensor
from compute_plane.model.loader import LoadedModel, load_model
from compute_plane.model.quantize import converted_tensor
from compute_plane.model.spec import Mixture
from compute_plane.model.tensor import TensorFormat
from tests.compute_plane.model.delta_net_models import IN_GGUF, DeltaNetModel
from tests.compute_plane.model.group_checkpoints import Scheme, checkpoint

KINDS = pytest.mark.parametrize("architecture", IN_GGUF)
FIRST_THREE = frozenset({0, 1, 2})
MIXTURE = Mixture(6, 2, shared_size=48, gates_shared=True)
AHEAD = {
    "mtp.fc.weight": np.ones((3, 3), np.float32),
    "mtp.layers.0.self_attn.q_proj.weight": np.ones((3, 3), np.float32),
    "mtp.layers.0.input_layernorm.weight": np.ones(3, np.float32),
}


def of_layer(model: LoadedModel, layer: int, role: str, part: str = layout.WEIGHT) -> np.ndarray:
    return model.source.tensor(layer_tensor(layer, role, part)).to_float32()


def named(made: DeltaNetModel, layer: int, name: str) -> np.ndarray:
    return made.weights[f"model.layers.{layer}.{name}"]


@KINDS
def test_files_say_what_a_model_is(tiny, tmp_path: Path, architecture: str) -> None:
    made = DeltaNetModel(architecture=architecture, num_value_heads=8, value_dim=64, kernel_size=3)
    for path in (
        tiny.directory(tmp_path / "m", made, weights=made.weights | AHEAD),
        tiny.gguf(tmp_path / "m.gguf", made),
    ):
        spec = load_model(str(path)).spec
        # llama.cpp repeats key heads over value heads where transformers repeats each.
        tiled = path.suffix == ".gguf" and architecture != "qwen3_next"
        assert spec.architecture == IN_GGUF[architecture]
        assert spec.recurrence == DeltaNet(2, 8, 32, 64, 3, FIRST_THREE, tiled)
        assert spec.recurrence.channels == 2 * 2 * 32 + 8 * 64
        assert spec.attending_layers() == (3,)
        assert spec.gates_attention
        assert (spec.num_turning, spec.head_dim) == (8, 32)
        assert spec.mixture == (None if architecture == "qwen3_5_text" else MIXTURE)
        assert spec.num_parameters == sum(values.size for values in made.weights.values())


@KINDS
def test_value_heads_are_never_tiled_where_each_has_a_key_head_of_its_own(
    tiny, tmp_path: Path, architecture: str
) -> None:
    made = DeltaNetModel(architecture=architecture, num_key_heads=4)
    spec = load_model(str(tiny.gguf(tmp_path / "m.gguf", made))).spec
    assert spec.recurrence == DeltaNet(4, 4, 32, 32, 4, FIRST_THREE)


@pytest.mark.parametrize("is_flat", [False, True], ids=["[C, 1, K]", "[C, K]"])
@KINDS
def test_a_directory_gives_the_rows_that_are_meant(
    tiny, tmp_path: Path, architecture: str, is_flat: bool
) -> None:
    made = DeltaNetModel(architecture=architecture, num_value_heads=6)
    own = {
        name: values[:, 0] if is_flat and values.ndim == 3 else values
        for name, values in made.weights.items()
    }
    model = load_model(str(tiny.directory(tmp_path / "m", made, weights=own)))
    heads = named(made, 3, "self_attn.q_proj.weight").reshape(4, 2, 32, 64)
    order = layout.head_orders(model.spec, turns_neighbours=False)
    turned = order[layer_tensor(3, layout.QUERY)]
    expected = {
        (3, layout.QUERY): heads[:, 0, turned].reshape(128, 64),
        (3, layout.QUERY_GATE): heads[:, 1].reshape(128, 64),
        (3, layout.QUERY_NORM): named(made, 3, "self_attn.q_norm.weight")[turned] + 1,
        (3, layout.ATTN_NORM): named(made, 3, "input_layernorm.weight") + 1,
        (0, layout.ATTN_NORM): named(made, 0, "input_layernorm.weight") + 1,
        (0, delta_net_layout.NORM): named(made, 0, "linear_attn.norm.weight"),
        (0, delta_net_layout.CONVOLUTION): named(made, 0, "linear_attn.conv1d.weight")[:, 0],
        (0, delta_net_layout.OUT): named(made, 0, "linear_attn.out_proj.weight"),
    }
    if architecture == "qwen3_next":
        mixed = named(made, 0, "linear_attn.in_proj_qkvz.weight").reshape(2, -1, 64)
        q, k, v, z = np.split(mixed, [32, 64, 64 + 96], axis=1)
        b, a = np.split(
            named(made, 0, "linear_attn.in_proj_ba.weight").reshape(2, 6, 64), 2, axis=1
        )
        qkv = np.concatenate([part.reshape(-1, 64) for part in (q, k, v)])
        z, b, a = (part.reshape(-1, 64) for part in (z, b, a))
    else:
        qkv, z, b, a = (
            named(made, 0, f"linear_attn.in_proj_{part}.weight") for part in ("qkv", "z", "b", "a")
        )
    expected |= {
        (0, delta_net_layout.IN_QKV): qkv,
        (0, delta_net_layout.IN_Z): z,
        (0, delta_net_layout.IN_B): b,
        (0, delta_net_layout.IN_A): a,
    }
    for (layer, role), values in expected.items():
        np.testing.assert_array_equal(of_layer(model, layer, role), values)
    mixer = delta_net_layout.MIXER
    rates = -np.exp(named(made, 0, "linear_attn.A_log"))
    np.testing.assert_array_equal(of_layer(model, 0, mixer, delta_net_layout.RATES), rates)
    biases = named(made, 0, "linear_attn.dt_bias")
    np.testing.assert_array_equal(of_layer(model, 0, mixer, delta_net_layout.TIME_BIAS), biases)


def test_rates_that_are_packed_are_no_logarithms(tiny, tmp_path: Path) -> None:
    """What executors take is what `to_float32` gives, in the format they want."""
    made = DeltaNetModel()
    model = load_model(str(tiny.directory(tmp_path / "m", made)))
    tensor = model.source.tensor(layer_tensor(0, delta_net_layout.MIXER, delta_net_layout.RATES))
    rows = converted_tensor(tensor, TensorFormat.F32).view(np.float32)[0]
    np.testing.assert_array_equal(rows, -np.exp(named(made, 0, "linear_attn.A_log")))


@pytest.mark.parametrize("kind", [GgmlType.Q8_0, GgmlType.Q4_0], ids=str)
@KINDS
def test_quantised_rows_are_picked_as_they_are(
    tiny, tmp_path: Path, architecture: str, kind: GgmlType
) -> None:
    made = DeltaNetModel(architecture=architecture)
    model = load_model(str(tiny.gguf(tmp_path / "m.gguf", made, kind)))
    stored = quants.quantize(named(made, 3, "self_attn.q_proj.weight"), kind)
    heads = stored.reshape(4, 2, 32, -1)
    gates = model.source.tensor(layer_tensor(3, layout.QUERY_GATE))
    assert gates.format.label == kind.name
    np.testing.assert_array_equal(gates.rows(), heads[:, 1].reshape(128, -1))
    np.testing.assert_array_equal(gates.rows(slice(30, 40)), gates.rows()[30:40])
    queries = model.source.tensor(layer_tensor(3, layout.QUERY))
    assert queries.head_order is not None
    turned = heads[:, 0, queries.head_order].reshape(128, -1)
    np.testing.assert_array_equal(queries.rows(), turned)
    np.testing.assert_array_equal(queries.rows(np.array([77, 3])), turned[[77, 3]])
    if architecture == "qwen3_next":
        mixed = named(made, 0, "linear_attn.in_proj_ba.weight").reshape(2, 2, 2, 64)
        steps = model.source.tensor(layer_tensor(0, delta_net_layout.IN_A))
        own = quants.quantize(mixed[:, 1].reshape(4, 64), kind)
        np.testing.assert_array_equal(steps.rows(), own)


def test_rows_of_a_group_wise_checkpoint_are_picked(tiny, tmp_path: Path) -> None:
    made = DeltaNetModel()
    quantised = checkpoint(made.weights, Scheme())
    settings = {"quantization_config": quantised.scheme.config()}
    folder = tiny.directory(tmp_path / "m", made, config=settings)
    quantised.save(folder / "model.safetensors")
    model = load_model(str(folder))
    heads = quantised.weights["model.layers.3.self_attn.q_proj.weight"].reshape(4, 2, 32, 64)
    gates = of_layer(model, 3, layout.QUERY_GATE)
    np.testing.assert_allclose(gates, heads[:, 1].reshape(128, 64), rtol=1e-6)


@pytest.mark.parametrize("size", [96, 64])
@pytest.mark.parametrize("architecture", ["qwen3_next", "qwen3_5_moe_text"])
def test_experts_may_lie_in_one_tensor_whatever_their_width(
    tiny, tmp_path: Path, architecture: str, size: int
) -> None:
    """As Qwen3.5's are published: outputs first, gate_proj before up_proj."""
    made = DeltaNetModel(architecture=architecture, intermediate_size=size, num_experts=3)
    own = {name: values for name, values in made.weights.items() if ".experts." not in name}
    for layer in range(4):
        stacked = {
            part: np.stack([named(made, layer, f"mlp.experts.{n}.{part}.weight") for n in range(3)])
            for part in (expert_layout.GATE, expert_layout.UP, expert_layout.DOWN)
        }
        prefix = f"model.layers.{layer}.mlp.experts."
        gate_up = [stacked[part] for part in (expert_layout.GATE, expert_layout.UP)]
        own[prefix + "gate_up_proj"] = np.concatenate(gate_up, axis=1)
        own[prefix + "down_proj"] = stacked[expert_layout.DOWN]
    model = load_model(str(tiny.directory(tmp_path / "m", made, weights=own)))
    for part in stacked:
        role = expert_layout.expert_role(1, part)
        expected = named(made, 2, f"mlp.experts.1.{part}.weight")
        np.testing.assert_array_equal(of_layer(model, 2, role), expected)


@pytest.mark.parametrize("files", ["directory", "gguf"])
@KINDS
def test_layers_that_attend_may_be_any(
    tiny, tmp_path: Path, architecture: str, files: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeltaNetModel, "attends", staticmethod(lambda layer: layer in (0, 2)))
    made = DeltaNetModel(architecture=architecture)
    names = ("full_attention", "linear_attention")
    path = tiny.directory(tmp_path / "m", made, config={"layer_types": list(names * 2)})
    if files == "gguf":

        def change(writer: Any) -> None:
            recurrent = [False, True, False, True, False]
            writer.add_array(f"{made.in_gguf}.attention.recurrent_layers", recurrent)
            writer.kv_data[0][f"{made.in_gguf}.block_count"].value = 5
            writer.add_uint32(f"{made.in_gguf}.nextn_predict_layers", 1)

        ahead = {"blk.4.nextn.eh_proj.weight": np.ones((3, 3)), "blk.4.attn_norm.weight": [1.0]}
        path = tiny.gguf(tmp_path / "m.gguf", made, change=change, vectors=ahead)
    spec = load_model(str(path)).spec
    assert spec.attending_layers() == (0, 2)
    assert spec.num_parameters == sum(values.size for values in made.weights.values())


def test_a_model_whose_layers_all_attend_has_no_states(tiny, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(DeltaNetModel, "attends", staticmethod(lambda _layer: True))
    made = DeltaNetModel(num_layers=2)
    config = {"full_attention_interval": 1}
    folder = tiny.directory(tmp_path / "m", made, config=config)

    def change(writer: Any) -> None:
        writer.kv_data[0]["qwen35.full_attention_interval"].value = 1

    for path in (folder, tiny.gguf(tmp_path / "m.gguf", made, change=change)):
        spec = load_model(str(path)).spec
        assert spec.recurrence is None
        assert spec.gates_attention


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("qwen3_next", "Qwen3NextConfig"),
        ("qwen3_5_text", "Qwen3_5TextConfig"),
        ("qwen3_5_moe_text", "Qwen3_5MoeTextConfig"),
    ],
)
def test_what_a_configuration_leaves_out_is_what_transformers_means(
    tmp_path: Path, model_type: str, name: str
) -> None:
    import transformers

    from compute_plane.model.hf_config import read_hf_spec
    from compute_plane.model.json_file import JsonObject

    said = {
        "num_hidden_layers": 9, "vocab_size": 300, "hidden_size": 128, "intermediate_size": 64,
        "num_attention_heads": 32, "moe_intermediate_size": 48, "max_position_embeddings": 512,
    }  # fmt: skip
    theirs = getattr(transformers, name)(**said)
    spec = read_hf_spec(JsonObject(tmp_path, said | {"model_type": model_type}), "m")
    kinds = theirs.layer_types
    assert spec.recurrence == DeltaNet(
        theirs.linear_num_key_heads,
        theirs.linear_num_value_heads,
        theirs.linear_key_head_dim,
        theirs.linear_value_head_dim,
        theirs.linear_conv_kernel_dim,
        frozenset(n for n, kind in enumerate(kinds) if kind == "linear_attention"),
    )
    assert (spec.num_kv_heads, spec.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)
    assert spec.rms_norm_eps == theirs.rms_norm_eps
    assert spec.rope_theta == theirs.rope_parameters["rope_theta"]
    share = theirs.rope_parameters["partial_rotary_factor"]
    assert spec.num_turning == theirs.head_dim * share
    assert spec.tie_embeddings == theirs.tie_word_embeddings
    if spec.mixture is not None:
        shared = theirs.shared_expert_intermediate_size
        assert spec.mixture == Mixture(
            theirs.num_experts, theirs.num_experts_per_tok, shared_size=shared, gates_shared=True
        )
