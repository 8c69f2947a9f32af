"""Directories of models that see images, too: their text part, which is what runs here.

Their config.json has the numbers of the text part in `text_config`, and beside it what all parts
have in common. Tensors of the text part have a prefix, in files as they are published one, in those
that are named as transformers names them in memory another:

    language_model.model.layers.0.…     model.language_model.layers.0.…     model.layers.0.… of a text model
    language_model.lm_head.weight       lm_head.weight                      lm_head.weight

Those of the tower that sees, and of what leads from there to the text part, are not used. Qwen2-VL and Qwen2.5-VL as they are
published have the numbers of the text part beside those of the others, and its tensors without a prefix.
"""  # noqa: E501 - a table

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from compute_plane.model.errors import ModelFileError, UnsupportedModelError, printable
from compute_plane.model.group_config import KEYS
from compute_plane.model.hf_model_types import (
    GEMMA3,
    GEMMA4,
    MISTRAL,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_MOE,
)
from compute_plane.model.json_file import JsonObject
from compute_plane.model.stored_tensor import StoredTensor


@dataclass(frozen=True, slots=True)
class WholeModel:
    """A `model_type` with other parts than text.

    `class_name`: of the model in transformers. `text_type`: the `model_type` of a text part that
    does not say it, or says `alias`: it computes the same. `defaults`: what a `text_config` means
    that leaves them out, as published ones do. `ties`: the embedding is the output matrix where
    nothing is said. `may_be_flat`: the numbers of the text part may stand beside the other parts.
    """

    class_name: str
    text_type: str
    defaults: Mapping[str, object]
    alias: str = ""
    ties: bool = True
    may_be_flat: bool = False


def _of_qwen2(name: str, alias: str) -> WholeModel:
    """Return one of Qwen2's kind."""
    defaults = {"rms_norm_eps": 1e-5, "rope_theta": 1e6}
    return WholeModel(name, "qwen2", defaults, alias, ties=False, may_be_flat=True)


LAYER_INPUTS: Final = "hidden_size_per_layer_input"
_OF_GEMMA4: Final = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "max_position_embeddings": 131072,
}
WHOLE_MODELS: Final = {
    "gemma3": WholeModel(
        "Gemma3ForConditionalGeneration",
        GEMMA3,
        {
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "max_position_embeddings": 131072,
        },
    ),
    "gemma4": WholeModel("Gemma4ForConditionalGeneration", GEMMA4, _OF_GEMMA4),
    "gemma4_unified": WholeModel(
        "Gemma4UnifiedForConditionalGeneration",
        GEMMA4,
        _OF_GEMMA4 | {"max_position_embeddings": 262144, "sliding_window": 1024, LAYER_INPUTS: 0},
        "gemma4_unified_text",
    ),
    "mistral3": WholeModel("Mistral3ForConditionalGeneration", MISTRAL, {}),
    "qwen2_vl": _of_qwen2("Qwen2VLForConditionalGeneration", "qwen2_vl_text"),
    "qwen2_5_vl": _of_qwen2("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text"),
    "qwen3_vl": WholeModel(
        "Qwen3VLForConditionalGeneration",
        "qwen3",
        {"rope_theta": 5e5},
        "qwen3_vl_text",
        ties=False,
    ),
    "qwen3_vl_moe": WholeModel(
        "Qwen3VLMoeForConditionalGeneration",
        QWEN3_MOE,
        {
            "rope_theta": 5e5,
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "norm_topk_prob": True,
        },
        "qwen3_vl_moe_text",
        ties=False,
    ),
    "qwen3_5": WholeModel("Qwen3_5ForConditionalGeneration", QWEN3_5, {}, ties=False),
    "qwen3_5_moe": WholeModel("Qwen3_5MoeForConditionalGeneration", QWEN3_5_MOE, {}, ties=False),
}
COMMON: Final = ("dtype", "torch_dtype")
"""What stands beside the text part and counts for it where it says nothing itself."""
COUNTS_FIRST: Final = ("bos_token_id", "eos_token_id", "pad_token_id", *KEYS)
"""What counts before what the text part says, as in transformers."""
TURNING: Final = ("rope_scaling", "rope_parameters")
MROPE: Final = "mrope"
PREFIXES: Final = {"language_model.": "", "model.language_model.": "model."}
OTHER_PARTS: Final = (
    "vision_tower.",
    "multi_modal_projector.",
    "visual.",
    "audio_tower.",
    "embed_vision.",
    "embed_audio.",
)


def text_part(config: JsonObject) -> JsonObject | None:
    """Return the configuration of the text part of a model that has others; None if it has none.

    Raises ModelFileError if it is not there, UnsupportedModelError for a model of another class.
    """
    model_type = config.text("model_type")
    whole = WHOLE_MODELS.get(model_type or "")
    if whole is None:
        return None
    architectures = config.raw("architectures")
    if architectures is not None and (
        not isinstance(architectures, list) or whole.class_name not in architectures
    ):
        raise UnsupportedModelError(
            config.path,
            f"architectures must name {whole.class_name}, got {printable(repr(architectures))}",
        )
    part = config.member("text_config")
    if part is None and whole.may_be_flat:
        part = config.changed({"model_type": whole.text_type})
    if part is None:
        raise ModelFileError(config.path, "text_config is missing")
    part = part.changed({"architectures": None})  # those of the whole model, if it has them at all
    common = {key: config.raw(key) for key in COMMON if config.has(key)}
    part = part.over({**whole.defaults, "model_type": whole.text_type, **common})
    if whole.alias and part.raw("model_type") == whole.alias:
        part = part.changed({"model_type": whole.text_type})
    part = part.changed({key: _along_one_axis(part.raw(key)) for key in TURNING if part.has(key)})
    firsts = {key: config.raw(key) for key in COUNTS_FIRST if config.raw(key) is not None}
    # Of both flags the whole model's counts, but that Qwen2-VL's may be in the text part alone. (A
    # file that has another output matrix has the last word, as everywhere.)
    ties = config.boolean("tie_word_embeddings")
    if whole.may_be_flat and part.boolean("tie_word_embeddings"):
        ties = True
    return part.changed({**firsts, "tie_word_embeddings": whole.ties if ties is None else ties})


def _along_one_axis(turning: object) -> object:
    """Return what is said of rotary positions, as it is for text.

    Images have a position along each of three axes, a share of a head's elements turns by each
    ("mrope"). Text has the same along all of them, so it turns as elsewhere.
    """
    if not isinstance(turning, dict) or MROPE not in (
        turning.get("rope_type"),
        turning.get("type"),
    ):
        return turning
    return turning | {"rope_type": "default", "type": "default"}


def is_of_text(name: str) -> bool:
    """Tell whether a tensor of such a model is of its text part, or of none that is known."""
    return not name.removeprefix("model.").startswith(OTHER_PARTS)


def text_tensors(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return tensors of the text part of such a model, named as in a text model.

    What is of no part that is known keeps its name. Raises ModelFileError where two have one name.
    """
    found: dict[str, StoredTensor] = {}
    for name, entry in stored.items():
        prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
        plain = name if prefix is None else PREFIXES[prefix] + name.removeprefix(prefix)
        if plain in found:
            raise ModelFileError(
                entry.path,
                f"tensor {printable(name)} is there as {printable(found[plain].name)}, too",
            )
        found[plain] = entry
    return found
