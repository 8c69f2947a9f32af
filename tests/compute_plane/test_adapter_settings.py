"""What `--lora` may be, and what it excludes."""

from __future__ import annotations

import gc
import re
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from compute_plane.adapter_sources import adapter_sources
from compute_plane.app import ComputePlane
from compute_plane.config import ComputePlaneConfig
from compute_plane.executor import simulated
from compute_plane.executor.registry import BuiltExecutor, ExecutorContext, build_executor
from compute_plane.model.adapter import Adapter, LowRankPair
from planes.errors import ConfigError, EngineError


def test_a_list_names_adapters_and_where_they_lie() -> None:
    found = adapter_sources("sql=./a b/sql, team/de@2=~/de.gguf,x=y=z")
    assert [source.name for source in found] == ["sql", "team/de@2", "x"]
    assert [source.path for source in found] == [
        Path("a b/sql"),
        Path.home() / "de.gguf",
        Path("y=z"),
    ]
    assert adapter_sources(None) == ()
    assert ComputePlaneConfig(lora="a=b").adapter_sources == adapter_sources("a=b")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sql", "must be NAME=PATH, several with commas between them, got 'sql'"),
        ("sql=", "got 'sql='"),
        ("a=b,,c=d", "got ''"),
        ("=path", "a name has at most 128 letters"),
        ("two words=path", "got 'two words'"),
        (f"{'x' * 129}=path", "at most 128"),
        ("a=~nobody-of-that-name/x", "lora: a: Could not determine home directory"),
        ("a=b,a=c", "'a' is there more than once"),
        (",".join(f"a{i}=b" for i in range(1025)), "at most 1024 adapters, got 1025"),
    ],
)
def test_what_is_no_such_list_is_refused_before_anything_is_loaded(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as refused:
        ComputePlaneConfig(lora=text)
    assert refused.value.field == "lora"


def test_layers_on_the_host_and_adapters_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="lora and gpu_memory_limit exclude each other"):
        ComputePlaneConfig(lora="a=b", gpu_memory_limit=1.0)


def refusal(**settings: object) -> EngineError:
    with pytest.raises(EngineError) as refused:
        ComputePlane(ComputePlaneConfig(listen="127.0.0.1:0", **settings))  # type: ignore[arg-type]
    return refused.value


def test_an_adapter_cannot_be_called_as_the_model_is() -> None:
    error = refusal(executor="simulated", lora="simulated=x")
    assert (error.field, error.message) == ("lora", "lora: the model itself is called 'simulated'")


def test_an_adapter_that_is_not_there_is_named(tmp_path: Path) -> None:
    error = refusal(executor="cpu", lora=f"mine={tmp_path / 'nowhere'}")
    assert error.field == "lora"
    assert error.message.startswith("lora: mine: ")
    assert "nowhere" in error.message


def test_what_an_executor_was_built_from_is_not_kept_beside_what_it_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    matrices: list[weakref.ref[np.ndarray]] = []

    def loaded(name: str, *_: object) -> Adapter:
        pair = LowRankPair(np.ones((2, 3), np.float32), np.ones((4, 2), np.float32))
        matrices.append(weakref.ref(pair.down))
        return Adapter(name, {"a matrix": pair}, "its digest")

    def build(_: str, context: ExecutorContext) -> BuiltExecutor:
        assert [adapter.name for adapter in context.adapters] == ["mine"]
        assert matrices[0]() is not None
        return build_executor("simulated", replace(context, adapters=()))

    monkeypatch.setattr("compute_plane.app.load_adapter", loaded)
    config = ComputePlaneConfig(listen="127.0.0.1:0", executor="cpu", lora="mine=somewhere")
    plane = ComputePlane(config, build=build)
    gc.collect()
    assert matrices[0]() is None
    [described] = plane._servicer._facts.adapters
    assert (described.name, described.rank, described.num_parameters) == ("mine", 2, 14)
    plane.start()
    plane.stop()


def test_an_executor_of_ones_own_takes_none(tmp_path: Path) -> None:
    context = ExecutorContext(
        spec=simulated.SPEC, model=None, block_size=16, num_blocks=4, dtype="auto",
        kv_cache_dtype="auto", instruction_set="auto", device="cpu", max_tokens=16, num_threads=1,
        kernel_cache=tmp_path, adapters=(Adapter("mine", {}),),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="tests:never takes no adapters") as refused:
        build_executor("tests:never", context)
    assert refused.value.field == "lora"
