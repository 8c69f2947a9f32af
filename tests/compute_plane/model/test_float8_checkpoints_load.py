"""Checkpoints whose matrices are float8: what they mean, to the bit, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from compute_plane.executor.weight_formats import measure_conversions
from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.group_blocks import BLOCK, block_type, decode_fp8
from compute_plane.model.loader import load_model
from compute_plane.model.tensor import TensorFormat
from tests.devices import STAND_IN, Target
from tests.golden.batch_driver import BatchDriver, DrivenSequence

LARGEST = 448.0
DOWN = "model.layers.1.mlp.down_proj"


@dataclass(frozen=True)
class Layout:
    """How a tool stores the scales of a matrix [N, K].

    `block`: outputs and inputs of one, None for all. `shape`: of the scales, if not [⌈N / n⌉,
    ⌈K / k⌉].
    """

    config: dict[str, Any]
    block: tuple[int | None, int | None]
    name: str = "weight_scale"
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] | None = None
    beside: tuple[str, ...] = ()


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    own = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, **weights}
    group = {"weights": own, "input_activations": {"dynamic": True, "num_bits": 8}}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"],
    }  # fmt: skip


LAYOUTS = {
    "fp8 in blocks": Layout(
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [40, 32]},
        (40, 32),
        "weight_scale_inv",
        beside=("activation_scale",),
    ),
    "fp8 of whole matrices": Layout(
        {"quant_method": "fp8", "activation_scheme": "static"},
        (None, None),
        shape=(),
        beside=("input_scale",),
    ),
    "fbgemm": Layout({"quant_method": "fbgemm_fp8"}, (1, None), beside=("input_scale_ub",)),
    "compressed, an output": Layout(compressed("channel"), (1, None), dtype=torch.bfloat16),
    "compressed, a matrix": Layout(compressed("tensor"), (None, None), shape=(1,)),
    "compressed in blocks": Layout(
        compressed("block", block_structure=[16, 64]), (16, 64), dtype=torch.float16
    ),
}


def quantised(weights: np.ndarray, layout: Layout) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """Return a matrix as a tool stores it, and what it means, float32."""
    num_outputs, num_inputs = weights.shape
    rows, columns = layout.block[0] or num_outputs, layout.block[1] or num_inputs
    scales = np.zeros((-(-num_outputs // rows), -(-num_inputs // columns)), np.float32)
    for i, j in np.ndindex(scales.shape):
        part = weights[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        scales[i, j] = np.abs(part).max() / LARGEST
    stored = torch.from_numpy(scales).to(layout.dtype)
    of_weight = stored.float().numpy().repeat(rows, 0)[:num_outputs]
    of_weight = of_weight.repeat(columns, 1)[:, :num_inputs]
    codes = torch.from_numpy(np.clip(weights / of_weight, -LARGEST, LARGEST))
    codes = codes.to(torch.float8_e4m3fn)
    shape = stored.shape if layout.shape is None else layout.shape
    parts = {"weight": codes, layout.name: stored.reshape(shape)}
    parts |= {name: torch.tensor([0.5]) for name in layout.beside}
    return parts, codes.float().numpy() * of_weight


def write(tiny: Any, directory: Path, layout: Layout) -> tuple[Path, dict[str, np.ndarray]]:
    """Write a checkpoint; return where, and the weights that it means."""
    model = tiny.model()
    tensors, meant = {}, {}
    for name, values in model.weights.items():
        if name.endswith("_proj.weight"):
            parts, meant[name] = quantised(values, layout)
            prefix = name.removesuffix("weight")
            tensors |= {prefix + part: tensor for part, tensor in parts.items()}
        else:
            tensors[name], meant[name] = torch.from_numpy(values), values
    tiny.directory(directory, model, config={"quantization_config": layout.config})
    save_file(tensors, directory / "model.safetensors")
    return directory, meant


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_weight_is_its_code_times_its_scale(tiny, tmp_path: Path, layout: Layout) -> None:
    directory, meant = write(tiny, tmp_path / "m", layout)
    loaded = load_model(str(directory))
    assert loaded.spec.num_parameters == sum(values.size for values in meant.values())
    for name, values in meant.items():
        tensor = loaded.source.tensor(name)
        assert tensor.format.label == ("FP8" if "_proj" in name else "F32")
        np.testing.assert_array_equal(tensor.to_float32(), values)
        if "_proj" in name:
            whole, some = tensor.rows(), np.array([0, 9, 31, 2])
            np.testing.assert_array_equal(tensor.rows(some), whole[some])
            np.testing.assert_array_equal(tensor.rows(slice(9, 30)), whole[9:30])
            num_inputs = values.shape[1]
            assert tensor.scale_group == math.gcd(layout.block[1] or num_inputs, num_inputs)


@pytest.mark.parametrize("target", [Target("cpu", "cpu"), STAND_IN], ids=["cpu", "cuda"])
def test_a_step_computes_with_what_the_checkpoint_means(tiny, tmp_path: Path, target) -> None:
    """In float32 as with the weights it means; by itself so on the device, elsewhere with eight
    bits of those.
    """
    directory, meant = write(tiny, tmp_path / "m", LAYOUTS["fp8 in blocks"])
    plain = tiny.directory(tmp_path / "plain", tiny.model())
    save_file({n: torch.from_numpy(v) for n, v in meant.items()}, plain / "model.safetensors")
    found = {}
    for name, path, dtype in (
        ("meant", plain, "float32"), ("float32", directory, "float32"), ("auto", directory, "auto"),
    ):  # fmt: skip
        running = target.running(
            load_model(str(path)), num_blocks=8, block_size=16, dtype=dtype, keep_logits=True
        )
        with running as executor:
            batch = BatchDriver(executor, num_blocks=8, block_size=16).batch(
                [DrivenSequence([5, 17, 40, 41]), DrivenSequence([9, 8])]
            )
            found[name] = executor.execute(batch).logits
    np.testing.assert_array_equal(found["float32"], found["meant"])
    if target.executor == "cuda":
        np.testing.assert_allclose(found["auto"], found["meant"], rtol=0, atol=1e-5)
        return
    assert not np.array_equal(found["auto"], found["meant"])
    error = np.sqrt(np.square(found["auto"] - found["meant"]).mean())
    assert error < 0.05 * found["meant"].std()


def test_as_eight_bits_they_lose_a_fraction_of_what_float8_has_lost(tiny, tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    directory, _ = write(tiny, tmp_path / "m", LAYOUTS["compressed, an output"])
    tensor = load_model(str(directory)).source.tensor(f"{DOWN}.weight")
    with ThreadPoolExecutor(1) as pool:
        (loss,) = measure_conversions([(tensor, TensorFormat.Q8_0)], pool)
    weights = tiny.model().weights[f"{DOWN}.weight"]
    before = np.sqrt(np.square(tensor.to_float32() - weights).sum() / np.square(weights).sum())
    assert 0 < loss.relative_error < before / 3


def test_codes_are_those_of_e4m3() -> None:
    rows = np.zeros((1, 8), block_type(8, has_zeros=False))
    rows["s"], rows["q"] = 1, np.arange(256, dtype=np.uint8).reshape(1, 8, BLOCK)
    out = np.empty((1, 256), np.float32)
    decode_fp8(rows.view(np.uint8).reshape(1, -1), out)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    np.testing.assert_array_equal(out[0], codes.float().numpy())


def changed(directory: Path, config: dict[str, Any] | None = None, **parts: Any) -> Path:
    """Change a checkpoint: members of its settings, parts of one matrix (None: taken out)."""
    path = directory / "config.json"
    document = json.loads(path.read_text())
    document["quantization_config"] |= config or {}
    path.write_text(json.dumps(document))
    tensors = load_file(directory / "model.safetensors")
    for part, change in parts.items():
        tensor = tensors.pop(f"{DOWN}.{part}", None)
        if change is not None:
            tensors[f"{DOWN}.{part}"] = change(tensor)
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(
    ("layout", "config", "parts", "message"),
    [
        ("fp8 in blocks", {"fmt": "e5m2"}, {}, "fmt must be e4m3, got e5m2"),
        (
            "fp8 in blocks",
            {"weight_block_size": [128]},
            {},
            r"weight_block_size must be two sizes, the second a multiple of 32, got \[128\]",
        ),
        ("fp8 in blocks", {"weight_block_size": [16, 48]}, {}, r"multiple of 32, got \[16, 48\]"),
        ("fp8 in blocks", {"weight_block_size": [0, 32]}, {}, r"got \[0, 32\]"),
        (
            "fp8 in blocks",
            {"weight_block_size": [20, 32]},
            {},
            r"proj.weight_scale_inv has shape \[\d, \d\], must be \[\d, \d\]",
        ),
        ("compressed, a matrix", compressed("tensor", num_bits=4), {}, "num_bits must be 8, got 4"),
        ("compressed, a matrix", compressed("tensor", type="int"), {}, "type must be float, got i"),
        ("compressed, a matrix", compressed("tensor_group"), {}, "strategy must be tensor or chan"),
        ("compressed, a matrix", compressed("tensor", symmetric=False), {}, "symmetric must be t"),
        ("compressed, a matrix", compressed("tensor", dynamic=True), {}, "dynamic must be false"),
        (
            "fp8 in blocks",
            None,
            {"weight_scale_inv": None},
            f"tensor {DOWN}.weight_scale is missing",
        ),
        (
            "compressed, an output",
            None,
            {"weight_scale": lambda scales: scales[:-1]},
            rf"tensor {DOWN}.weight_scale has shape \[63, 1\], must be \[64, 1\]",
        ),
        (
            "compressed, an output",
            None,
            {"weight_scale": lambda scales: scales.int()},
            "weight_scale has type I32, must be F32 or F16 or BF16",
        ),
        (
            "compressed, an output",
            None,
            {"weight": lambda codes: codes[:-1]},
            rf"tensor {DOWN}.weight has shape \[63, 96\], must be \[64, 96\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    tiny, tmp_path: Path, layout: str, config, parts, message: str
) -> None:
    directory, _ = write(tiny, tmp_path / "m", LAYOUTS[layout])
    with pytest.raises((ModelFileError, UnsupportedModelError), match=message):
        load_model(str(changed(directory, config, **parts)))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"weight": lambda codes: codes.view(torch.uint8).fill_(0x7F).view(codes.dtype)},
            rf"tensor {DOWN}.weight holds nan at row 0, column 0",
        ),
        ({"weight_scale": lambda scales: scales * np.inf}, "weight_scale holds inf at row 0"),
    ],
)
def test_numbers_that_are_none_are_found(tiny, tmp_path: Path, parts, message: str) -> None:
    directory, _ = write(tiny, tmp_path / "m", LAYOUTS["compressed, an output"])
    with pytest.raises(ModelFileError, match=message):
        load_model(str(changed(directory, **parts))).source.tensor(f"{DOWN}.weight").to_float32()


def test_float8_that_no_settings_speak_of_is_refused(tiny, tmp_path: Path) -> None:
    directory, _ = write(tiny, tmp_path / "m", LAYOUTS["fp8 in blocks"])
    document = json.loads((directory / "config.json").read_text())
    del document["quantization_config"]
    (directory / "config.json").write_text(json.dumps(document))
    with pytest.raises(UnsupportedModelError, match="has type F8_E4M3; supported are F32, F16"):
        load_model(str(directory))
