"""Adapters are read so that they change a model as if they had been merged."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as GgmlType
from safetensors.torch import save_file

from compute_plane.model import layout
from compute_plane.model.adapter import ROLES, Adapter
from compute_plane.model.adapter_files import load_adapter
from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.loader import LoadedModel, load_model
from tests.compute_plane.model.falcon_models import FalconModel
from tests.compute_plane.model.gemma4_models import Gemma4Model
from tests.compute_plane.model.lfm2_models import Lfm2Model
from tests.compute_plane.model.made_adapters import (
    ALPHA,
    OF_ATTENTION,
    OF_MLPS,
    RANK,
    V,
    adapter_of,
    small,
)
from tests.compute_plane.model.nemotron_models import NemotronModel
from tests.compute_plane.model.tiny_model import TinyModel


def check_merged(model: LoadedModel, adapter: Adapter, merged: LoadedModel, changed: int) -> None:
    """Check that every matrix of the model and its pair are the merged model's matrix."""
    names = [n for n in model.source.names if n.endswith(tuple(f".{r}.weight" for r in ROLES))]
    assert len(adapter.pairs) == changed
    assert adapter.pairs.keys() <= set(names)
    for name in names:
        weights = model.source.tensor(name).to_float32()
        pair = adapter.pairs.get(name)
        if pair is not None:
            assert (pair.down.dtype, pair.up.dtype) == (np.float32, np.float32)
            assert pair.down.flags.c_contiguous
            assert pair.up.flags.c_contiguous
            weights = weights + pair.up @ pair.down
        expected = merged.source.tensor(name).to_float32()
        np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=2e-5, err_msg=name)


MODELS = {
    "llama": (TinyModel(), 14),
    "qwen2": (TinyModel(architecture="qwen2"), 14),
    "qwen3": (TinyModel(architecture="qwen3"), 14),
    "granite": (TinyModel(architecture="granite"), 14),
    "smollm3": (TinyModel(architecture="smollm3"), 14),
    "olmo2": (TinyModel(architecture="olmo2"), 14),
    "gemma2": (TinyModel(architecture="gemma2"), 14),
    "phi3": (TinyModel(architecture="phi3"), 14),
    "phi3 in part": (TinyModel(architecture="phi3", rotary_dim=12), 14),
    "glm4": (TinyModel(architecture="glm4", rotary_dim=8), 14),
    "ernie4_5": (TinyModel(architecture="ernie4_5"), 14),
    "lfm2": (Lfm2Model(), 20),
    "gemma4": (Gemma4Model(), 28),
    "gemma4, keys are values": (Gemma4Model(keys_are_values=True, global_kv_heads=1), 28),
    "nemotron": (NemotronModel(), 8),
}
OF_EXPERTS = {
    "qwen3_moe": (TinyModel(architecture="qwen3_moe"), 8),
    "glm4_moe": (TinyModel(architecture="glm4_moe", dense_layers=1, rotary_dim=8), 11),
}


@pytest.mark.parametrize("which", [*MODELS, *OF_EXPERTS])
def test_a_matrix_and_its_pair_are_the_merged_matrix_whatever_the_files(tiny, tmp_path, which):
    made, changed = (MODELS | OF_EXPERTS)[which]
    roles = OF_ATTENTION if which == "qwen3_moe" else OF_ATTENTION + OF_MLPS
    adapter = adapter_of(made, roles)
    merged = adapter.merged(made)
    adapters = [
        adapter.save(tmp_path / "adapter"),
        adapter.save_gguf(tmp_path / "adapter.gguf", made),
    ]
    divisors = made.divisors_in_gguf() if isinstance(made, Gemma4Model) else {}
    for base, both in (
        (tiny.directory(tmp_path / "m", made), tiny.directory(tmp_path / "n", merged)),
        (
            tiny.gguf(tmp_path / "m.gguf", made, vectors=divisors),
            tiny.gguf(tmp_path / "n.gguf", merged, vectors=divisors),
        ),
    ):
        model, expected = load_model(str(base)), load_model(str(both))
        for path in adapters:
            if model.spec.architecture != made.in_gguf and path.suffix:
                continue  # other kinds of files call the model something else
            loaded = load_adapter("mine", path, model)
            check_merged(model, loaded, expected, changed)
            assert loaded.facts[:2] == ("mine", RANK)


def test_mixtral_has_pairs_of_its_attention_in_both_kinds_of_files(tiny, tmp_path):
    made = TinyModel(architecture="mixtral")
    adapter = adapter_of(made, OF_ATTENTION)
    merged, path = adapter.merged(made), adapter.save(tmp_path / "adapter")
    in_gguf = adapter.save_gguf(tmp_path / "adapter.gguf", made)
    model = load_model(str(tiny.directory(tmp_path / "m", made)))
    expected = load_model(str(tiny.directory(tmp_path / "n", merged)))
    check_merged(model, load_adapter("a", path, model), expected, 8)
    with pytest.raises(UnsupportedModelError, match="architecture must be mixtral as of the model"):
        load_adapter("a", in_gguf, model)
    model = load_model(str(tiny.gguf(tmp_path / "m.gguf", made)))
    expected = load_model(str(tiny.gguf(tmp_path / "n.gguf", merged)))
    for each in (path, in_gguf):
        check_merged(model, load_adapter("a", each, model), expected, 8)


def test_fused_matrices_of_granite_4_are_those_of_its_mlp(tiny, tmp_path):
    made = TinyModel(architecture="granitemoehybrid")
    adapter = adapter_of(made)
    model = load_model(str(tiny.directory(tmp_path / "m", made)))
    expected = load_model(str(tiny.directory(tmp_path / "n", adapter.merged(made))))
    loaded = load_adapter("a", adapter.save(tmp_path / "adapter"), model)
    check_merged(model, loaded, expected, 14)


def test_multipliers_of_falcon_are_in_pairs_of_directories_alone(tiny, tmp_path):
    made = FalconModel()
    adapter = adapter_of(made)
    merged, path = adapter.merged(made), adapter.save(tmp_path / "adapter")
    in_gguf = adapter.save_gguf(tmp_path / "adapter.gguf", made)
    model = load_model(str(tiny.directory(tmp_path / "m", made)))
    expected = load_model(str(tiny.directory(tmp_path / "n", merged)))
    check_merged(model, load_adapter("a", path, model), expected, 21)
    file = load_model(str(tiny.gguf(tmp_path / "m.gguf", made)))
    expected = load_model(str(tiny.gguf(tmp_path / "n.gguf", merged)))
    check_merged(file, load_adapter("a", in_gguf, file), expected, 21)
    for other, of in ((in_gguf, model), (path, file)):
        with pytest.raises(UnsupportedModelError, match="of the model's kind of files: multipl"):
            load_adapter("a", other, of)


def test_parts_of_a_fused_matrix_share_what_is_before_them(tiny, tmp_path):
    made = TinyModel(architecture="phi3")
    loaded_model = load_model(str(tiny.directory(tmp_path / "m", made)))
    path = adapter_of(made).save(tmp_path / "adapter")
    pairs = load_adapter("a", path, loaded_model).pairs
    downs = [pairs[layout.layer_tensor(0, role)].down for role in ROLES[:3]]
    assert downs[0] is downs[1] is downs[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_adapters_of_16_bits_are_read_as_they_are_stored(model, made, tmp_path, dtype):
    adapter = small(made)
    path = adapter.save(tmp_path / "a")
    stored = {name: torch.tensor(v).to(dtype) for name, v in adapter.tensors().items()}
    save_file(stored, adapter.weights(path))
    pair = load_adapter("a", path, model).pairs[f"{V}.weight"]
    down, up = (stored[f"base_model.model.{V}.lora_{half}.weight"].float().numpy() for half in "AB")
    np.testing.assert_array_equal(pair.down, down)
    np.testing.assert_array_equal(pair.up, up * np.float32(ALPHA / RANK))


@pytest.mark.parametrize("kind", [GgmlType.F16, GgmlType.BF16], ids=str)
def test_gguf_adapters_of_16_bits_too(in_gguf, made, tmp_path, kind):
    adapter = small(made)
    path = adapter.save_gguf(tmp_path / "a.gguf", made, stored_as=kind)
    pair = load_adapter("a", path, in_gguf).pairs[f"{V}.weight"]
    np.testing.assert_allclose(pair.down, adapter.a[V], rtol=1e-2)
    np.testing.assert_allclose(pair.up, adapter.b[V] * ALPHA / RANK, rtol=1e-2)


@pytest.mark.parametrize(("alpha", "scale"), [(8.0, 2.0), (0.0, 1.0), (None, 1.0)])
def test_a_gguf_adapter_without_an_alpha_is_added_as_it_is(in_gguf, made, tmp_path, alpha, scale):
    adapter = small(made, V)
    path = adapter.save_gguf(tmp_path / "a.gguf", made, alpha=alpha)
    pair = load_adapter("a", path, in_gguf).pairs[f"{V}.weight"]
    np.testing.assert_array_equal(pair.up, adapter.b[V] * np.float32(scale))


def test_what_is_said_of_one_is_its_size_and_the_digest_of_its_files(
    model, in_gguf, made, tmp_path
):
    adapter = small(made)
    path, file = adapter.save(tmp_path / "a"), adapter.save_gguf(tmp_path / "a.gguf", made)
    config, weights, whole = (
        hashlib.sha256(each.read_bytes())
        for each in (path / "adapter_config.json", adapter.weights(path), file)
    )
    of_both = hashlib.sha256(config.digest() + weights.digest())
    size = sum(adapter.a[module].size + adapter.b[module].size for module in adapter.a)
    for given, digest, of in ((path, of_both, model), (file, whole, in_gguf)):
        facts = load_adapter("a", given, of).facts
        assert facts == ("a", RANK, size, digest.hexdigest())


def test_the_same_weights_with_another_scale_are_another_adapter(model, made, tmp_path):
    adapter = small(made)
    digests = set()
    for alpha in (6.0, 60.0):
        adapter.config = {"lora_alpha": alpha}
        digests.add(load_adapter("a", adapter.save(tmp_path / "a"), model).sha256)
    assert len(digests) == 2


SCALES = {
    "plain": ({}, ALPHA / RANK),
    "rank-stabilised": ({"use_rslora": True}, ALPHA / math.sqrt(RANK)),
    "no numbers": ({"r": None, "rank_pattern": {"q_proj": 4, "v_proj": 4}, "lora_alpha": None}, 2),
    "alphas": ({"alpha_pattern": {"v_proj": 10}}, 10 / RANK),
    "a whole name": ({"alpha_pattern": {V: 10, "v_proj": 3}}, 10 / RANK),
    "the first one": ({"alpha_pattern": {"v_proj": 3, V: 10}}, 3 / RANK),
    "from the beginning": ({"alpha_pattern": {f"^{V}": 10}}, 10 / RANK),
    "not from there": ({"alpha_pattern": {"^v_proj": 10}}, ALPHA / RANK),
    "an expression": ({"alpha_pattern": {r"layers\.[12]\..*(q|v)_proj": 5}}, 5 / RANK),
    "no part of a name": ({"alpha_pattern": {"proj": 5, "self_attn": 5}}, ALPHA / RANK),
    "ranks": ({"r": 9, "rank_pattern": {"(q|v)_proj": RANK}}, ALPHA / RANK),
    "both": (
        {"r": 9, "rank_pattern": {".*": RANK}, "alpha_pattern": {V: 9}, "use_rslora": True},
        9 / math.sqrt(RANK),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", SCALES)
def test_products_are_multiplied_as_peft_does_it(model, made, tmp_path, what):
    config, scale = SCALES[what]
    adapter = small(made)
    adapter.config = config
    pair = load_adapter("a", adapter.save(tmp_path / "a"), model).pairs[f"{V}.weight"]
    np.testing.assert_array_equal(pair.up, adapter.b[V] * np.float32(scale))


def test_ranks_may_differ_by_module(model, made, tmp_path):
    adapter = small(made)
    narrow = adapter_of(made, ("self_attn.v_proj",), rank=1)
    adapter.a |= narrow.a
    adapter.b |= narrow.b
    adapter.config = {"rank_pattern": {"v_proj": 1}}
    loaded = load_adapter("a", adapter.save(tmp_path / "a"), model)
    assert loaded.facts.rank == RANK
    assert loaded.pairs[f"{V}.weight"].rank == 1
    np.testing.assert_array_equal(loaded.pairs[f"{V}.weight"].up, narrow.b[V] * np.float32(ALPHA))


@pytest.mark.parametrize(
    ("start", "by"),
    [
        ("model.language_model.", "model."),
        ("language_model.model.", "model."),
        ("", "model."),
    ],
)
def test_modules_may_be_of_a_model_with_other_parts_or_without_a_head(
    model, made, tmp_path, start, by
):
    adapter = small(made)
    tensors = {
        f"base_model.model.{start}{name.removeprefix(by)}": values
        for name, values in adapter.tensors(prefix="").items()
    }
    loaded = load_adapter("a", adapter.save(tmp_path / "a", tensors), model)
    plain = load_adapter("a", adapter.save(tmp_path / "b"), model)
    assert loaded.pairs.keys() == plain.pairs.keys()
    tensors |= adapter.tensors()
    with pytest.raises(ModelFileError, match="changes what another one does, too"):
        load_adapter("a", adapter.save(tmp_path / "c", tensors), model)


@pytest.mark.parametrize("start", [True, False, None, "gaussian", "eva", "orthogonal"])
def test_others_may_have_begun_as_they_like(model, made, tmp_path, start):
    adapter = small(made)
    adapter.config = {"init_lora_weights": start}
    assert len(load_adapter("a", adapter.save(tmp_path / "a"), model).pairs) == 2
