"""Directories of models with latents whose matrices are quantised, keys and values in one.

Values are rows of that matrix and stay what they are. Keys are its other rows, transposed: they are
decoded, put in the model's order, and kept in float16.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from compute_plane.cpu.packed_weights import pack_weights
from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.loader import LoadedModel, load_model
from compute_plane.model.tensor import TensorFormat
from tests.compute_plane.model.group_checkpoints import CT, Scheme, checkpoint
from tests.compute_plane.model.latent_models import BOTH, LatentModel
from tests.compute_plane.model.test_float8_checkpoints_load import LAYOUTS, quantised
from tests.devices import Target
from tests.golden.batch_driver import BatchDriver, DrivenSequence

PREFIX = "model.layers.1.self_attn."
FLOAT8 = LAYOUTS["fp8 in blocks"]
GROUPS = {
    "float8": None,
    "GPTQ": Scheme(group_size=64),
    "GPTQ in the order of activations": Scheme(order="act"),
    "AWQ": Scheme("awq", symmetric=False),
    "compressed-tensors": Scheme(CT, symmetric=False, order="act"),
}


def model() -> LatentModel:
    """Return a model whose latents are two groups of 32."""
    made = LatentModel(num_layers=2, rank=64, dense_size=96)
    for name, values in made.weights.items():
        if values.ndim > 1 and "embed" not in name:
            values *= np.float32(0.15)
    return made


def float8_checkpoint(
    made: LatentModel, times: float = 1.0
) -> tuple[dict[str, torch.Tensor], dict[str, np.ndarray]]:
    """Return a model as a tool stores it, and the weights it means; all but its experts' in float8.

    `times`: what the scales of matrices of keys and values are multiplied by.
    """
    tensors, meant = {}, {}
    for name, values in made.weights.items():
        if "_proj" not in name or ".experts." in name:
            tensors[name], meant[name] = torch.from_numpy(values), values
            continue
        parts, meant[name] = quantised(values, FLOAT8)
        if name.endswith(BOTH):
            parts[FLOAT8.name] *= times
        tensors |= {f"{name.removesuffix('weight')}{part}": t for part, t in parts.items()}
    return tensors, meant


def write(
    tiny, directory: Path, made: LatentModel, scheme: Scheme | None
) -> tuple[Path, dict[str, np.ndarray]]:
    """Write a checkpoint, of float8 without a scheme; return where, and the weights it means."""
    config = FLOAT8.config if scheme is None else scheme.config()
    tiny.directory(directory, made, config={"quantization_config": config})
    if scheme is None:
        tensors, meant = float8_checkpoint(made)
    else:
        of_groups = checkpoint(made.weights, scheme)
        tensors, meant = of_groups.tensors, of_groups.weights
    save_file(tensors, directory / "model.safetensors")
    return directory, meant


def heads_of(made: LatentModel, meant: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys, [H, N, R], and the values, [H, V, R], of a layer."""
    heads = meant[f"{PREFIX}kv_b_proj.weight"].reshape(made.num_heads, -1, made.rank)
    return heads[:, : made.plain], heads[:, made.plain :]


def logits_of(loaded: LoadedModel) -> np.ndarray:
    """Return the logits behind two prompts, in float32."""
    with Target("cpu", "cpu").running(
        loaded, num_blocks=8, block_size=16, dtype="float32", keep_logits=True
    ) as executor:
        sequences = [DrivenSequence([5, 17, 40, 41]), DrivenSequence([9, 8])]
        batch = BatchDriver(executor, num_blocks=8, block_size=16).batch(sequences)
        logits = executor.execute(batch).logits
    assert logits is not None
    return logits


@pytest.mark.parametrize("scheme", GROUPS.values(), ids=GROUPS)
def test_keys_are_decoded_and_turned_and_values_stay_as_they_are(
    tiny, tmp_path: Path, scheme: Scheme | None
) -> None:
    made = model()
    directory, meant = write(tiny, tmp_path / "m", made, scheme)
    source = load_model(str(directory)).source
    keys, values = heads_of(made, meant)
    found = source.tensor(f"{PREFIX}k_b_proj.weight")
    turned = keys.swapaxes(1, 2).reshape(-1, made.plain).astype(np.float16)
    np.testing.assert_array_equal(found.to_float32(), turned)
    assert (found.format, found.input_order, found.scale_group) == (TensorFormat.F16, None, 32)
    some = np.array([70, 3, 3, 127])
    np.testing.assert_array_equal(found.rows(some), found.rows()[some])
    kept = source.tensor(f"{PREFIX}v_b_proj.weight")
    np.testing.assert_array_equal(kept.to_float32(), values.reshape(-1, made.rank))
    is_strewn = scheme is not None and scheme.order == "act"
    assert (kept.input_order is not None) == is_strewn
    assert kept.format.block_elements > 1


@pytest.mark.parametrize("scheme", GROUPS.values(), ids=GROUPS)
def test_a_step_computes_with_what_the_checkpoint_means(
    tiny, tmp_path: Path, scheme: Scheme | None
) -> None:
    """In float32, whatever the order of inputs; of keys with what is left in float16."""
    made = model()
    directory, meant = write(tiny, tmp_path / "m", made, scheme)
    plain = tiny.directory(tmp_path / "plain", made)
    for name, weights in meant.items():
        if name.endswith(BOTH):
            keys = weights.reshape(made.num_heads, -1, made.rank)[:, : made.plain]
            keys[:] = keys.astype(np.float16)
    save_file({n: torch.from_numpy(v) for n, v in meant.items()}, plain / "model.safetensors")
    np.testing.assert_array_equal(
        logits_of(load_model(str(directory))), logits_of(load_model(str(plain)))
    )


def test_keys_that_are_too_large_for_float16_are_told(tiny, tmp_path: Path) -> None:
    made = model()
    config = {"quantization_config": FLOAT8.config}
    directory = tiny.directory(tmp_path / "m", made, config=config)
    tensors, meant = float8_checkpoint(made, 1e6)
    save_file(tensors, directory / "model.safetensors")
    source = load_model(str(directory)).source
    keys, values = heads_of(made, meant)
    assert np.abs(keys).max() * 1e6 > np.finfo(np.float16).max
    with pytest.raises(ModelFileError, match=r"kv_b_proj\S* holds too large weights for float16"):
        source.tensor(f"{PREFIX}k_b_proj.weight").rows()
    kept = source.tensor(f"{PREFIX}v_b_proj.weight").to_float32()
    np.testing.assert_allclose(kept, 1e6 * values.reshape(-1, made.rank), rtol=1e-6)


@pytest.mark.parametrize("name", ["GPTQ in the order of activations", "compressed-tensors"])
def test_matrices_of_heads_whose_inputs_are_sorted_are_refused_but_in_floats(
    tiny, tmp_path: Path, name: str
) -> None:
    directory, _ = write(tiny, tmp_path / "m", model(), GROUPS[name])
    loaded = load_model(str(directory))
    with pytest.raises(UnsupportedModelError, match=r"\(act-order\) .*: \S*v_b_proj\.weight"):
        pack_weights(loaded.spec, loaded.source, "auto")
    pack_weights(loaded.spec, loaded.source, "bfloat16")
