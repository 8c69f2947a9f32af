"""What is no plain LoRA of matrices that adapters may change is refused whole, in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as GgmlType

from compute_plane.model.adapter_files import load_adapter
from compute_plane.model.errors import (
    ModelFileError,
    ModelReferenceError,
    UnsupportedModelError,
)
from compute_plane.model.loader import load_model
from planes.errors import ConfigError
from tests.compute_plane.model.delta_net_models import DeltaNetModel
from tests.compute_plane.model.falcon_models import FalconModel
from tests.compute_plane.model.gemma4_models import Gemma4Model
from tests.compute_plane.model.group_checkpoints import Scheme, checkpoint
from tests.compute_plane.model.latent_models import LatentModel
from tests.compute_plane.model.made_adapters import (
    RANK,
    MadeAdapter,
    Q,
    V,
    small,
    write_gguf_adapter,
)
from tests.compute_plane.model.tiny_model import TinyModel

UNSUPPORTED = {
    "use_dora": True,
    "use_qalora": True,
    "use_something_new": True,
    "fan_in_fan_out": True,
    "lora_bias": True,
    "modules_to_save": ["lm_head"],
    "layer_replication": [[0, 1], [0, 2]],
    "trainable_token_indices": [7],
    "target_parameters": ["mlp.experts.down_proj"],
    "alora_invocation_tokens": [5, 6],
    "bias": "lora_only",
    "peft_type": "IA3",
    "init_lora_weights": "pissa_niter_4",
    "rank_pattern": {"(a+)+q_proj": 4},
}


@pytest.mark.parametrize("key", UNSUPPORTED)
def test_what_is_no_plain_lora_is_refused_by_its_key(model, made, tmp_path, key):
    adapter = small(made)
    adapter.config = {key: UNSUPPORTED[key]}
    with pytest.raises(UnsupportedModelError, match=rf"^lora: my/one: .*config\.json: {key}") as of:
        load_adapter("my/one", adapter.save(tmp_path / "a"), model)
    assert of.value.field == "lora"
    assert str(of.value) == of.value.message
    assert isinstance(of.value, ConfigError)


@pytest.mark.parametrize("start", ["olora", "pissa", "loftq", "corda", "lora_ga", 3])
def test_adapters_of_a_model_that_training_changed_first_are_refused(model, made, tmp_path, start):
    adapter = small(made)
    adapter.config = {"init_lora_weights": start}
    with pytest.raises(UnsupportedModelError, match=r"init_lora_weights is .*begun by changing"):
        load_adapter("a", adapter.save(tmp_path / "a"), model)


FAULTS = {
    "rank": ({"r": 0}, "rank of .* must be 1 to 1024, got 0"),
    "large rank": ({"r": 2000}, "must be 1 to 1024, got 2000"),
    "another rank": ({"r": 5}, r"lora_A.weight has 4 rows, its rank is 5 in adapter_config"),
    "text": ({"r": "8"}, "r must be an integer, got '8'"),
    "alpha": ({"lora_alpha": "8"}, "lora_alpha must be a number, got '8'"),
    "huge alpha": ({"lora_alpha": 1e300}, "q_proj.lora_B.weight holds too large weights"),
    "flag": ({"use_rslora": 1}, "use_rslora must be true or false, got 1"),
    "list": ({"rank_pattern": [4]}, "rank_pattern must be an object"),
    "in a pattern": ({"rank_pattern": {"q_proj": 1.5}}, "rank_pattern.q_proj must be an integer"),
    "no pattern": ({"alpha_pattern": {"q_[proj": 4}}, r"q_\[proj is no regular expression"),
    "type": ({"peft_type": None}, "peft_type must be LORA, got nothing"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_numbers_that_cannot_be_are_named(model, made, tmp_path, what):
    config, words = FAULTS[what]
    adapter = small(made)
    adapter.config = config
    with pytest.raises(ModelFileError, match=words):
        load_adapter("a", adapter.save(tmp_path / "a"), model)


def weights(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


PREFIX = "base_model.model."
FIRST = f"{PREFIX}model.layers.0."
TENSORS = {
    "of DoRA": ({f"{FIRST}self_attn.q_proj.lora_magnitude_vector": weights(64)}, "neither a lora_"),
    "a bias": ({f"{FIRST}self_attn.q_proj.lora_B.bias": weights(64)}, "neither a lora_A nor"),
    "of an embedding": (
        {f"{PREFIX}model.embed_tokens.lora_embedding_A": weights(4, 265)},
        "neither a lora_A nor",
    ),
    "saved whole": ({f"{PREFIX}lm_head.weight": weights(265, 64)}, "lm_head.weight is neither"),
    "of a norm": ({f"{FIRST}input_layernorm.weight": weights(64)}, "layernorm.weight is neither"),
    "by an adapter's name": (
        {f"{FIRST}self_attn.q_proj.lora_A.default.weight": weights(4, 64)},
        "default.weight is neither",
    ),
    "without a prefix": ({f"{Q}.lora_A.weight": weights(4, 64)}, "neither a lora_A"),
    "of logits": (
        {
            f"{PREFIX}lm_head.lora_A.weight": weights(4, 64),
            f"{PREFIX}lm_head.lora_B.weight": weights(265, 4),
        },
        r"lm_head\.lora_B\.weight is of lm_head\.weight, which the model, of 2 layers, does not",
    ),
    "of tokens": (
        {
            f"{PREFIX}model.embed_tokens.lora_A.weight": weights(4, 64),
            f"{PREFIX}model.embed_tokens.lora_B.weight": weights(265, 4),
        },
        r"embed_tokens\.lora_B\.weight is of .*no adapter may change; what may be is q_proj, k_pr",
    ),
    "of another layer": (
        {
            f"{PREFIX}model.layers.2.self_attn.q_proj.lora_A.weight": weights(4, 64),
            f"{PREFIX}model.layers.2.self_attn.q_proj.lora_B.weight": weights(64, 4),
        },
        r"layers\.2\..* which the model, of 2 layers, does not have",
    ),
    "of a fused matrix": (
        {
            f"{FIRST}self_attn.qkv_proj.lora_A.weight": weights(4, 64),
            f"{FIRST}self_attn.qkv_proj.lora_B.weight": weights(128, 4),
        },
        "qkv_proj.weight, which the model, of 2 layers, does not have",
    ),
    "half": ({f"{FIRST}self_attn.k_proj.lora_A.weight": weights(4, 64)}, "is there without its lo"),
    "the other half": (
        {f"{FIRST}self_attn.k_proj.lora_B.weight": weights(32, 4)},
        r"k_proj\.lora_B\.weight is there without its lora_A",
    ),
    "narrow": (
        {f"{FIRST}self_attn.q_proj.lora_A.weight": weights(4, 63)},
        r"lora_A\.weight must have shape \[4, 64\], got \[4, 63\]",
    ),
    "short": (
        {f"{FIRST}self_attn.q_proj.lora_B.weight": weights(63, 4)},
        r"lora_B\.weight must have shape \[64, 4\], got \[63, 4\]",
    ),
    "of two ranks": (
        {f"{FIRST}self_attn.q_proj.lora_B.weight": weights(64, 3)},
        r"must have shape \[64, 4\], got \[64, 3\]",
    ),
    "a vector": ({f"{FIRST}self_attn.q_proj.lora_A.weight": weights(64)}, "must be a matrix, got"),
    "infinite": (
        {f"{FIRST}self_attn.q_proj.lora_A.weight": weights(4, 64) * np.float32(np.inf)},
        r"q_proj\.lora_A\.weight",
    ),
    "not a number": (
        {f"{FIRST}self_attn.q_proj.lora_B.weight": weights(64, 4) * np.float32(np.nan)},
        r"q_proj\.lora_B\.weight",
    ),
    "of 64 bits": (
        {f"{FIRST}self_attn.q_proj.lora_A.weight": np.ones((4, 64))},
        "has type F64; supported are F32, F16, BF16",
    ),
    "of no rank": (
        {f"{FIRST}self_attn.q_proj.lora_A.weight": np.ones((0, 64), np.float32)},
        r"q_proj\.lora_A\.weight has shape \[0, 64\]",
    ),
}


@pytest.mark.parametrize("what", TENSORS)
def test_no_tensor_is_left_out_or_let_through(model, made, tmp_path, what):
    tensors, words = TENSORS[what]
    adapter = small(made)
    path = adapter.save(tmp_path / "a", adapter.tensors() | tensors)
    with pytest.raises(ModelFileError, match=rf"^lora: a: .*adapter_model\.safetensors: .*{words}"):
        load_adapter("a", path, model)


def test_an_adapter_of_nothing_is_none(model, made, tmp_path):
    with pytest.raises(ModelFileError, match="it has no tensors, so it is no adapter"):
        load_adapter("a", small(made).save(tmp_path / "a", {}), model)


def test_paths_that_lead_to_no_adapter_are_named(model, made, tmp_path):
    def refused(path: Path, kind: type[ConfigError], words: str) -> None:
        with pytest.raises(kind, match=rf"^lora: a: {path}.*: {words}") as of:
            load_adapter("a", path, model)
        assert of.value.field == "lora"
        assert "\n" not in str(of.value)

    refused(tmp_path / "nothing", ModelReferenceError, "No such file or directory")
    refused(tmp_path / ("n" * 300), ModelReferenceError, "File name too long")
    directory = small(made).save(tmp_path / "a")
    refused(MadeAdapter.weights(directory), ModelReferenceError, "neither a .gguf file nor a dir")
    whole = directory / "adapter_config.json"
    config = whole.read_text()
    whole.unlink()
    refused(directory, ModelFileError, "No such file or directory")
    whole.write_text(config[:-2])
    refused(directory, ModelFileError, "not valid JSON")
    whole.write_text(config)
    MadeAdapter.weights(directory).rename(directory / "adapter_model.bin")
    refused(directory, UnsupportedModelError, ".* adapter_model.safetensors is wanted")
    (directory / "adapter_model.bin").unlink()
    refused(directory, ModelFileError, "No such file or directory")
    (tmp_path / "no.gguf").write_text("no model at all")
    refused(tmp_path / "no.gguf", ModelFileError, "not a GGUF file")


GGUF_FAULTS = {
    "a model": ({"kind": "model"}, "general.type must be adapter, got model"),
    "no type": ({"kind": None}, "general.type must be adapter, got nothing"),
    "vectors": ({"adapter_type": "control"}, "adapter.type must be lora, got control"),
    "activated": ({"keys": {"adapter.alora.invocation_tokens": 3}}, "_tokens is not supp"),
    "in parts": ({"keys": {"split.count": 2}}, "an adapter in several files"),
    "eight bits": ({"stored_as": GgmlType.Q8_0}, "has type Q8_0; supported are F32, F16, BF16"),
}  # fmt: skip


@pytest.mark.parametrize("what", GGUF_FAULTS)
def test_a_gguf_file_that_is_no_adapter_is_refused(in_gguf, tmp_path, what):
    changes, words = GGUF_FAULTS[what]
    tensors = {"blk.0.attn_q.weight.lora_a": weights(32, 64)}
    tensors["blk.0.attn_q.weight.lora_b"] = weights(64, 32)
    path = write_gguf_adapter(tmp_path / "a.gguf", "llama", tensors, **changes)
    with pytest.raises(UnsupportedModelError, match=rf"^lora: a: .*a\.gguf: .*{words}"):
        load_adapter("a", path, in_gguf)


GGUF_TENSORS = {
    "a norm": ({"blk.0.attn_norm.weight": weights(64)}, r"attn_norm\.weight is neither a lora_a"),
    "half": ({"blk.0.attn_k.weight.lora_b": weights(32, 4)}, "is there without its lora_a"),
    "of logits": (
        {"output.weight.lora_a": weights(4, 64), "output.weight.lora_b": weights(265, 4)},
        r"output\.weight\.lora_b is of output\.weight, which the model",
    ),
    "of tokens": (
        {"token_embd.weight.lora_a": weights(4, 64), "token_embd.weight.lora_b": weights(265, 4)},
        "which no adapter may change",
    ),
    "short": ({"blk.0.attn_q.weight.lora_b": weights(32, 4)}, r"must have shape \[64, 4\], got \["),
    "a vector": ({"blk.0.attn_q.weight.lora_b": weights(64)}, r"must be a matrix, got \[64\]"),
    "too wide": (
        {
            "blk.0.attn_q.weight.lora_a": weights(1025, 64),
            "blk.0.attn_q.weight.lora_b": weights(64, 1025),
        },
        "the rank must be at most 1024, got 1025",
    ),
}


@pytest.mark.parametrize("what", GGUF_TENSORS)
def test_no_tensor_of_a_gguf_file_is_left_out_or_let_through(in_gguf, tmp_path, what):
    changed, words = GGUF_TENSORS[what]
    tensors = {
        "blk.0.attn_q.weight.lora_a": weights(4, 64),
        "blk.0.attn_q.weight.lora_b": weights(64, 4),
    }
    path = write_gguf_adapter(tmp_path / "a.gguf", "llama", tensors | changed)
    with pytest.raises(ModelFileError, match=rf"^lora: a: .*a\.gguf: .*{words}"):
        load_adapter("a", path, in_gguf)


def test_a_gguf_adapter_of_another_architecture_is_refused(model, in_gguf, tmp_path):
    path = write_gguf_adapter(tmp_path / "a.gguf", "qwen2", {"blk.0.attn_q.weight": weights(4, 64)})
    for of in (model, in_gguf):
        with pytest.raises(UnsupportedModelError, match="must be llama as of the model, got qwen2"):
            load_adapter("a", path, of)


def pair_of(module: str, rows: int, columns: int) -> dict[str, np.ndarray]:
    return {
        f"{PREFIX}{module}.lora_A.weight": weights(RANK, columns),
        f"{PREFIX}{module}.lora_B.weight": weights(rows, RANK),
    }


NOT_ALL = {
    "experts": (
        TinyModel(architecture="qwen3_moe"),
        "model.layers.0.mlp.experts.0.gate_proj",
        "which no adapter may change",
    ),
    "router": (
        TinyModel(architecture="qwen3_moe"),
        "model.layers.0.mlp.gate",
        "which no adapter may change",
    ),
    "an MLP of all tokens beside experts": (
        Gemma4Model(has_experts=True),
        "model.layers.0.mlp.gate_proj",
        "which no adapter may change",
    ),
    "another layer's keys": (
        Gemma4Model(pattern="SFSFSF", num_sharing=2),
        "model.layers.5.self_attn.k_proj",
        "of 6 layers, does not have",
    ),
    "queries with gates": (
        DeltaNetModel(),
        "model.layers.3.self_attn.q_proj",
        "which no adapter may change",
    ),
    "a layer with a state": (
        DeltaNetModel(),
        "model.layers.0.linear_attn.in_proj_qkv",
        "which no adapter may change",
    ),
    "attention where there is a state": (
        DeltaNetModel(),
        "model.layers.0.self_attn.k_proj",
        "does not have",
    ),
    "Mamba-2": (FalconModel(), "model.layers.0.mamba.in_proj", "which no adapter may change"),
    "latents": (
        LatentModel(),
        "model.layers.0.self_attn.o_proj",
        "takes no adapters: it has latents",
    ),
}


@pytest.mark.parametrize("what", NOT_ALL)
def test_matrices_that_have_no_place_for_a_pair_are_refused(tiny, tmp_path, what):
    made, module, words = NOT_ALL[what]
    rows, columns = made.weights.get(f"{module}.weight", weights(64, 64)).shape
    path = MadeAdapter({}, {}).save(tmp_path / "a", pair_of(module, rows, columns))
    model = load_model(str(tiny.directory(tmp_path / "m", made)))
    with pytest.raises(ModelFileError, match=words):
        load_adapter("a", path, model)


def test_a_matrix_whose_groups_are_strewn_takes_none(tiny, tmp_path):
    made = TinyModel()
    for order in ("none", "act"):
        stored = checkpoint(made.weights, Scheme(order=order))
        settings_of = {"quantization_config": stored.scheme.config()}
        directory = tiny.directory(tmp_path / order, made, config=settings_of)
        stored.save(directory / "model.safetensors")
        model = load_model(str(directory))
        path = small(made, V).save(tmp_path / "a")
        if order == "none":
            assert len(load_adapter("a", path, model).pairs) == 1
        else:
            with pytest.raises(UnsupportedModelError, match="takes no adapters: the groups of its"):
                load_adapter("a", path, model)
