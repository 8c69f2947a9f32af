"""Embeddings of tiny models from files, through the whole engine, against transformers' own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import PoolingType

from compute_plane.model import pooling
from hetero_infer import EngineConfig, InferenceEngine, RequestFailedError
from tests.compute_plane.model.conftest import Tiny
from tests.compute_plane.model.test_embedding_models_load import (
    END,
    sentence_transformer,
    template,
)

TEXTS = ["hello", "hello hell", "x", "a longer text, of some blocks and chunks: " + "hello " * 30]

CASES = [
    pytest.param("qwen3", "directory", "last", "cpu"),
    pytest.param("llama", "gguf", "mean", "cuda"),
    *(
        pytest.param(architecture, files, how, executor, marks=pytest.mark.slow)
        for architecture in ("qwen3", "llama")
        for files in ("directory", "gguf")
        for how in ("last", "mean")
        for executor in ("cpu", "cuda")
    ),
]


@dataclass(frozen=True)
class Files:
    """The same model as a directory without a head and as a GGUF file; its texts have an end."""

    directory: Path
    gguf: Path


def write(folder: Path, architecture: str, how: str) -> Files:
    tiny = Tiny()
    model = tiny.model(architecture=architecture, tied=False)
    del model.weights["lm_head.weight"]
    for name, values in model.weights.items():
        if values.ndim > 1 and "embed" not in name:
            values *= np.float32(0.15)
    name = {"qwen3": "Qwen3Model", "llama": "LlamaModel"}[architecture]
    post_processor = template([], ["<|im_end|>"])
    directory = tiny.directory(
        folder / "hf",
        model,
        config={"architectures": [name]},
        files={"tokenizer.json": tiny.tokenizer() | {"post_processor": post_processor}},
        weights={key.removeprefix("model."): values for key, values in model.weights.items()},
    )
    mode = {"last": "pooling_mode_lasttoken", "mean": "pooling_mode_mean_tokens"}[how]
    (directory / "1_Pooling").mkdir()
    (directory / pooling.CONFIG).write_text(json.dumps(sentence_transformer(**{mode: True})))

    def change(writer) -> None:
        writer.add_pooling_type(PoolingType[how.upper()])
        writer.add_add_eos_token(True)
        writer.add_add_bos_token(False)

    return Files(directory, tiny.gguf(folder / "m.gguf", model, change=change))


def of_transformers(directory: Path, how: str) -> np.ndarray:
    """What AutoModel, its tokenizer and the pooling give, normalised."""
    import torch
    from transformers import AutoModel, PreTrainedTokenizerFast

    model = AutoModel.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    found = []
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert ids[-1] == END
        with torch.inference_mode():
            hidden = model(torch.tensor([ids])).last_hidden_state[0]
        pooled = hidden[-1] if how == "last" else hidden.mean(0)
        found.append(torch.nn.functional.normalize(pooled, dim=0).numpy())
    return np.stack(found)


@pytest.mark.wide
@pytest.mark.parametrize(("architecture", "kind", "how", "executor"), CASES)
def test_they_are_those_of_transformers_and_its_tokenizer(
    tmp_path: Path, architecture: str, kind: str, how: str, executor: str
) -> None:
    files = write(tmp_path, architecture, how)
    config = EngineConfig(
        model=str(getattr(files, kind)),
        executor=executor,
        device="cpu",
        dtype="float32",
        max_num_blocks=64,
        max_model_len=256,
        prefill_chunk=24,
    )
    expected = of_transformers(files.directory, how)
    with InferenceEngine(config) as engine:
        found = np.stack([np.asarray(one.values) for one in engine.embed(TEXTS)])
        alone = np.stack([np.asarray(engine.embed([text])[0].values) for text in TEXTS])
    np.testing.assert_allclose(found, expected, atol=2e-6)
    if executor == "cpu":
        np.testing.assert_array_equal(found, alone)
    else:
        np.testing.assert_allclose(found, alone, atol=2e-6)


@pytest.mark.wide
def test_a_model_that_gives_no_numbers_fails_the_texts_by_name(tmp_path: Path) -> None:
    """Its weights are numbers, or it would not load; what comes of them is none."""
    tiny = Tiny()
    model = tiny.model()
    model.weights["model.layers.1.mlp.down_proj.weight"][:] = np.float32(3e38)
    directory = tiny.directory(tmp_path / "m", model)
    config = EngineConfig(
        model=str(directory), executor="cpu", device="cpu", dtype="float32", max_num_blocks=64,
        max_model_len=256,
    )  # fmt: skip
    with InferenceEngine(config) as engine:
        with pytest.raises(RequestFailedError, match="not finite"):
            engine.embed(["hello"] * 200)
        assert engine.get_metrics().total_requests < 200  # one that fails ends the call
        engine.run()
        assert engine.get_memory_stats().used_blocks == 0
