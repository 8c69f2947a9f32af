"""How a Hugging Face checkpoint's matrices are quantised: `quantization_config` of config.json.

Three ways of storing weights of 4 or 8 bits that share a scale among a group of a row's inputs are
read (`compute_plane.model.group_matrices`), each as its own tools write it:

    quant_method           settings                                            read
    gptq                   bits, group_size, sym, desc_act,                    4 and 8 bits
                           checkpoint_format or format                         gptq, gptq_v2
    awq                    bits or w_bit, group_size or q_group_size,          4 bits
                           zero_point, version or format                       gemm
    compressed-tensors     format, config_groups.*.weights                     pack-quantized, one
                                                                               group, 4 and 8 bits

The first tools wrote it elsewhere, which is read where config.json says nothing: AutoGPTQ into
quantize_config.json, AutoAWQ into quant_config.json, and those of compressed-tensors under
`compression_config`.

Matrices of float8 are read as well, and their settings in `compute_plane.model.float8_config`.

Everything else is refused here, by field and value, before a tensor is looked at. Which modules are
not quantised (`modules_to_not_convert`, `ignore`, negative rules in `dynamic`) need not be read:
they have a plain `weight`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from compute_plane.model.errors import ModelFileError, UnsupportedModelError, printable
from compute_plane.model.float8_config import (
    FBGEMM_FP8,
    FLOAT_FORMATS,
    FP8,
    Float8Quantization,
    read_float_weights,
    read_fp8,
)
from compute_plane.model.hf_model_types import GPT_OSS
from compute_plane.model.json_file import JsonObject

GPTQ: Final = "gptq"
AWQ: Final = "awq"
COMPRESSED_TENSORS: Final = "compressed-tensors"
MXFP4: Final = "mxfp4"
"""Of gpt-oss's experts alone (`compute_plane.model.stacked_experts`)."""
METHODS: Final = (GPTQ, AWQ, COMPRESSED_TENSORS, FP8, FBGEMM_FP8)

KEYS: Final = ("quantization_config", "compression_config")
"""Of config.json, the one that counts first."""
OWN_FILES: Final = {"quantize_config.json": GPTQ, "quant_config.json": AWQ}
"""Files that have all of it at the top, and the method of one that names none."""
GROUP_MULTIPLE: Final = 32
BORROWS_SINCE: Final = (0, 9)
"""The version of GPTQModel since which it takes one from whole words of zero points."""


class ZeroPoints(Enum):
    """How zero points are stored.

    LESS_ONE: each as one less. WORDS_LESS_ONE: so too, but one was taken from each place of a whole
    word at once, and where a zero point was 0 from the next place too.
    """

    AS_THEY_ARE = auto()
    LESS_ONE = auto()
    WORDS_LESS_ONE = auto()


@dataclass(frozen=True, slots=True)
class GroupQuantization:
    """What a checkpoint says about its quantised matrices.

    `group_size`: inputs that share a scale, None: all of a row. `is_symmetric`: every zero point is
    2^(bits - 1). `needs_order`: each matrix must say which group an input belongs to.
    """

    method: str
    bits: int
    group_size: int | None
    is_symmetric: bool
    zeros: ZeroPoints = ZeroPoints.AS_THEY_ARE
    needs_order: bool = False


def read_quantization(config: JsonObject) -> GroupQuantization | Float8Quantization | None:
    """Return what a config.json says, or a tool's own file beside it; None if nothing does.

    Raises UnsupportedModelError naming the field, what is supported and the value, ModelFileError
    for a value of a wrong type.
    """
    found = _section(config)
    if found is None:
        return None
    section, method = found
    if config.text("model_type") == GPT_OSS:
        # Its tensors say which of them are codes.
        _require(section, "quant_method", method, (MXFP4,))
        return None
    _require(section, "quant_method", method, METHODS)
    # Inputs of rotated weights must be rotated too, by code that is not of the model's type.
    _require_absent(section, "rotation")
    if method == GPTQ:
        return _gptq(section)
    if method == AWQ:
        return _awq(section)
    if method in (FP8, FBGEMM_FP8):
        return read_fp8(section)
    return _compressed_tensors(section)


def _section(config: JsonObject) -> tuple[JsonObject, str | None] | None:
    """Return the settings and their method, if there are any."""
    for key in KEYS:
        section = config.member(key)
        if section is not None:
            return section, section.text("quant_method")
    for name, method in OWN_FILES.items():
        path = config.path.parent / name
        if path.is_file():
            section = JsonObject.read(path)
            if section.has("bits") or section.has("w_bit"):
                return section, section.text("quant_method") or method
    return None


def _gptq(section: JsonObject) -> GroupQuantization:
    bits = section.integer("bits")
    _require(section, "bits", bits, (4, 8))
    _require_absent(section, "is_marlin_format")
    version = _agreed(section, ("checkpoint_format", "format"), (GPTQ, "gptq_v2"))
    _require(section, "pack_dtype", section.text("pack_dtype") or "int32", ("int32",))
    rules = section.member("dynamic")
    for rule in rules.keys if rules is not None else ():
        if not rule.startswith("-:"):
            raise UnsupportedModelError(
                section.path,
                f"{section.name('dynamic')}: settings for single modules are not supported, "
                f"got {printable(rule)}",
            )
    is_symmetric = section.boolean("sym")
    zeros = ZeroPoints.AS_THEY_ARE
    if version == GPTQ:
        zeros = ZeroPoints.WORDS_LESS_ONE if _borrows(section) else ZeroPoints.LESS_ONE
    return GroupQuantization(
        GPTQ,
        bits,
        _group_size(section, "group_size"),
        is_symmetric=is_symmetric is None or is_symmetric,
        zeros=zeros,
        needs_order=section.boolean("desc_act") or False,
    )


def _borrows(section: JsonObject) -> bool:
    """Tell whether a tool wrote it that takes one from whole words of zero points."""
    meta = section.raw("meta")
    tools = meta.get("quantizer") if isinstance(meta, dict) else None
    for tool in tools if isinstance(tools, list) else [tools]:
        version = re.match(r"gptqmodel:([0-9]{1,9})\.([0-9]{1,9})", str(tool).lower())
        if version and (int(version[1]), int(version[2])) >= BORROWS_SINCE:
            return True
    return False


def _awq(section: JsonObject) -> GroupQuantization:
    bits_key = "w_bit" if section.has("w_bit") else "bits"
    size_key = "q_group_size" if section.has("q_group_size") else "group_size"
    bits = section.integer(bits_key)
    _require(section, bits_key, bits, (4,))
    _require(section, "zero_point", section.boolean("zero_point"), (None, True))
    _agreed(section, ("version", "checkpoint_format", "format"), ("gemm",))
    return GroupQuantization(AWQ, bits, _group_size(section, size_key), is_symmetric=False)


def _compressed_tensors(section: JsonObject) -> GroupQuantization | Float8Quantization:
    kind = section.text("format")
    _require(section, "format", kind, ("pack-quantized", *FLOAT_FORMATS))
    _require_absent(section, "kv_cache_scheme")
    sparsity = section.member("sparsity_config")
    if sparsity is not None and sparsity.keys:
        _require(sparsity, "format", sparsity.text("format"), ("dense",))
    _require_absent(section, "transform_config")
    groups = section.member("config_groups")
    names = groups.keys if groups is not None else ()
    if groups is None or len(names) != 1:
        raise UnsupportedModelError(
            section.path, f"{section.name('config_groups')} must have 1 group, got {len(names)}"
        )
    group = groups.member(names[0])
    weights = None if group is None else group.member("weights")
    if group is None or weights is None:
        raise UnsupportedModelError(section.path, f"{groups.name(names[0])} has no weights")
    _require_absent(group, "output_activations")
    if kind in FLOAT_FORMATS:
        return read_float_weights(weights)
    _require_absent(group, "input_activations")
    bits = weights.integer("num_bits")
    _require(weights, "num_bits", bits, (4, 8))
    _require(weights, "type", weights.text("type") or "int", ("int",))
    _require_absent(weights, "dynamic")
    strategy = weights.text("strategy")
    _require(weights, "strategy", strategy, ("group", "channel"))
    is_symmetric = weights.boolean("symmetric")
    return GroupQuantization(
        COMPRESSED_TENSORS,
        bits,
        _group_size(weights, "group_size") if strategy == "group" else None,
        is_symmetric=is_symmetric is None or is_symmetric,
    )


def _group_size(section: JsonObject, key: str) -> int | None:
    size = section.integer(key)
    if size == -1:
        return None
    if size < 1 or size % GROUP_MULTIPLE:
        raise UnsupportedModelError(
            section.path,
            f"{section.name(key)} must be -1 or a multiple of {GROUP_MULTIPLE}, got {size}",
        )
    return size


def _agreed(section: JsonObject, keys: tuple[str, ...], allowed: tuple[str, ...]) -> str:
    """Return what stands under all of the names that tools have used, in lower case.

    The first that is allowed if there is none of them.
    """
    values = {key: value.lower() for key in keys if (value := section.text(key)) is not None}
    for key, value in values.items():
        _require(section, key, value, allowed)
    if len(set(values.values())) > 1:
        raise ModelFileError(
            section.path,
            " and ".join(f"{section.name(k)} {v}" for k, v in values.items())
            + " contradict each other",
        )
    return next(iter(values.values()), allowed[0])


def _require(section: JsonObject, key: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        *most, last = [_shown(choice) for choice in allowed if choice is not None]
        choices = f"{', '.join(most)} or {last}" if most else last
        raise UnsupportedModelError(
            section.path, f"{section.name(key)} must be {choices}, got {_shown(value)}"
        )


def _require_absent(section: JsonObject, key: str) -> None:
    """Refuse what is there and says something: not null, false or an object of nothing."""
    value = section.raw(key)
    if value not in (None, False, {}):
        raise UnsupportedModelError(
            section.path,
            f"{section.name(key)} is not supported, got {printable(repr(value), limit=60)}",
        )


def _shown(value: object) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else printable(str(value))
