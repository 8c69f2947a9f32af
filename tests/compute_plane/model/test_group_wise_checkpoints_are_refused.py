"""Checkpoints of GPTQ, AWQ and compressed-tensors that cannot be read: refused by tensor."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from compute_plane.model import layout
from compute_plane.model.errors import ModelFileError
from compute_plane.model.group_config import read_quantization
from compute_plane.model.group_parts import take_group_matrices
from compute_plane.model.json_file import JsonObject
from compute_plane.model.loader import load_model
from compute_plane.model.quantize import converted_tensor
from compute_plane.model.tensor import TensorFormat
from tests.compute_plane.model.group_checkpoints import (
    CT,
    DOWN,
    Scheme,
    damage,
    parts_of,
    quantised,
    read_alone,
    small,
    write,
)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def cut(*sizes: int):
    """Take so many rows and columns of a part."""
    return lambda tensor: tensor[tuple(map(slice, sizes))].contiguous()


ORDERED, STREWN, INT4_AWQ = (
    Scheme(order="plain"),
    Scheme(order="act"),
    Scheme("awq", symmetric=False),
)
WITH_ZEROS = Scheme(CT, symmetric=False)
EMBEDDING = {
    "model.embed_tokens.weight": None,
    "model.embed_tokens.qweight": torch.zeros((8, 64), dtype=torch.int32),
    "model.embed_tokens.qzeros": torch.zeros((2, 8), dtype=torch.int32),
    "model.embed_tokens.scales": torch.zeros((2, 64)),
}
# Words of the message → the scheme, and what becomes of parts: a tensor, nothing, or a change.
DAMAGED = {
    "down_proj.qzeros is missing": (Scheme(symmetric=False), {"qzeros": None}),
    "down_proj.qweight is missing": (Scheme(), {"qweight": None}),
    "down_proj.scales is missing": (INT4_AWQ, {"scales": None}),
    "down_proj.g_idx is missing": (STREWN, {"g_idx": None}),
    "down_proj.weight_shape is missing": (WITH_ZEROS, {"weight_shape": None}),
    "down_proj.weight_zero_point is missing": (WITH_ZEROS, {"weight_zero_point": None}),
    "down_proj.qzeros has shape [3, 7], must be [3, 8]": (Scheme(), {"qzeros": cut(3, 7)}),
    "down_proj.scales has shape [2, 64], must be [3, 64]": (Scheme(), {"scales": cut(2, 64)}),
    "down_proj.qweight has shape [768], must be a matrix": (Scheme(), {"qweight": torch.flatten}),
    "down_proj.qweight has type F16, must be I32": (Scheme(), {"qweight": torch.Tensor.half}),
    "down_proj.scales has type I32, must be F32 or F16": (Scheme(), {"scales": torch.Tensor.int}),
    "down_proj.qweight is a matrix of shape [63, 96], the model needs [64, 96]": (
        Scheme(),
        {"qweight": cut(12, 63)},
    ),
    "down_proj.qweight is a matrix of shape [64, 64], the model needs [64, 96]": (
        Scheme(),
        {"qweight": cut(8, 64), "qzeros": cut(2, 8), "scales": cut(2, 64)},
    ),
    "down_proj.weight_packed is a matrix of shape [64, 88], the model needs [64, 96]": (
        Scheme(CT),
        {"weight_packed": cut(64, 11), "weight_shape": torch.tensor([64, 88])},
    ),
    "model.visual.qweight is of no matrix that the model has": (
        Scheme(),
        {"model.visual.qweight": torch.zeros((8, 64), dtype=torch.int32)},
    ),
    "model.norm.scales is of no matrix": (Scheme(), {"model.norm.scales": torch.zeros(2, 64)}),
    "scales is of no matrix": (Scheme(), {"model.scales": torch.zeros(2, 64)}),
    "down_proj.g_idx has group 3, there are 3": (ORDERED, {"g_idx": int32(*[3] * 96)}),
    "down_proj.g_idx has group -1, there are 3": (ORDERED, {"g_idx": int32(*[-1] * 96)}),
    "down_proj.g_idx has shape [95], must be [96]": (ORDERED, {"g_idx": cut(95)}),
    "down_proj.g_idx has 31 inputs in group 0, must have 32": (
        ORDERED,
        {"g_idx": int32(*[0] * 31, *[1] * 33, *[2] * 32)},
    ),
    "down_proj.g_idx has 32 inputs in group 0, must have 64": (
        Scheme(group_size=64, order="plain"),
        {"g_idx": int32(*[0] * 32, *[1] * 64)},
    ),
    "down_proj.g_idx has 96 inputs in group 0, must have 32": (
        STREWN,
        {"g_idx": int32(*[0] * 96)},
    ),
    "down_proj.weight_shape says [64, 95], weight_packed is [64, 96]": (
        WITH_ZEROS,
        {"weight_shape": torch.tensor([64, 95])},
    ),
    "down_proj.weight_zero_point is there, but the checkpoint is symmetric": (
        Scheme(CT),
        {"weight_zero_point": int32(0)},
    ),
    "is beside a plain weight": (Scheme(), {"weight": torch.zeros(64, 96)}),
    ": an embedding is not read so": (Scheme(), EMBEDDING),
    "model.norm.weight has type I32; supported are F32, F16, BF16": (
        Scheme(),
        {"model.norm.weight": torch.Tensor.int},
    ),
}


@pytest.mark.parametrize("words", DAMAGED)
def test_a_damaged_checkpoint_is_refused_with_its_tensor(tiny, tmp_path, words):
    scheme, changes = DAMAGED[words]
    directory = write(tiny, tmp_path / "m", damage(small(tiny, scheme), changes))
    with pytest.raises(ModelFileError) as caught:
        load_model(str(directory))
    assert f"tensor {words}" in caught.value.message or words in caught.value.message
    assert caught.value.message.startswith(str(directory))
    assert caught.value.message.isprintable()


def spoilt(value: float):
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor[1, 5] = value
        return tensor

    return change


def stored_zero(value: int):
    """Change the first zero point of a word."""
    return lambda t: torch.cat([(t[:1] & ~15) | value, t[1:]])


SPOILT = {
    "down_proj.scales holds -inf at row 5, column 32": (
        Scheme(),
        {"scales": spoilt(np.inf)},
    ),
    "down_proj.scales holds nan at row 5, column 32": (
        Scheme(),
        {"scales": spoilt(np.nan)},
    ),
    "down_proj.scales has weights too large for Q4_0": (
        Scheme(scale_type="F32"),
        {"scales": spoilt(1e6)},
    ),
    "down_proj.scales has weights too large for Q4_1": (
        Scheme("awq", symmetric=False, scale_type="BF16"),
        {"scales": spoilt(3e4)},
    ),
    "down_proj.scales has weights too large for Q4_Z": (
        Scheme("awq", symmetric=False, scale_type="BF16"),
        {"scales": spoilt(1e5)},
    ),
    "down_proj.scales has weights too large for Q8_Z": (
        Scheme(bits=8, symmetric=False, version="gptq_v2", scale_type="BF16"),
        {"scales": spoilt(-1e5)},
    ),
    "down_proj.qzeros has zero points stored as 7 to 8; in a symmetric checkpoint all are 8": (
        Scheme(version="gptq_v2"),
        {"qzeros": stored_zero(7)},
    ),
    "down_proj.qzeros has zero points stored as 7 to 8; in a symmetric checkpoint all are 7 or": (
        Scheme(),
        {"qzeros": stored_zero(8)},
    ),
    "down_proj.qzeros has zero points stored as 15, which tools do not agree on": (
        dataclasses.replace(Scheme(), symmetric=False),
        {"qzeros": stored_zero(15)},
    ),
}


@pytest.mark.parametrize("words", SPOILT)
def test_a_number_that_cannot_be_is_found_when_the_matrix_is_read(tiny, tmp_path, words):
    scheme, changes = SPOILT[words]
    directory = write(tiny, tmp_path / "m", damage(small(tiny, scheme), changes))
    tensor = load_model(str(directory)).source.tensor(f"{DOWN}.weight")
    _, _, label = words.rpartition("too large for ")
    if label not in TensorFormat.__members__:
        label = "Q4_0" if scheme.symmetric else "Q4_1"
    with pytest.raises(ModelFileError) as caught:
        converted_tensor(tensor, TensorFormat[label])
    assert f"tensor model.layers.1.mlp.{words}" in caught.value.message


@pytest.mark.parametrize(
    ("scheme", "shape", "words"),
    [
        (Scheme(), (8, 88), "qweight has 88 inputs; multiples of 32 are read"),
        (Scheme(CT, group_size=-1), (8, 16), "weight_packed has 16 inputs; multiples of 32"),
        (Scheme("awq", symmetric=False), (8, 40), "qweight has 40 inputs; multiples of 32"),
        (Scheme(symmetric=False), (12, 64), "qweight has 12 outputs, not whole words of zeros"),
    ],
)
def test_sizes_that_no_kernel_takes_are_refused(tmp_path, scheme, shape, words):
    matrix = quantised(np.random.default_rng(0).standard_normal(shape), scheme)
    path = tmp_path / "model.safetensors"
    save_file({f"m.{name}": part for name, part in parts_of(matrix, scheme).items()}, path)
    config = JsonObject(path, {"quantization_config": scheme.config()})
    with pytest.raises(ModelFileError, match=f"tensor m.{words}"):
        read_alone(path, config, shape)


def test_a_model_of_too_many_layers_is_refused_before_they_are_counted_out(
    tiny, tmp_path, monkeypatch
):
    directory = write(tiny, tmp_path / "m", small(tiny))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1 << 40}))
    monkeypatch.setattr(layout, "tensor_shapes", None)
    with pytest.raises(ModelFileError, match="num_layers must be 1 to"):
        load_model(str(directory))


class Untouched:
    """A part of a shape that takes more memory than there is, if anybody looked into it."""

    def __init__(self, *shape: int) -> None:
        self.path, self.dtype, self.shape = Path("huge.safetensors"), "I32", shape
        self.name = "m.part"

    def array(self) -> np.ndarray:
        return np.broadcast_to(np.int32(0), self.shape)


def test_a_gigantic_matrix_is_refused_before_memory_is_taken_for_it():
    for scheme, parts in (
        (Scheme(), {"qweight": Untouched(1 << 40, 64), "g_idx": Untouched(1 << 43)}),
        (Scheme(CT), {"weight_packed": Untouched(64, 1 << 40)}),
    ):
        config = JsonObject(Path("c.json"), {"quantization_config": scheme.config()})
        stored = {f"m.{name}": part for name, part in parts.items()}
        stored["m.weight_shape"] = Untouched(2)
        stored["m.weight_shape"].array = lambda: np.array([64, 1 << 43])
        with pytest.raises(
            ModelFileError, match=r"m\.\w+ is a matrix of shape \[64, 8796093022208\]"
        ):
            take_group_matrices(stored, read_quantization(config), {"m.weight": (64, 96)})
