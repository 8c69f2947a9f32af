"""Directories of models with a vision tower: the text part runs, as transformers runs it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.loader import load_model
from tests.compute_plane.model.models_that_see import write_model_that_sees
from tests.compute_plane.model.recorded_models import PROMPTS
from tests.devices import STAND_IN, Target
from tests.golden.batch_driver import BatchDriver, DrivenSequence

TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "max_position_embeddings": 512,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
IN_MEMORY = {"language_model.model.": "model.language_model.", "language_model.": ""}
"""From the names in published files, which transformers writes, to those it has for itself."""


def model_that_sees(kind: str, vocab_size: int) -> Any:
    """Return one of transformers', tiny."""
    import transformers

    text = TEXT | {"vocab_size": vocab_size}
    if kind == "gemma3":
        config = transformers.Gemma3Config(
            text_config=text, vision_config=VISION, mm_tokens_per_image=4, boi_token_index=0,
            eoi_token_index=1, image_token_index=2, eos_token_id=2,
        )  # fmt: skip
        return transformers.Gemma3ForConditionalGeneration(config)
    del text["rope_scaling"]
    of_text = text | {"model_type": "mistral", "sliding_window": None}
    config = transformers.Mistral3Config(
        text_config=of_text, vision_config=VISION | {"model_type": "pixtral", "head_dim": 8},
        image_token_index=2, eos_token_id=2,
    )  # fmt: skip
    return transformers.Mistral3ForConditionalGeneration(config)


@pytest.fixture(scope="module", params=["gemma3", "mistral3"])
def made(request, tiny, tmp_path_factory) -> tuple[Path, list[np.ndarray]]:
    """A directory as transformers writes it, and its logits behind two texts."""
    folder = tmp_path_factory.mktemp("seeing")
    return write_model_that_sees(tiny, folder, lambda size: model_that_sees(request.param, size))


def rewritten(
    directory: Path, target: Path, config: dict[str, Any] | None, names=None, tensors=None
) -> Path:
    """Copy a directory with members of its configuration changed and its tensors renamed.

    `tensors`: makes others of those that there are.
    """
    shutil.copytree(directory, target)
    stored = json.loads((target / "config.json").read_text()) | (config or {})
    (target / "config.json").write_text(json.dumps(stored))
    (file,) = target.glob("*.safetensors")
    if names is not None:
        save_file({names(name): tensor for name, tensor in load_file(file).items()}, file)
    if tensors is not None:
        save_file(tensors(load_file(file)), file)
    return target


def in_memory(name: str) -> str:
    prefix = next((prefix for prefix in IN_MEMORY if name.startswith(prefix)), "")
    return IN_MEMORY.get(prefix, "model.") + name.removeprefix(prefix)


@pytest.mark.parametrize("names", [None, in_memory], ids=["published", "in memory"])
@pytest.mark.parametrize("target", [Target("cpu", "cpu"), STAND_IN], ids=["cpu", "cuda"])
def test_logits_of_texts_are_those_of_transformers(made, names, target, tmp_path: Path) -> None:
    directory, expected = made
    model = load_model(str(rewritten(directory, tmp_path / "m", None, names)))
    assert model.spec.num_layers == TEXT["num_hidden_layers"]
    with target.running(model, num_blocks=8, block_size=16, keep_logits=True) as executor:
        driver = BatchDriver(executor, num_blocks=8, block_size=16)
        batch = driver.batch([DrivenSequence(list(prompt)) for prompt in PROMPTS])
        found = executor.execute(batch).logits
    np.testing.assert_allclose(found, np.stack(expected), rtol=1e-3, atol=1e-3)


def test_the_whole_models_end_tokens_count_before_the_text_parts(made, tmp_path: Path) -> None:
    """transformers writes one of its own into the text part."""
    text = json.loads((made[0] / "config.json").read_text())["text_config"]
    for own, outer, expected in ((1, [2, 7], (2, 7)), (5, None, (5,)), (None, 3, (3,))):
        config = {"eos_token_id": outer, "text_config": text | {"eos_token_id": own}}
        directory = rewritten(made[0], tmp_path / str(own), config)
        (directory / "generation_config.json").unlink()
        assert load_model(str(directory)).assets.eos_token_ids == expected


def test_tensors_of_other_parts_may_be_of_any_type(made, tmp_path: Path) -> None:
    def with_another(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return tensors | {"vision_tower.positions": np.arange(6, dtype=np.float64)}

    loaded = load_model(str(rewritten(made[0], tmp_path / "m", None, tensors=with_another)))
    assert not any("vision" in name for name in loaded.source.names)


EIGHT_BITS = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
        }
    },
}


@pytest.mark.parametrize("of_text", [None, {}], ids=["unsaid", "empty"])
def test_a_text_part_may_be_quantised(made, tmp_path: Path, of_text: object) -> None:
    meant = {}

    def quantised(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        found = {}
        for name, values in tensors.items():
            if "language_model" not in name or "_proj" not in name:
                found[name] = values
                continue
            scales = np.abs(values).max(1, keepdims=True) / np.float32(127)
            q = np.rint(values / scales).astype(np.int8)
            prefix = name.removesuffix("weight")
            found[f"{prefix}weight_packed"] = (q.view(np.uint8) ^ np.uint8(128)).view(np.int32)
            found[f"{prefix}weight_scale"] = scales
            found[f"{prefix}weight_shape"] = np.array(values.shape)
            meant[name.removeprefix("language_model.")] = q * scales
        return found

    config: dict[str, object] = {"quantization_config": EIGHT_BITS}
    if of_text is not None:  # what all parts have in common counts
        text = json.loads((made[0] / "config.json").read_text())["text_config"]
        config["text_config"] = text | {"quantization_config": of_text}
    model = load_model(str(rewritten(made[0], tmp_path / "m", config, tensors=quantised)))
    for name, values in meant.items():
        found = model.source.tensor(name)
        assert found.format.label == "INT8"
        np.testing.assert_allclose(found.to_float32(), values, rtol=1e-6)
    assert len(meant) == 7 * TEXT["num_hidden_layers"]


def test_a_wrong_part_of_a_quantised_matrix_is_named_as_in_the_file(made, tmp_path: Path) -> None:
    module = "language_model.model.layers.0.mlp.up_proj"

    def with_a_part(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        scales = np.ones((len(tensors.pop(f"{module}.weight")), 1), np.float32)
        packed = np.zeros((3, 5), np.int32)
        return tensors | {f"{module}.weight_packed": packed, f"{module}.weight_scale": scales}

    config = {"quantization_config": EIGHT_BITS}
    directory = rewritten(made[0], tmp_path / "m", config, tensors=with_a_part)
    with pytest.raises(ModelFileError, match=rf"tensor {module}\.weight_"):
        load_model(str(directory))


def test_a_tensor_by_both_names_is_refused(made, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"

    def twice(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return tensors | {
            name.replace("model.", "model.language_model.", 1): tensors[f"language_model.{name}"]
        }

    with pytest.raises(ModelFileError, match=rf"is there as .*{name}, too"):
        load_model(str(rewritten(made[0], tmp_path / "m", None, tensors=twice)))


def test_what_a_text_part_leaves_out_is_what_transformers_means(tmp_path: Path) -> None:
    from transformers import Gemma3TextConfig

    from compute_plane.model.hf_config import read_hf_spec
    from compute_plane.model.hf_text_part import text_part
    from compute_plane.model.json_file import JsonObject

    published = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    config = {"model_type": "gemma3", "torch_dtype": "bfloat16", "eos_token_id": [1, 106]}
    part = text_part(JsonObject(tmp_path, config | {"text_config": published}))
    assert part is not None
    spec, theirs = read_hf_spec(part, "4B"), Gemma3TextConfig(**published)
    assert spec.vocab_size == theirs.vocab_size
    assert (spec.hidden_size, spec.intermediate_size, spec.num_layers) == (2560, 10240, 34)
    assert (spec.num_heads, spec.num_kv_heads) == (8, theirs.num_key_value_heads)
    assert spec.num_heads == theirs.num_attention_heads
    assert spec.head_dim == theirs.head_dim
    assert spec.context_length == theirs.max_position_embeddings
    assert spec.window == theirs.sliding_window
    assert spec.rms_norm_eps == theirs.rms_norm_eps
    assert spec.tie_embeddings
    assert spec.embedding_scale == 50.5  # √2560, in bfloat16
    assert part.raw("eos_token_id") == [1, 106]


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"text_config": None}, ModelFileError, "text_config is missing"),
        ({"text_config": 3}, ModelFileError, "text_config must be an object, got 3"),
        (
            {"architectures": ["Gemma3ForSequenceClassification"]},
            UnsupportedModelError,
            "architectures must name .*3ForConditionalGeneration",
        ),
        (
            {"text_config": {"hidden_size": "x"}},
            ModelFileError,
            "text_config.hidden_size must be an integer, got 'x'",
        ),
        (
            {"text_config": TEXT | {"model_type": "other"}},
            UnsupportedModelError,
            "text_config.model_type other is not supported",
        ),
    ],
)
def test_a_text_part_that_is_none_is_refused(made, config, error, message, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        load_model(str(rewritten(made[0], tmp_path / "m", config)))


def test_a_tensor_of_no_part_is_named(made, tmp_path: Path) -> None:
    def strange(name: str) -> str:
        return name.replace("multi_modal_projector.", "touch_tower.")

    with pytest.raises(ModelFileError, match=r"touch_tower"):
        load_model(str(rewritten(made[0], tmp_path / "m", None, strange)))
