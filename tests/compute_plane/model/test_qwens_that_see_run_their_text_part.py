"""Qwen's models with a vision tower: text alone gives what transformers gives, from both files."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as GgmlType
from safetensors.numpy import load_file, save_file

from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.loader import load_model
from tests.compute_plane.model.models_that_see import write_model_that_sees
from tests.compute_plane.model.recorded_models import PROMPTS
from tests.devices import STAND_IN, Target
from tests.golden.batch_driver import BatchDriver, DrivenSequence

TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
VISION = {"depth": 1, "num_heads": 2, "patch_size": 14}
ROPE = {"rope_type": "default", "rope_theta": 30000.0, "mrope_section": [2, 3, 3]}
OLD_ROPE = {"type": "mrope", "mrope_section": [2, 3, 3]}
"""As files that are published have it."""
EXECUTORS = pytest.mark.parametrize("target", [Target("cpu", "cpu"), STAND_IN], ids=["cpu", "cuda"])


def model_that_sees(kind: str, vocab_size: int) -> Any:
    """Return one of transformers', tiny."""
    import transformers

    text = TEXT | {"vocab_size": vocab_size, "rope_parameters": ROPE}
    if kind == "qwen2_vl":
        vision = VISION | {"embed_dim": 16, "hidden_size": 64}
        config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision)
        return transformers.Qwen2VLForConditionalGeneration(config)
    vision = VISION | {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 64}
    if kind == "qwen2_5_vl":
        config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
        return transformers.Qwen2_5_VLForConditionalGeneration(config)
    text |= {"head_dim": 16, "rope_parameters": ROPE | {"mrope_interleaved": True}}
    vision |= {"deepstack_visual_indexes": [0]}
    if kind == "qwen3_vl_moe":
        text |= {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision)
        return transformers.Qwen3VLMoeForConditionalGeneration(config)
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision)
    return transformers.Qwen3VLForConditionalGeneration(config)


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def made(request, tiny, tmp_path_factory) -> tuple[Path, list[np.ndarray]]:
    """A directory as transformers writes it, and its logits behind two texts."""
    folder = tmp_path_factory.mktemp("seeing")
    directory, logits = write_model_that_sees(
        tiny, folder, lambda size: model_that_sees(request.param, size)
    )
    config = config_of(directory)
    config["text_config"] |= {"bos_token_id": 1, "eos_token_id": 2}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").unlink(missing_ok=True)
    return directory, logits


def with_config(directory: Path, target: Path, config: dict[str, Any]) -> Path:
    """Copy a directory with another configuration."""
    shutil.copytree(directory, target)
    (target / "config.json").write_text(json.dumps(config))
    return target


def as_saved_before(config: dict[str, Any]) -> dict[str, Any]:
    """Return what transformers 4.52 wrote: names of the whole model in its text part, too."""
    return config | {
        "text_config": config["text_config"] | {"architectures": config["architectures"]}
    }


def as_published(config: dict[str, Any]) -> dict[str, Any]:
    """Return what older files say: Qwen2's numbers beside the other parts, Qwen3's apart."""
    text = dict(config["text_config"])
    theta = text.pop("rope_parameters")["rope_theta"]
    if config["model_type"].startswith("qwen3_vl"):
        rope = {"mrope_section": [2, 3, 3], "mrope_interleaved": True, "rope_type": "default"}
        return config | {"text_config": text | {"rope_theta": theta, "rope_scaling": rope}}
    del text["model_type"]
    whole = {key: value for key, value in config.items() if key != "text_config"}
    return text | {"rope_theta": theta, "rope_scaling": OLD_ROPE} | whole


def with_inputs_first(file: Path) -> None:
    """Turn the experts of a file, as they are published; transformers 5 writes outputs first."""
    tensors = load_file(file)
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name] = np.ascontiguousarray(tensors[name].swapaxes(1, 2))
    save_file(tensors, file)


def config_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def logits_of(directory: Path, target: Target) -> np.ndarray:
    model = load_model(str(directory))
    with target.running(model, num_blocks=8, block_size=16, keep_logits=True) as executor:
        driver = BatchDriver(executor, num_blocks=8, block_size=16)
        batch = driver.batch([DrivenSequence(list(prompt)) for prompt in PROMPTS])
        return np.array(executor.execute(batch).logits)


@pytest.mark.spread(8)
@EXECUTORS
@pytest.mark.parametrize(
    "say",
    [dict, as_published, as_saved_before],
    ids=["of transformers", "as published", "of an older transformers"],
)
def test_logits_of_texts_are_those_of_transformers(made, say, target, tmp_path: Path) -> None:
    directory, expected = made
    target_directory = with_config(directory, tmp_path / "m", say(config_of(directory)))
    if say is as_published:
        with_inputs_first(target_directory / "model.safetensors")
    found = logits_of(target_directory, target)
    np.testing.assert_allclose(found, np.stack(expected), rtol=1e-3, atol=1e-3)


@EXECUTORS
@pytest.mark.parametrize(
    ("plain", "seeing"), [("qwen2", "qwen2vl"), ("qwen3", "qwen3vl"), ("qwen3_moe", "qwen3vlmoe")]
)
def test_a_gguf_file_of_one_gives_the_logits_of_a_file_of_text_alone(
    tiny, plain: str, seeing: str, target: Target, tmp_path: Path
) -> None:
    def change(writer) -> None:
        writer.add_rope_dimension_sections([2, 3, 3, 0])

    model = tiny.model(architecture=plain)
    kind = type("Seeing", (type(model),), {"in_gguf": seeing})
    fields = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    of_text = tiny.gguf(tmp_path / "text.gguf", model, GgmlType.F32)
    of_both = tiny.gguf(tmp_path / "both.gguf", kind(**fields), GgmlType.F32, change=change)
    assert load_model(str(of_both)).spec.architecture == seeing
    np.testing.assert_array_equal(logits_of(of_both, target), logits_of(of_text, target))


def test_where_nothing_is_said_the_numbers_are_those_of_transformers(made, tmp_path: Path) -> None:
    import transformers

    from compute_plane.model.hf_config import read_hf_spec
    from compute_plane.model.hf_text_part import text_part
    from compute_plane.model.json_file import JsonObject

    config = config_of(made[0])
    said = ("vocab_size", *TEXT)
    part = text_part(
        JsonObject(
            tmp_path,
            {
                "model_type": config["model_type"],
                "text_config": {key: config["text_config"][key] for key in said},
            },
        )
    )
    assert part is not None
    theirs = transformers.AutoConfig.for_model(
        config["model_type"], text_config={key: config["text_config"][key] for key in said}
    )
    spec, text = read_hf_spec(part, "m"), theirs.text_config
    assert spec.rms_norm_eps == text.rms_norm_eps
    assert spec.rope_theta == text.rope_parameters["rope_theta"]
    assert spec.head_dim == getattr(text, "head_dim", text.hidden_size // text.num_attention_heads)
    assert spec.tie_embeddings == theirs.tie_word_embeddings


@pytest.mark.parametrize("of_all", [None, False])
def test_an_output_matrix_is_tied_where_transformers_ties_it(made, of_all, tmp_path) -> None:
    """Older ones wrote the flag into the text part alone."""
    import transformers

    from compute_plane.model.hf_config import read_hf_spec
    from compute_plane.model.hf_text_part import text_part
    from compute_plane.model.json_file import JsonObject

    config = config_of(made[0])
    del config["tie_word_embeddings"]
    config |= {"text_config": config["text_config"] | {"tie_word_embeddings": True}}
    config |= {} if of_all is None else {"tie_word_embeddings": of_all}
    part = text_part(JsonObject(tmp_path, config))
    kinds = {key: config[key] for key in config if key not in ("model_type", "architectures")}
    theirs = transformers.AutoConfig.for_model(config["model_type"], **kinds)
    assert part is not None
    assert read_hf_spec(part, "m").tie_embeddings == theirs.tie_word_embeddings


def test_what_is_none_of_them_is_refused(made, tmp_path: Path) -> None:
    config = config_of(made[0])
    other = with_config(made[0], tmp_path / "a", config | {"architectures": ["QwenForThings"]})
    with pytest.raises(UnsupportedModelError, match="architectures must name Qwen"):
        load_model(str(other))
    bare = {key: config[key] for key in ("model_type", "architectures")}
    expected = "text_config is missing" if "qwen3" in config["model_type"] else "hidden_size"
    with pytest.raises(ModelFileError, match=expected):
        load_model(str(with_config(made[0], tmp_path / "b", bare)))


def test_experts_as_wide_as_the_model_are_refused_as_they_may_lie_either_way(
    tiny, tmp_path: Path
) -> None:
    """Those of Qwen3-VL, whose files have them inputs first or outputs first."""
    made = tiny.model(architecture="qwen3_moe", intermediate_size=64, num_experts=2)
    weights = {name: w for name, w in made.weights.items() if ".experts." not in name}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."
        weights[prefix + "gate_up_proj"] = np.zeros((2, 64, 128), np.float32)
        weights[prefix + "down_proj"] = np.zeros((2, 64, 64), np.float32)
    directory = tiny.directory(tmp_path / "hf", made, weights=weights)
    with pytest.raises(UnsupportedModelError, match="may lie either way"):
        load_model(str(directory))
