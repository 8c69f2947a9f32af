"""Attention over latents from both kinds of files: what they say, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from compute_plane.model import latent_layout, layout
from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.latents import Latents, latent_score_scale
from compute_plane.model.loader import load_model
from compute_plane.model.rope_scaling import YarnScaling
from compute_plane.model.spec import Mixture
from tests.compute_plane.model.latent_models import CLASSES, LatentModel

KINDS = pytest.mark.parametrize("architecture", CLASSES)


def files_of(tiny, folder: Path, made: LatentModel) -> tuple[Path, Path]:
    return tiny.directory(folder / "m", made), tiny.gguf(folder / "m.gguf", made)


@KINDS
@pytest.mark.parametrize("is_older", [False, True])
def test_files_say_what_a_model_is(tiny, tmp_path: Path, architecture: str, is_older: bool) -> None:
    made = LatentModel(architecture=architecture, is_older=is_older)
    mixture = Mixture(
        8, 3, scores="sigmoid" if made.corrects else "softmax", corrects_choice=made.corrects,
        normalises_weights=made.corrects, weight_scale=1.5, shared_size=made.intermediate_size,
        dense_layers=1, dense_size=made.dense_size, num_groups=4, groups_per_token=2,
    )  # fmt: skip
    for path in files_of(tiny, tmp_path, made):
        spec = load_model(str(path)).spec
        joins = path.is_dir() or is_older
        assert spec.architecture == "deepseek2"
        assert spec.latents == Latents(32, 16, 32, 64, 96, 1 / math.sqrt(48), joins)
        assert (spec.num_kv_heads, spec.head_dim, spec.value_dim) == (1, 48, 32)
        assert spec.attended_size == 4 * 64
        assert spec.num_turning == 16
        assert spec.mixture == (mixture if made.has_experts else None)
        assert spec.num_parameters == sum(values.size for values in made.weights.values())


def test_queries_may_be_a_product_of_the_hidden_state(tiny, tmp_path: Path) -> None:
    for path in files_of(tiny, tmp_path, LatentModel(query_rank=0)):
        latents = load_model(str(path)).spec.latents
        assert latents is not None
        assert latents.query_rank == 0


@pytest.mark.parametrize("is_older", [False, True])
def test_both_kinds_of_files_give_the_tensors_that_are_meant(
    tiny, tmp_path: Path, is_older: bool
) -> None:
    made = LatentModel(is_older=is_older)
    prefix = "model.layers.1.self_attn."
    heads = made.weights[f"{prefix}kv_b_proj.weight"].reshape(made.num_heads, -1, made.rank)
    keys = heads[:, : made.plain].swapaxes(1, 2).reshape(-1, made.plain)
    # Neighbours turn in files: the model has those of even number first.
    turning = [*range(0, made.turning, 2), *range(1, made.turning, 2)]
    latents = [*range(made.rank), *(made.rank + i for i in turning)]
    queries = made.weights[f"{prefix}q_b_proj.weight"].reshape(made.num_heads, -1, made.query_rank)
    order = [*range(made.plain), *(made.plain + i for i in turning)]
    expected = {
        latent_layout.KEYS: keys,
        latent_layout.VALUES: heads[:, made.plain :].reshape(-1, made.rank),
        latent_layout.LATENT: made.weights[f"{prefix}kv_a_proj_with_mqa.weight"][latents],
        latent_layout.QUERY_SECOND: queries[:, order].reshape(-1, made.query_rank),
        latent_layout.QUERY_NORM: made.weights[f"{prefix}q_a_layernorm.weight"],
    }
    for path in files_of(tiny, tmp_path, made):
        source = load_model(str(path)).source
        for role, values in expected.items():
            tensor = source.tensor(layout.layer_tensor(1, role))
            np.testing.assert_array_equal(tensor.to_float32(), values, err_msg=role)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_keys_of_sixteen_bits_are_turned_as_they_are(tiny, tmp_path: Path, dtype: str) -> None:
    import torch
    from safetensors.torch import save_file

    made = LatentModel(architecture="youtu")
    directory = tiny.directory(tmp_path / "m", made)
    kind = getattr(torch, dtype)
    stored = {name: torch.from_numpy(values).to(kind) for name, values in made.weights.items()}
    save_file(stored, directory / "model.safetensors")
    tensor = load_model(str(directory)).source.tensor("model.layers.0.self_attn.k_b_proj.weight")
    heads = stored["model.layers.0.self_attn.kv_b_proj.weight"].float().numpy()
    heads = heads.reshape(made.num_heads, -1, made.rank)[:, : made.plain]
    np.testing.assert_array_equal(tensor.to_float32(), heads.swapaxes(1, 2).reshape(-1, made.plain))
    some = np.array([70, 3, 3, 127])
    np.testing.assert_array_equal(tensor.rows(some), tensor.rows()[some])


def test_scores_grow_where_yarn_scales_positions(tiny, tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 64}
    made = LatentModel()

    def latents(**own: Any) -> Latents:
        config = {"rope_scaling": scaling | own}
        spec = load_model(str(tiny.directory(tmp_path / "m", made, config=config))).spec
        assert isinstance(spec.rope_scaling, YarnScaling)
        assert spec.latents is not None
        return spec.latents

    grown = 0.1 * 0.707 * math.log(40) + 1
    both = latents(mscale=0.707, mscale_all_dim=0.707)
    assert both.score_scale == pytest.approx(grown * grown / math.sqrt(48))
    assert latents().score_scale == pytest.approx(1 / math.sqrt(48))
    assert latent_score_scale(48, 0.5, 1.0) == pytest.approx(1 / math.sqrt(48))


@pytest.mark.parametrize("multiplier", [None, 0.0707])
def test_yarn_turns_the_same_from_both_kinds_of_files(
    tiny, tmp_path: Path, multiplier: float | None
) -> None:
    """Where scores do not grow, what is turned does."""
    scaling = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64}
    keys: dict[str, Any] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 40.0,
        "rope.scaling.original_context_length": 64,
    }
    if multiplier is not None:
        scaling |= {"mscale": 0.707, "mscale_all_dim": 0.707}
        keys["rope.scaling.yarn_log_multiplier"] = multiplier
    made = LatentModel()
    directory = tiny.directory(tmp_path / "m", made, config={"rope_scaling": scaling})
    file = tiny.gguf(tmp_path / "m.gguf", made, change=with_keys(**keys))
    specs = [load_model(str(path)).spec for path in (directory, file)]
    factors = [getattr(spec.rope_scaling, "attention_factor", None) for spec in specs]
    grown = 1.0 if multiplier else 0.1 * math.log(40) + 1
    assert factors == pytest.approx([grown, grown])
    assert specs[1].latents is not None
    assert specs[0].latents is not None
    assert specs[1].latents.score_scale == pytest.approx(specs[0].latents.score_scale)


def test_what_a_configuration_does_not_say_is_what_transformers_takes(tmp_path: Path) -> None:
    from transformers import (
        DeepseekV2Config,
        DeepseekV3Config,
        Glm4MoeLiteConfig,
        YoutuConfig,
    )

    from compute_plane.model.hf_config import read_hf_spec
    from compute_plane.model.json_file import JsonObject

    said = {"vocab_size": 300, "hidden_size": 128, "intermediate_size": 64}
    said |= {"num_hidden_layers": 9, "num_attention_heads": 8, "max_position_embeddings": 512}
    for theirs in (DeepseekV2Config, DeepseekV3Config, Glm4MoeLiteConfig, YoutuConfig):
        config = (
            theirs(**said, num_experts_per_tok=8)
            if theirs is DeepseekV2Config
            else (theirs(**said))
        )
        own: dict[str, Any] = {**said, "model_type": theirs.model_type}
        own["moe_intermediate_size"] = getattr(config, "moe_intermediate_size", 64)
        if theirs is DeepseekV2Config:
            own["num_experts_per_tok"] = 8
        spec = read_hf_spec(JsonObject(tmp_path, own), "m")
        latents = spec.latents
        assert latents is not None
        assert latents.rank == config.kv_lora_rank
        assert latents.turning == config.qk_rope_head_dim
        assert latents.plain == config.qk_nope_head_dim
        assert latents.value_size == config.v_head_dim
        assert latents.query_rank == config.q_lora_rank
        assert spec.rms_norm_eps == config.rms_norm_eps
        assert spec.tie_embeddings == config.tie_word_embeddings
        if spec.mixture is not None:
            mixture = spec.mixture
            assert mixture.num_experts == config.n_routed_experts
            assert mixture.experts_per_token == config.num_experts_per_tok
            assert mixture.weight_scale == config.routed_scaling_factor
            assert mixture.normalises_weights == config.norm_topk_prob
            assert mixture.shared_size == config.n_shared_experts * config.moe_intermediate_size
            groups = (config.n_group or 1, config.topk_group or 1)
            assert (mixture.num_groups, mixture.groups_per_token) == groups
            dense = getattr(config, "first_k_dense_replace", None)
            if dense is None:
                dense = config.mlp_layer_types.count("dense")
            assert mixture.dense_layers == dense


def test_layers_that_have_one_mlp_may_be_said_one_by_one(tiny, tmp_path: Path) -> None:
    made = LatentModel(architecture="glm4_moe_lite", groups=(1, 1))
    own = {"first_k_dense_replace": None, "mlp_layer_types": ["dense", "sparse", "sparse"]}
    mixture = load_model(str(tiny.directory(tmp_path / "m", made, config=own))).spec.mixture
    assert mixture is not None
    assert mixture.dense_layers == 1


@pytest.mark.parametrize(
    ("architecture", "config", "error", "words"),
    [
        ("deepseek_v3", {"rope_interleave": False}, UnsupportedModelError, "rope_interleave"),
        ("deepseek_v3", {"scoring_func": "softmax"}, UnsupportedModelError, "must be sigmoid"),
        ("deepseek_v3", {"topk_method": "greedy"}, UnsupportedModelError, "must be noaux_tc"),
        ("deepseek_v3", {"moe_layer_freq": 2}, UnsupportedModelError, "moe_layer_freq"),
        ("deepseek_v3", {"attention_bias": True}, UnsupportedModelError, "attention_bias = true"),
        ("deepseek_v3", {"n_group": 3}, ModelFileError, "num_groups must divide 8 experts, got 3"),
        ("deepseek_v3", {"topk_group": 5}, ModelFileError, "must be 1 to 4, got 5"),
        ("deepseek_v3", {"kv_lora_rank": 40}, ModelFileError, "rank must be a multiple of 32"),
        ("deepseek_v3", {"kv_lora_rank": 1056}, ModelFileError, "32 up to 1024, got 1056"),
        ("deepseek_v3", {"qk_nope_head_dim": 0}, ModelFileError, "plain must be a multiple"),
        ("deepseek_v3", {"qk_nope_head_dim": 544}, ModelFileError, "32 up to 512, got 544"),
        ("deepseek_v3", {"v_head_dim": 4096}, ModelFileError, "up to 512, got 4096"),
        ("deepseek_v3", {"qk_rope_head_dim": 15}, ModelFileError, "must be even"),
        ("deepseek_v3", {"q_lora_rank": -32}, ModelFileError, "query_rank must be a multiple"),
        ("deepseek_v3", {"kv_lora_rank": 64}, ModelFileError, "has shape .*the model needs"),
        ("deepseek_v3", {"q_lora_rank": None}, ModelFileError, r"missing tensors: .*q_proj"),
        ("deepseek_v3", {"partial_rotary_factor": 0.5}, UnsupportedModelError, "partial_rotary"),
        ("deepseek_v3", {"n_shared_experts": None}, UnsupportedModelError, "n_shared_experts = n"),
        ("deepseek_v2", {"n_shared_experts": None}, UnsupportedModelError, "n_shared_experts = n"),
        (
            "deepseek_v3",
            {"rope_scaling": {"type": "linear", "factor": 40.0, "mscale_all_dim": 1.0}},
            UnsupportedModelError,
            "mscale_all_dim beside RoPE scaling other than yarn",
        ),
        ("deepseek_v2", {"norm_topk_prob": True}, UnsupportedModelError, "norm_topk_prob"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, UnsupportedModelError, "greedy or group_lim"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, UnsupportedModelError, "must be softmax"),
        ("deepseek_v2", {"num_experts_per_tok": None}, ModelFileError, "num_experts_per_tok"),
        (
            "glm4_moe_lite",
            {"mlp_layer_types": ["sparse", "dense", "sparse"]},
            UnsupportedModelError,
            "dense of the first layers and sparse of all others, 3 in all",
        ),
        # Nothing is made as long as a file says that it is.
        (
            "glm4_moe_lite",
            {"num_hidden_layers": 1 << 62, "mlp_layer_types": ["dense"]},
            UnsupportedModelError,
            "sparse of all others, 4611686018427387904 in all",
        ),
    ],
)
def test_configurations_that_cannot_be_or_compute_otherwise_are_refused(
    tiny, tmp_path: Path, architecture: str, config: dict[str, Any], error: type[Exception],
    words: str,
) -> None:  # fmt: skip
    directory = tiny.directory(
        tmp_path / "m", LatentModel(architecture=architecture), config=config
    )
    with pytest.raises(error, match=words) as caught:
        load_model(str(directory))
    assert "\n" not in str(caught.value)


def with_keys(**keys: Any) -> Any:
    def change(writer: gguf.GGUFWriter) -> None:
        for key, value in keys.items():
            name = "deepseek2." + key.replace("__", ".")
            writer.kv_data[0].pop(name, None)
            if value is not None:
                writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))

    return change


@pytest.mark.parametrize(
    ("keys", "error", "words"),
    [
        ({"attention__temperature_scale": 0.1}, UnsupportedModelError, "temperature_scale is not"),
        ({"attention__kv_lora_rank": None}, ModelFileError, "kv_lora_rank is missing"),
        ({"attention__value_length_mla": None}, ModelFileError, "value_length_mla is missing"),
        ({"rope__dimension_count": None}, ModelFileError, "rope.dimension_count is missing"),
        ({"attention__kv_lora_rank": 64}, ModelFileError, "has shape .*the model needs"),
        ({"expert_group_used_count": 9}, ModelFileError, "must be 1 to 4, got 9"),
        ({"expert_gating_func": 4}, UnsupportedModelError, r"1 \(softmax\) or 2 \(sigmoid\), got"),
    ],
)
def test_gguf_files_that_cannot_be_or_compute_otherwise_are_refused(
    tiny, tmp_path: Path, keys: dict[str, Any], error: type[Exception], words: str
) -> None:
    path = tiny.gguf(tmp_path / "m.gguf", LatentModel(), change=with_keys(**keys))
    with pytest.raises(error, match=words) as caught:
        load_model(str(path))
    assert "\n" not in str(caught.value)


def test_older_gguf_files_of_deepseek_leave_their_scores_to_the_corrections(
    tiny, tmp_path: Path
) -> None:
    """Sigmoids where experts have corrections; and the usual number of groups is one."""
    nothing = dict.fromkeys(("expert_gating_func", "expert_group_count", "expert_group_used_count"))
    for architecture, scores in (("deepseek_v3", "sigmoid"), ("deepseek_v2", "softmax")):
        made = LatentModel(architecture=architecture)
        path = tiny.gguf(tmp_path / f"{scores}.gguf", made, change=with_keys(**nothing))
        mixture = load_model(str(path)).spec.mixture
        assert mixture is not None
        assert (mixture.scores, mixture.num_groups) == (scores, 1)


def test_weights_of_experts_are_scaled_only_where_a_gguf_file_says_so(tiny, tmp_path: Path) -> None:
    path = tiny.gguf(
        tmp_path / "m.gguf", LatentModel(), change=with_keys(expert_weights_scale=None)
    )
    mixture = load_model(str(path)).spec.mixture
    assert mixture is not None
    assert mixture.weight_scale == 1


@pytest.mark.parametrize("model_type", ["deepseek_v3", "kimi_k2", "glm4_moe_lite"])
@pytest.mark.parametrize("says", [True, False])
def test_layers_that_predict_ahead_are_left_out(
    tiny, tmp_path: Path, model_type: str, says: bool
) -> None:
    """One, where nothing is said."""
    kind = model_type if model_type in CLASSES else "deepseek_v3"
    made = LatentModel(architecture=kind, groups=(1, 1))
    made.weights["model.layers.3.eh_proj.weight"] = np.ones((3, 3), np.float32)
    if says:
        made.weights["model.layers.4.eh_proj.weight"] = np.ones((3, 3), np.float32)
    own = {"model_type": model_type, "num_nextn_predict_layers": 2 if says else None}
    assert load_model(str(tiny.directory(tmp_path / "m", made, config=own))).spec.num_layers == 3


@pytest.mark.parametrize("architecture", ["deepseek_v2", "youtu"])
def test_layers_that_no_model_of_a_type_has_are_refused(
    tiny, tmp_path: Path, architecture: str
) -> None:
    made = LatentModel(architecture=architecture)
    made.weights["model.layers.3.eh_proj.weight"] = np.ones((3, 3), np.float32)
    own = {"num_nextn_predict_layers": 1}
    with pytest.raises(ModelFileError, match=r"model\.layers\.3\.eh_proj"):
        load_model(str(tiny.directory(tmp_path / "m", made, config=own)))
