"""Models with a sliding window: what is computed is exact, and ends where the window would move."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from compute_plane.model.errors import ModelFileError
from compute_plane.model.loader import load_model
from tests.compute_plane.model.recorded_models import (
    NEW_TOKENS,
    PROMPTS,
    Recorded,
    assert_same,
    record,
)
from tests.devices import Target

WINDOW = NEW_TOKENS + len(PROMPTS[0])
FULL = "full_attention"
WINDOWS = {"use_sliding_window": True}
MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}


@pytest.fixture(scope="module")
def recorded(tiny, tmp_path_factory) -> Recorded:
    config = MISTRAL | {"sliding_window": WINDOW}
    keys = {"attention.sliding_window": WINDOW}
    return record(tiny, tmp_path_factory.mktemp("mistral"), tiny.model(), config, keys)


@pytest.mark.parametrize("files", ["directory", "gguf"])
def test_texts_as_long_as_the_window_are_those_of_transformers(recorded: Recorded, files) -> None:
    with capture_logs() as logs:
        model = load_model(str(getattr(recorded, files)))
    assert model.spec.context_length == model.assets.context_length == WINDOW
    (line,) = logs
    assert (line["log_level"], line["max_model_len"]) == ("warning", WINDOW)
    assert_same(recorded, model, Target("cpu", "cpu"))


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (MISTRAL | {"sliding_window": 512}, 512),
        (MISTRAL | {"sliding_window": None, "max_position_embeddings": 32768}, 32768),
        (MISTRAL | {"max_position_embeddings": 32768}, 4096),
        (MISTRAL | {"sliding_window": 600, "rope_scaling": {"type": "linear", "factor": 2}}, 600),
        ({"sliding_window": 128}, 512),  # Llama's configuration has no such key
    ],
)
def test_a_context_is_as_long_as_the_window_where_there_is_one(tiny, tmp_path, config, length):
    spec = load_model(str(tiny.directory(tmp_path / "m", tiny.model(), config=config))).spec
    assert spec.context_length == length


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("config", "length"),
    [
        (WINDOWS | {"sliding_window": 64, "max_window_layers": 1}, 64),
        (WINDOWS | {"max_window_layers": 0, "max_position_embeddings": 32768}, 4096),
        (WINDOWS | {"sliding_window": 64, "max_window_layers": 2}, 512),  # of two layers
        (WINDOWS | {"sliding_window": 64}, 512),  # from layer 28 on
        (WINDOWS | {"sliding_window": 64, "layer_types": [FULL, "sliding_attention"]}, 64),
        (WINDOWS | {"sliding_window": 64, "layer_types": [FULL] * 2, "max_window_layers": 0}, 512),
        (WINDOWS | {"max_window_layers": 0, "sliding_window": None}, 512),
        ({"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 0}, 512),
    ],
)
def test_qwen_has_windows_in_the_layers_it_says(tiny, tmp_path, architecture, config, length):
    from transformers import AutoConfig

    model = tiny.model(architecture=architecture)
    directory = tiny.directory(tmp_path / "m", model, config=config)
    spec = load_model(str(directory)).spec
    assert spec.context_length == length
    theirs = AutoConfig.from_pretrained(directory)
    has_windows = "sliding_attention" in theirs.layer_types and theirs.sliding_window is not None
    assert has_windows == (length < theirs.max_position_embeddings)


def test_a_window_of_nothing_is_a_fault_of_the_file(tiny, tmp_path):
    config = MISTRAL | {"sliding_window": 0}
    with pytest.raises(ModelFileError, match="sliding_window must be at least 1, got 0"):
        load_model(str(tiny.directory(tmp_path / "m", tiny.model(), config=config)))
