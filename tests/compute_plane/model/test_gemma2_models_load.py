"""Gemma 2: what its files say and leave out, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from compute_plane.executor.registry import ExecutorContext, build_executor
from compute_plane.model.errors import ModelFileError
from compute_plane.model.loader import LoadedModel, load_model
from planes.errors import ConfigError


def in_directory(tiny: Any, tmp_path: Any, num_layers: int = 5, **config: Any) -> LoadedModel:
    model = tiny.model(architecture="gemma2", num_layers=num_layers)
    return load_model(str(tiny.directory(tmp_path / "m", model, config=config)))


def in_gguf(tiny: Any, tmp_path: Any, num_layers: int = 5, **keys: Any) -> LoadedModel:
    def change(writer: Any) -> None:
        for key, value in keys.items():
            add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
            add(f"gemma2.{key.replace('__', '.')}", value)

    model = tiny.model(architecture="gemma2", num_layers=num_layers)
    return load_model(str(tiny.gguf(tmp_path / "m.gguf", model, change=change)))


def test_a_configuration_that_says_nothing_means_what_it_means_in_transformers(
    tiny: Any, tmp_path: Any
) -> None:
    spec = in_directory(tiny, tmp_path, max_position_embeddings=8192, rope_theta=None).spec
    assert (spec.scores_cap, spec.logits_cap) == (50, 30)
    assert (spec.window, spec.layers_with_window) == (4096, {0, 2, 4})
    assert (spec.rope_theta, spec.layers_with_local_rope) == (1e4, frozenset())
    assert spec.score_scale == 1 / 16  # 256 to the power of -1/2, whatever the size of a head
    assert spec.embedding_scale == 8


def test_a_gguf_file_that_says_nothing_means_what_it_means_in_llama_cpp(
    tiny: Any, tmp_path: Any
) -> None:
    spec = in_gguf(tiny, tmp_path, context_length=8192).spec
    assert (spec.scores_cap, spec.logits_cap) == (50, 30)
    assert (spec.window, spec.layers_with_window) == (4096, {0, 2, 4})
    assert (spec.score_scale, spec.embedding_scale) == (None, 8)


def test_what_files_say_holds(tiny: Any, tmp_path: Any) -> None:
    spec = in_directory(
        tiny, tmp_path, attn_logit_softcapping=None, final_logit_softcapping=12.5,
        query_pre_attn_scalar=144, sliding_window=6,
    ).spec  # fmt: skip
    assert (spec.scores_cap, spec.logits_cap, spec.score_scale) == (None, 12.5, 1 / 12)
    spec = in_gguf(
        tiny, tmp_path, attn_logit_softcapping=20.0, final_logit_softcapping=0.0,
        attention__sliding_window=6,
    ).spec  # fmt: skip
    assert (spec.scores_cap, spec.logits_cap, spec.window) == (20, None, 6)


def test_scores_of_the_model_of_46_layers_are_scaled_by_its_width(tiny: Any, tmp_path: Any) -> None:
    assert in_gguf(tiny, tmp_path, num_layers=46).spec.score_scale == math.sqrt(4 / 64)


@pytest.mark.parametrize("cap", [0, -1, 1e-4, 1e7])
@pytest.mark.parametrize("key", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_a_cap_that_cannot_be_is_a_fault_of_the_file(
    tiny: Any, tmp_path: Any, key: str, cap: float
) -> None:
    words = f"{key} must be 0.001 to 1e\\+06, got {cap}"
    with pytest.raises(ModelFileError, match=words):
        in_directory(tiny, tmp_path, **{key: cap})
    if cap:
        with pytest.raises(ModelFileError, match=f"gemma2.{key} must be 0.001 to 1e"):
            in_gguf(tiny, tmp_path, **{key: float(cap)})


def test_executors_of_ones_own_are_not_given_them(tiny: Any, tmp_path: Any) -> None:
    model = in_directory(tiny, tmp_path)
    context = ExecutorContext(
        spec=model.spec, model=model, block_size=16, num_blocks=24, dtype="float32",
        kv_cache_dtype="auto", instruction_set="auto", device="cpu", max_tokens=64, num_threads=1,
        kernel_cache=tmp_path,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="attention has more than that of others"):
        build_executor("some:executor", context)
