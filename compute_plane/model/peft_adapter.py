"""Adapters in directories as PEFT saves them: adapter_config.json and adapter_model.safetensors.

    base_model.model.<module>.lora_A.weight    [r, K]       <module>: of the model that was trained,
    base_model.model.<module>.lora_B.weight    [N, r]       such as model.layers.0.self_attn.q_proj

The product is multiplied by α / r, with rsLoRA by α / √r; r and α are those of the first pattern
that fits the end of <module>, or those of all. Which modules are changed, the tensors say. What a
configuration asks for besides is refused: whoever trained an adapter has measured all of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypeVar

from compute_plane.model import layout
from compute_plane.model.adapter_places import MAX_RANK, StoredPair, paired
from compute_plane.model.errors import ModelFileError, UnsupportedModelError, printable
from compute_plane.model.hf_text_part import PREFIXES
from compute_plane.model.json_file import JsonObject
from compute_plane.model.nemotron_layout import ARCHITECTURE as NEMOTRON
from compute_plane.model.nemotron_layout import canonical_names
from compute_plane.model.safetensors import read_header
from compute_plane.model.spec import ModelSpec
from compute_plane.model.stored_tensor import FLOATS, StoredTensor
from compute_plane.model.tensor import RawTensor

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
PICKLED: Final = "adapter_model.bin"
DOWN: Final = "lora_A"
UP: Final = "lora_B"
DEFAULT: Final = 8
"""Both r and α where nothing is said."""

_NAME: Final = re.compile(rf"base_model\.model\.(?P<module>.+)\.(?P<half>{DOWN}|{UP})\.weight")
_UNSUPPORTED: Final = (
    "fan_in_fan_out",
    "lora_bias",
    "modules_to_save",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
    "invocation_string",
    "arrow_config",
    "megatron_config",
    "monteclora_config",
    "velora_config",
)
"""Keys that must say nothing. So must those of variants, `use_…`, but for the one that is known."""
_VARIANT: Final = "use_"
_RANK_STABILISED: Final = "use_rslora"
_NOTHING: Final[tuple[object, ...]] = (None, False, "", [], {})
_PLAIN_STARTS: Final = ("gaussian", "eva", "orthogonal")
"""Ways to begin with that leave the model as it is. PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change
it: what they save goes with a model that nobody has, unless PEFT converted it, and it says so."""
_MAX_NAME: Final = 128
_MOST_CHOICES: Final = 3
_CHOICES: Final = re.compile(r"(?<!\\)(?:[*+{(]|(?<!\()\?)")
"""What a pattern may go on by in several ways."""
_REPEATED_GROUP: Final = re.compile(r"\)[*+{]")
"""Takes forever on some names that it does not fit."""

T = TypeVar("T")


def read_peft_adapter(directory: Path, spec: ModelSpec) -> list[StoredPair]:
    """Return what an adapter's directory holds, nothing of it decoded. `spec`: of its model.

    Raises ModelFileError, UnsupportedModelError, which name file and key or tensor.
    """
    config = JsonObject.read(directory / CONFIG)
    _check_config(config)
    path = directory / WEIGHTS
    if not path.exists() and (directory / PICKLED).exists():
        raise UnsupportedModelError(
            directory / PICKLED, f"pickled weights are not read, {WEIGHTS} is wanted"
        )
    halves: dict[str, dict[str, RawTensor]] = {}
    for name, stored in read_header(path).items():
        found = _NAME.fullmatch(name)
        if found is None or len(found["module"]) > _MAX_NAME:
            raise UnsupportedModelError(
                path, f"tensor {printable(name)} is neither a {DOWN} nor a {UP} of a matrix"
            )
        halves.setdefault(found["module"], {})[found["half"]] = _tensor(stored)
    scales = _Scales(config)
    return [
        StoredPair(_matrix(module, spec), down, up, scales.of(module, down))
        for module, down, up in paired(path, halves, (DOWN, UP))
    ]


def _tensor(stored: StoredTensor) -> RawTensor:
    if len(stored.shape) != 2:
        raise ModelFileError(
            stored.path,
            f"tensor {printable(stored.name)} must be a matrix, got {list(stored.shape)}",
        )
    fmt = FLOATS[stored.dtype]
    rows = stored.bytes().reshape(-1, fmt.row_bytes(stored.shape[-1]))
    return RawTensor(stored.name, stored.name, stored.path, fmt, stored.shape, rows)


def _matrix(module: str, spec: ModelSpec) -> str:
    """Return what a directory of the text model calls the matrix of a module.

    The model that was trained may have been one with other parts, or one without its head.
    """
    name = f"{module}.{layout.WEIGHT}"
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
    if prefix is not None:
        name = PREFIXES[prefix] + name.removeprefix(prefix)
    if name.startswith("layers."):
        name = layout.PREFIX + name
    if spec.architecture.startswith(NEMOTRON):
        (name,) = canonical_names({name: None}, spec)
    return name


def _check_config(config: JsonObject) -> None:
    """Refuse what is no plain LoRA."""
    peft_type = config.text("peft_type")
    if peft_type != "LORA":
        shown = "nothing" if peft_type is None else printable(peft_type)
        raise UnsupportedModelError(config.path, f"peft_type must be LORA, got {shown}")
    variants = [key for key in config.keys if key.startswith(_VARIANT) and key != _RANK_STABILISED]
    for key in (*_UNSUPPORTED, *variants):
        value = config.raw(key)
        if value not in _NOTHING:
            shown = printable(repr(value), limit=60)
            raise UnsupportedModelError(config.path, f"{printable(key)} is not supported: {shown}")
    bias = config.raw("bias")
    if bias not in (None, "none"):
        shown = printable(repr(bias), limit=60)
        raise UnsupportedModelError(config.path, f"bias must be 'none', got {shown}")
    start = config.raw("init_lora_weights")
    if start is not None and not isinstance(start, bool) and start not in _PLAIN_STARTS:
        shown = printable(repr(start), limit=60)
        raise UnsupportedModelError(
            config.path,
            f"init_lora_weights is {shown}: such adapters go with a model that training has begun "
            "by changing (PEFT converts them: path_initial_model_for_weight_conversion)",
        )


class _Scales:
    """What products are multiplied by."""

    def __init__(self, config: JsonObject) -> None:
        self._path = config.path
        self._rank = config.integer("r", DEFAULT)
        self._alpha = config.number("lora_alpha", DEFAULT)
        self._is_rank_stabilised = config.boolean(_RANK_STABILISED)
        self._ranks = _patterns(config, "rank_pattern", lambda of, key: of.integer(key))
        self._alphas = _patterns(config, "alpha_pattern", lambda of, key: of.number(key))

    def of(self, module: str, down: RawTensor) -> float:
        """Return that of a module. Raises ModelFileError if its rank is another one."""
        rank = _of_module(self._ranks, module, self._rank)
        if not 1 <= rank <= MAX_RANK:
            raise ModelFileError(
                self._path, f"the rank of {printable(module)} must be 1 to {MAX_RANK}, got {rank}"
            )
        if down.shape[0] != rank:
            raise ModelFileError(
                down.path,
                f"tensor {printable(down.stored_name)} has {down.shape[0]} rows, its rank is "
                f"{rank} in {CONFIG}",
            )
        alpha = _of_module(self._alphas, module, self._alpha)
        return alpha / (math.sqrt(rank) if self._is_rank_stabilised else rank)


def _of_module(values: Mapping[re.Pattern[str], T], module: str, default: T) -> T:
    fitting = (value for pattern, value in values.items() if pattern.match(module))
    return next(fitting, default)


def _patterns(
    config: JsonObject, key: str, read: Callable[[JsonObject, str], T]
) -> dict[re.Pattern[str], T]:
    """Return the values of modules by what the ends of their names are, in the file's order."""
    member = config.member(key)
    if member is None:
        return {}
    return {_pattern(member, text): read(member, text) for text in member.keys}


def _pattern(member: JsonObject, text: str) -> re.Pattern[str]:
    if len(_CHOICES.findall(text)) > _MOST_CHOICES or _REPEATED_GROUP.search(text):
        raise UnsupportedModelError(
            member.path,
            f"{member.name(text)} is not supported: a pattern has at most {_MOST_CHOICES} of "
            "( * + ? {, and no group that is repeated",
        )
    try:
        return re.compile(rf"(.*\.)?({text})$")
    except (re.error, OverflowError, RecursionError) as error:
        raise ModelFileError(
            member.path, f"{member.name(text)} is no regular expression: {error}"
        ) from None
