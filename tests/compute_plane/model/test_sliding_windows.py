"""Models with sliding windows: they are read as transformers reads them, and computed exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from compute_plane.app import ComputePlane
from compute_plane.config import ComputePlaneConfig
from compute_plane.executor.registry import ExecutorContext, build_executor
from compute_plane.model.errors import ModelFileError
from compute_plane.model.loader import LoadedModel, load_model
from protos.hetero.compute.v1 import compute_pb2, compute_pb2_grpc
from tests.compute_plane.model.recorded_models import (
    NEW_TOKENS,
    PROMPTS,
    Recorded,
    assert_same,
    record,
)
from tests.devices import STAND_IN, Target

CPU = Target("cpu", "cpu")
LENGTH = NEW_TOKENS + len(PROMPTS[0])
"""Of the longest text."""
FULL, SLIDING = "full_attention", "sliding_attention"
WINDOWS = {"use_sliding_window": True}
MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
KEY, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "mistral": ({}, MISTRAL | {"sliding_window": 5}, {KEY: 5}),
    "a window of one position": ({}, MISTRAL | {"sliding_window": 1}, {KEY: 1}),
    "phi3": ({"architecture": "phi3"}, {"sliding_window": 7}, {KEY: 7}),
    "qwen2": (
        {"architecture": "qwen2", "num_layers": 3},
        WINDOWS | {"sliding_window": 6, "max_window_layers": 2},
        {KEY: 6, PATTERN: [False, False, True]},
    ),
    "qwen3": (
        {"architecture": "qwen3", "num_layers": 3},
        WINDOWS | {"sliding_window": 6, "layer_types": [SLIDING, SLIDING, FULL]},
        {KEY: 6, PATTERN: 3},
    ),
    "mixtral": ({"architecture": "mixtral"}, {"sliding_window": 6}, {KEY: 6}),
    "qwen3 with experts": (
        {"architecture": "qwen3_moe"},
        WINDOWS | {"sliding_window": 6, "max_window_layers": 2},  # all, whatever the last one says
        {KEY: 6},
    ),
    "smollm3": (
        {"architecture": "smollm3", "num_layers": 5},
        WINDOWS | {"sliding_window": 6},
        {KEY: 6, PATTERN: [False, False, False, True, False]},
    ),
}


@pytest.fixture(scope="module", params=CASES)
def recorded(request, tiny, tmp_path_factory) -> Recorded:
    of_model, config, keys = CASES[request.param]
    return record(tiny, tmp_path_factory.mktemp("windows"), tiny.model(**of_model), config, keys)


@pytest.mark.spread(8)
@pytest.mark.parametrize(
    ("files", "target"),
    [("directory", CPU), ("gguf", CPU), ("directory", STAND_IN)],
    ids=["directory", "gguf", "on the CUDA executor"],
)
def test_texts_beyond_the_window_are_those_of_transformers(
    recorded: Recorded, files: str, target: Target
) -> None:
    model = load_model(str(getattr(recorded, files)))
    assert model.spec.window < LENGTH < model.spec.context_length
    assert_same(recorded, model, target)


def built(model: LoadedModel, executor: str, tmp_path):
    context = ExecutorContext(
        spec=model.spec, model=model, block_size=16, num_blocks=24, dtype="float32",
        kv_cache_dtype="auto", instruction_set="auto", device="cpu", max_tokens=64, num_threads=1,
        kernel_cache=tmp_path,
    )  # fmt: skip
    return build_executor(executor, context)


@pytest.mark.parametrize(("executor", "length"), [("cpu", 512), ("cuda", 512)])
def test_a_plane_tells_how_long_contexts_of_its_executor_are(tiny, tmp_path, executor, length):
    directory = tiny.directory(
        tmp_path / "m", tiny.model(), config=MISTRAL | {"sliding_window": 64}
    )
    plane = ComputePlane(
        ComputePlaneConfig(
            model=str(directory), executor=executor, device="cpu", max_num_blocks=8,
            listen="127.0.0.1:0", num_threads=1, max_tokens_per_batch=64,
        )
    )  # fmt: skip
    try:
        with grpc.insecure_channel(plane.start().target) as channel:
            stub = compute_pb2_grpc.ComputeServiceStub(channel)
            described = stub.Describe(compute_pb2.DescribeRequest(), timeout=30)
            assets = stub.GetModelAssets(compute_pb2.GetModelAssetsRequest(), timeout=30)
    finally:
        plane.stop()
    assert (described.executor, described.model.context_length) == (executor, length)
    assert assets.context_length == length


def test_contexts_of_an_executor_of_ones_own_end_at_the_window_and_it_is_told_of_none(
    tiny, tmp_path, monkeypatch
):
    seen = []

    def factory(context: ExecutorContext) -> object:
        seen.append(context)
        return built(replace(context.model, spec=context.spec), "cpu", tmp_path).executor

    monkeypatch.setattr("tests.compute_plane.model.test_sliding_windows.FACTORY", factory)
    model = load_model(
        str(tiny.directory(tmp_path / "m", tiny.model(), config=MISTRAL | {"sliding_window": 64}))
    )
    with capture_logs() as logs:
        made = built(model, f"{__name__}:FACTORY", tmp_path)
    made.executor.close()
    assert made.context_length == 64
    (line,) = [line for line in logs if "max_model_len" in line]
    assert (line["log_level"], line["max_model_len"]) == ("warning", 64)
    for spec in (seen[0].spec, seen[0].model.spec):
        assert (spec.window, spec.layers_with_window, spec.context_length) == (
            None,
            frozenset(),
            64,
        )


FACTORY: Any = None


@pytest.mark.parametrize(
    ("config", "window", "length"),
    [
        (MISTRAL | {"sliding_window": 511}, 511, 512),
        (MISTRAL | {"sliding_window": 512}, None, 512),
        (MISTRAL | {"sliding_window": None, "max_position_embeddings": 32768}, None, 32768),
        (MISTRAL | {"max_position_embeddings": 32768}, 4096, 32768),
        (
            MISTRAL | {"sliding_window": 600, "rope_scaling": {"type": "linear", "factor": 2}},
            600,
            1024,
        ),
        ({"sliding_window": 128}, None, 512),  # Llama's configuration has no such key
    ],
)
def test_mistral_has_windows_in_all_layers(tiny, tmp_path, config, window, length):
    spec = load_model(str(tiny.directory(tmp_path / "m", tiny.model(), config=config))).spec
    assert (spec.window, spec.context_length) == (window, length)
    assert [spec.window_of(layer) for layer in range(2)] == [window] * 2


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (WINDOWS | {"sliding_window": 64, "max_window_layers": 1}, [None, 64]),
        (WINDOWS | {"max_window_layers": 0, "max_position_embeddings": 32768}, [4096] * 2),
        (WINDOWS | {"sliding_window": 64, "max_window_layers": 2}, [None] * 2),  # of two layers
        (WINDOWS | {"sliding_window": 64}, [None] * 2),  # from layer 28 on
        (WINDOWS | {"sliding_window": 64, "layer_types": [FULL, SLIDING]}, [None, 64]),
        (
            WINDOWS | {"sliding_window": 64, "layer_types": [FULL] * 2, "max_window_layers": 0},
            [None] * 2,
        ),
        (WINDOWS | {"max_window_layers": 0, "sliding_window": None}, [None] * 2),
        (
            {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 0},
            [None] * 2,
        ),
    ],
)
def test_qwen_has_windows_in_the_layers_it_says(tiny, tmp_path, architecture, config, windows):
    from transformers import AutoConfig

    model = tiny.model(architecture=architecture)
    directory = tiny.directory(tmp_path / "m", model, config=config)
    spec = load_model(str(directory)).spec
    assert [spec.window_of(layer) for layer in range(2)] == windows
    theirs = AutoConfig.from_pretrained(directory)
    assert [
        theirs.sliding_window if kind == SLIDING else None for kind in theirs.layer_types
    ] == windows


@pytest.mark.parametrize(
    ("pattern", "layers"),
    [
        (None, {0, 1, 2, 3, 4, 5, 6}),
        (0, {0, 1, 2, 3, 4, 5, 6}),
        (1, set()),
        (3, {0, 1, 3, 4, 6}),
        ([True, False, False, True, True, False, True], {0, 3, 4, 6}),
    ],
)
def test_a_pattern_of_a_gguf_file_says_which_layers_have_windows(tiny, tmp_path, pattern, layers):
    def change(writer):
        writer.add_sliding_window(9)
        if pattern is not None:
            writer.add_sliding_window_pattern(pattern)

    path = tiny.gguf(tmp_path / "m.gguf", tiny.model(num_layers=7), change=change)
    assert load_model(str(path)).spec.layers_with_window == layers


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (MISTRAL | {"sliding_window": 0}, "sliding_window must be at least 1, got 0"),
        (MISTRAL | {"sliding_window": "no"}, "sliding_window must be an integer"),
    ],
)
def test_windows_that_cannot_be_are_a_fault_of_the_file(tiny, tmp_path, config, words):
    with pytest.raises(ModelFileError, match=words):
        load_model(str(tiny.directory(tmp_path / "m", tiny.model(), config=config)))


@pytest.mark.parametrize("kinds", [[SLIDING], [SLIDING, "mamba"], SLIDING])
def test_layers_of_no_known_type_are_a_fault_of_the_file(tiny, tmp_path, kinds):
    config = WINDOWS | {"sliding_window": 64, "layer_types": kinds}
    model = tiny.model(architecture="qwen3")
    with pytest.raises(ModelFileError, match="layer_types must be full_attention or sliding"):
        load_model(str(tiny.directory(tmp_path / "m", model, config=config)))


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ([True], "must have an element for each of 2 layers"),
        ([True] * 5000, "must have at most 4096 elements, got 5000"),
        (["yes", "no"], "must be an array of bools"),
    ],
)
def test_patterns_that_cannot_be_are_a_fault_of_the_file(tiny, tmp_path, pattern, words):
    def change(writer):
        writer.add_sliding_window(9)
        writer.add_array(f"llama.{PATTERN}", pattern)

    path = tiny.gguf(tmp_path / "m.gguf", tiny.model(), change=change)
    with pytest.raises(ModelFileError, match=words):
        load_model(str(path))
