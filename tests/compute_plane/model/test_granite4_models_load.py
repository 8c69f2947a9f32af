"""Granite 4 with Mamba-2 from both kinds of files: what they say, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as GgmlType

from compute_plane.model import expert_layout, layout, mamba2_layout
from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.layout import layer_tensor
from compute_plane.model.loader import load_model
from compute_plane.model.mamba2 import Mamba2
from compute_plane.model.spec import Mixture
from tests.compute_plane.model.granite4_models import Granite4Model

KINDS = pytest.mark.parametrize("num_experts", [0, 6], ids=["dense", "experts"])
ATTENTION, MAMBA = "attention", "mamba"


def files_of(tiny, folder: Path, made: Granite4Model) -> tuple[Path, Path]:
    return tiny.directory(folder / "m", made), tiny.gguf(folder / "m.gguf", made)


@KINDS
def test_files_say_what_a_model_is(tiny, tmp_path: Path, num_experts: int) -> None:
    made = Granite4Model(num_experts=num_experts, state_size=96, kernel_size=3, mamba_heads=2)
    for path in files_of(tiny, tmp_path, made):
        spec = load_model(str(path)).spec
        of = spec.recurrence
        assert spec.architecture == "granitehybrid"
        assert isinstance(of, Mamba2)
        assert (of.num_heads, of.head_dim, of.state_size, of.kernel_size) == (2, 64, 96, 3)
        assert of.layers == {0, 2}
        assert of.channels == 128 + 2 * 96
        assert spec.attending_layers() == (1, 3)
        assert spec.layers_without_rope == {0, 1, 2, 3}
        assert spec.mixture == (Mixture(6, 2, shared_size=48) if num_experts else None)
        assert spec.intermediate_size == made.intermediate_size
        assert spec.num_parameters == sum(values.size for values in made.weights.values())
        # That of the norms outside follows from a multiplier, that of Mamba-2's own does not.
        assert of.norm_eps == pytest.approx(1e-5)
        assert spec.rms_norm_eps == pytest.approx(1e-5 / 0.4**2)


def test_a_state_is_as_large_as_in_transformers_where_nothing_is_said(tiny, tmp_path: Path) -> None:
    from transformers import GraniteMoeHybridConfig

    made = Granite4Model(state_size=GraniteMoeHybridConfig().mamba_d_state)
    path = tiny.directory(tmp_path / "m", made, config={"mamba_d_state": None})
    of = load_model(str(path)).spec.recurrence
    assert isinstance(of, Mamba2)
    assert of.state_size == 256


@KINDS
def test_both_kinds_of_files_give_the_tensors_that_are_meant(
    tiny, tmp_path: Path, num_experts: int
) -> None:
    made = Granite4Model(num_experts=num_experts)

    def stored(layer: int, name: str) -> np.ndarray:
        return made.weights[f"model.layers.{layer}.{name}"]

    z, xbc, d = np.split(stored(2, "mamba.in_proj.weight"), [128, 128 + made.channels])
    expected = {
        (mamba2_layout.IN_XBC, layout.WEIGHT): xbc,
        (mamba2_layout.IN_Z, layout.WEIGHT): z,
        (mamba2_layout.IN_D, layout.WEIGHT): d,
        (mamba2_layout.CONVOLUTION, layout.WEIGHT): stored(2, "mamba.conv1d.weight")[:, 0],
        (mamba2_layout.CONVOLUTION, layout.BIAS): stored(2, "mamba.conv1d.bias"),
        (mamba2_layout.MIXER, mamba2_layout.RATES): -np.exp(stored(2, "mamba.A_log")),
        (mamba2_layout.MIXER, mamba2_layout.TIME_BIAS): stored(2, "mamba.dt_bias"),
        (mamba2_layout.MIXER, mamba2_layout.SKIPS): stored(2, "mamba.D"),
        (mamba2_layout.NORM, layout.WEIGHT): stored(2, "mamba.norm.weight"),
        (mamba2_layout.OUT, layout.WEIGHT): stored(2, "mamba.out_proj.weight"),
    }
    gate, up = np.split(stored(2, "shared_mlp.input_linear.weight"), 2)
    parts = {"gate_proj": gate, "up_proj": up}
    parts["down_proj"] = stored(2, "shared_mlp.output_linear.weight")
    shared = expert_layout.SHARED if num_experts else "mlp"
    expected |= {(f"{shared}.{part}", layout.WEIGHT): rows for part, rows in parts.items()}
    if num_experts:
        both = stored(2, "block_sparse_moe.input_linear.weight")
        down = stored(2, "block_sparse_moe.output_linear.weight")
        router = stored(2, "block_sparse_moe.router.layer.weight")
        role = expert_layout.expert_role
        expected |= {
            (expert_layout.ROUTER, layout.WEIGHT): router,
            (role(4, expert_layout.GATE), layout.WEIGHT): both[4, :96],
            (role(4, expert_layout.UP), layout.WEIGHT): both[4, 96:],
            (role(5, expert_layout.DOWN), layout.WEIGHT): down[5],
        }
    for path in files_of(tiny, tmp_path, made):
        source = load_model(str(path)).source
        for (role_name, part), values in expected.items():
            found = source.tensor(layer_tensor(2, role_name, part)).to_float32()
            np.testing.assert_allclose(found, values, rtol=1e-6)


@pytest.mark.parametrize("kind", [GgmlType.Q8_0, GgmlType.Q4_1])
def test_rows_of_quantised_projections_are_what_the_file_has(
    tiny, tmp_path: Path, kind: GgmlType
) -> None:
    """Three parts lie in one tensor; each keeps its own rows' blocks."""
    made = Granite4Model()
    source = load_model(str(tiny.gguf(tmp_path / "m.gguf", made, kind))).source
    rows = gguf.quants.quantize(made.weights["model.layers.0.mamba.in_proj.weight"], kind)
    whole = gguf.quants.dequantize(rows, kind)
    roles = mamba2_layout.IN_Z, mamba2_layout.IN_XBC, mamba2_layout.IN_D
    found = [source.tensor(layer_tensor(0, role)).to_float32() for role in roles]
    np.testing.assert_array_equal(np.concatenate(found), whole)


@pytest.mark.parametrize("limit", [[0.0, float("inf")], [0.0, {"__float__": "Infinity"}], None])
@pytest.mark.parametrize("names", [(ATTENTION, MAMBA), ("full_attention", "linear_attention")])
def test_configurations_of_other_versions_say_the_same(
    tiny, tmp_path: Path, limit: Any, names: tuple[str, str]
) -> None:
    made, (attends, mamba) = Granite4Model(), names
    own = {
        "layers_block_type": [mamba, attends, mamba, attends], "layer_types": None,
        "time_step_limit": limit, "mamba_d_head": "auto",
    }  # fmt: skip
    path = tiny.directory(tmp_path / "m", made, config=own)
    assert load_model(str(path)).spec.layers_with_state() == (0, 2)


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({"mamba_n_groups": 2}, UnsupportedModelError, "mamba_n_groups must be 1, got 2"),
        ({"mamba_conv_bias": False}, UnsupportedModelError, "mamba_conv_bias must be true"),
        ({"mamba_proj_bias": True}, UnsupportedModelError, "mamba_proj_bias must be false"),
        ({"time_step_limit": [0.001, 0.1]}, UnsupportedModelError, "bounds of time steps are not"),
        ({"layer_types": [MAMBA] * 4}, ModelFileError, "at least one of the model's layers must"),
        ({"layer_types": None}, ModelFileError, "at least one of the model's layers must attend"),
        ({"layer_types": [MAMBA] * 3}, ModelFileError, "for each of 4 layers"),
        ({"layer_types": [MAMBA, "x", MAMBA, "x"]}, ModelFileError, "layer_types must be"),
        ({"mamba_n_heads": 3}, ModelFileError, "128 is not a multiple of mamba_n_heads 3"),
        ({"mamba_n_heads": 0}, ModelFileError, "is not a multiple of mamba_n_heads 0"),
        ({"mamba_d_head": 64}, ModelFileError, "mamba_d_head must be 32"),
        ({"mamba_n_heads": 16, "mamba_d_head": 8}, ModelFileError, "head_dim must be a multiple"),
        ({"mamba_d_state": 48}, ModelFileError, "state_size must be a multiple of 32 up to 256"),
        ({"mamba_d_state": 512}, ModelFileError, "state_size must be a multiple of 32 up to 256"),
        ({"mamba_d_conv": 1}, ModelFileError, "kernel_size must be 2 to 8, got 1"),
        ({"mamba_d_state": 96}, ModelFileError, "mamba.in_proj.weight has shape"),
        ({"attention_bias": True}, UnsupportedModelError, "attention_bias = true"),
    ],
)
def test_configurations_that_cannot_be_or_compute_otherwise_are_refused(
    tiny, tmp_path: Path, config: dict[str, Any], error: type[Exception], words: str
) -> None:
    path = tiny.directory(tmp_path / "m", Granite4Model(), config=config)
    with pytest.raises(error, match=words) as caught:
        load_model(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "error", "words"),
    [
        ("ssm.group_count", 2, UnsupportedModelError, "ssm.group_count must be 1, got 2"),
        ("ssm.time_step_rank", 3, ModelFileError, "ssm.inner_size 128 is not a multiple of"),
        ("ssm.time_step_rank", 0, ModelFileError, "ssm.inner_size 128 is not a multiple of"),
        ("ssm.conv_kernel", None, ModelFileError, "ssm.conv_kernel is missing"),
        ("ssm.state_size", 32, ModelFileError, "ssm_in.weight has shape"),
        ("attention.head_count_kv", [2, 2, 0, 2], ModelFileError, "missing tensors: blk.0.attn_q"),
    ],
)
def test_files_that_cannot_be_are_refused(
    tiny, tmp_path: Path, key: str, value: Any, error: type[Exception], words: str
) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0][f"granitehybrid.{key}"]
        if isinstance(value, list):
            writer.add_array(f"granitehybrid.{key}", value)
        elif value is not None:
            writer.add_uint32(f"granitehybrid.{key}", value)

    path = tiny.gguf(tmp_path / "m.gguf", Granite4Model(), change=change)
    with pytest.raises(error, match=words) as caught:
        load_model(str(path))
    assert "\n" not in str(caught.value)


def test_what_transformers_saves_is_read(tiny, tmp_path: Path) -> None:
    """It names layers otherwise, and writes infinity in words."""
    from transformers import AutoModelForCausalLM

    made = Granite4Model(num_experts=6)
    folder = tiny.directory(tmp_path / "m", made)
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "tokenizer.json").write_text(json.dumps(tiny.tokenizer()))
    given, saved = (load_model(str(path)) for path in (folder, tmp_path / "saved"))
    assert saved.spec.recurrence == given.spec.recurrence
    for name in given.source.names:
        one, other = (model.source.tensor(name).to_float32() for model in (given, saved))
        np.testing.assert_array_equal(one, other)
