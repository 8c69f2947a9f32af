"""Write a GGUF file of random weights: `make_shape.py TOKENIZER_FROM TARGET < shape.json`.

On stdin: {"architecture": …, "keys": {…}, "tensors": {name: shape, …}}, of `shapes.Shape`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import gguf
import numpy as np

DRAWN = 1 << 22
"""So many numbers are drawn and laid again and again, from another place each time."""


def main(tokenizer: str, target: str) -> None:
    wanted = json.load(sys.stdin)
    architecture = wanted["architecture"]
    writer = gguf.GGUFWriter(target, architecture)
    for key, value in wanted["keys"].items():
        add_value(writer, f"{architecture}.{key}", value)
    for name, field in gguf.GGUFReader(tokenizer).fields.items():
        if name.startswith("tokenizer."):
            of_items = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=of_items)
    draw = np.random.default_rng(0)
    normal = draw.standard_normal(DRAWN, dtype=np.float32)
    bf16 = gguf.GGMLQuantizationType.BF16
    for name, shape in wanted["tensors"].items():
        values = values_of(name, tuple(shape), np.roll(normal, int(draw.integers(DRAWN))))
        if is_matrix(name, values):
            writer.add_tensor(name, gguf.quants.quantize(values, bf16), raw_dtype=bf16)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:  # noqa: ANN401 - of JSON
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def is_matrix(name: str, values: np.ndarray) -> bool:
    """Whether files hold it in few bits."""
    small = ("ssm_conv1d", "shortconv.conv", "ffn_gate_inp", "ssm_a", "ssm_d", "ssm_norm", ".bias")
    return values.ndim > 1 and not any(part in name for part in small)


def values_of(name: str, shape: tuple[int, ...], normal: np.ndarray) -> np.ndarray:
    """Return values that keep hidden states and states of a size that models have."""
    if "norm" in name or name.endswith("ssm_d"):
        return np.ones(shape, dtype=np.float32)
    values = np.resize(normal, shape)
    if name.endswith("ssm_a"):
        return -np.exp(values)
    return values / np.float32(shape[-1]) ** np.float32(0.5)


if __name__ == "__main__":
    main(*sys.argv[1:])
