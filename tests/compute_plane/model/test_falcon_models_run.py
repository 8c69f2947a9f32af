"""Tiny Falcon-H1, whose layers have attention and Mamba-2: logits and texts are transformers'."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from compute_plane.model.loader import load_model
from tests.compute_plane.model.falcon_models import FalconModel
from tests.compute_plane.model.group_checkpoints import CT, Scheme, checkpoint
from tests.compute_plane.model.recorded_models import PROMPTS, Recorded, assert_same, record
from tests.devices import STAND_IN, Target
from tests.golden.batch_driver import BatchDriver, DrivenSequence

CPU, CUDA = Target("cpu", "cpu"), STAND_IN


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "norm behind the state"])
def recorded(request, tiny, tmp_path_factory) -> Recorded:
    made = FalconModel(has_norm=request.param)
    return record(tiny, tmp_path_factory.mktemp("recorded"), made, {}, {})


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("files", "target"), [("directory", CPU), ("gguf", CPU), ("directory", CUDA)]
)
def test_greedy_texts_and_their_logits_are_those_of_transformers(
    recorded: Recorded, files: str, target: Target
) -> None:
    assert_same(recorded, load_model(str(getattr(recorded, files))), target)


@pytest.mark.parametrize("order", ["none", "act"])
def test_a_quantised_directory_says_what_its_weights_are(tiny, tmp_path: Path, order: str) -> None:
    """What multiplies values, time steps and what Mamba-2 gives is in the scales of groups."""
    made = FalconModel()
    for name, values in made.weights.items():
        if values.ndim > 1 and "embed" not in name:
            values *= np.float32(0.15)
    stored = checkpoint(made.weights, Scheme(CT, order=order, scale_type="F32"))
    config = {"quantization_config": stored.scheme.config()}
    quantised = tiny.directory(tmp_path / "quantised", made, config=config)
    stored.save(quantised / "model.safetensors")
    weights = {name: np.ascontiguousarray(values) for name, values in stored.weights.items()}
    plain = tiny.directory(tmp_path / "plain", made, weights=weights)
    found, expected = (logits_of(path, "float32") for path in (quantised, plain))
    np.testing.assert_allclose(found, expected, atol=2e-5, rtol=1e-5)
    near = logits_of(quantised, "auto")
    assert np.abs(near - expected).max() < 0.05 * np.abs(expected).max()


def logits_of(path: Path, dtype: str) -> np.ndarray:
    """Return the logits behind a prompt."""
    sizes = {"num_blocks": 8, "block_size": 16}
    with CPU.running(load_model(str(path)), **sizes, dtype=dtype, keep_logits=True) as executor:
        driver = BatchDriver(executor, **sizes)
        (logits,) = executor.execute(driver.batch([DrivenSequence(list(PROMPTS[0]))])).logits
        return np.array(logits)
