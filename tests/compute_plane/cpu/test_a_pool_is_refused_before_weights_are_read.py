"""What the CPU executor cannot keep keys and values in is refused before it reads any weight."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from compute_plane.cpu import build
from compute_plane.executor.registry import build_executor
from compute_plane.model.tensor import RawTensor
from planes.errors import ConfigError
from tests.compute_plane.cuda.test_cuda_plane_on_the_cpu import SPEC, context
from tests.compute_plane.cuda.torch_executors import tiny_model


class Unread:
    """A source that nobody may read."""

    names: tuple[str, ...] = ()

    def tensor(self, name: str) -> RawTensor:
        raise AssertionError(f"{name} is read")

    def forget_pages(self) -> None:
        raise AssertionError("something was read")


def test_keys_and_values_are_looked_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "prepare_kernel_cache", lambda root, _watch: root)
    model = replace(tiny_model(SPEC), source=Unread())
    wants = context(tmp_path, model=model, kv_cache_dtype="float16")
    refused = "float32, bfloat16, int8, float8, got float16"
    with pytest.raises(ConfigError, match=refused) as caught:
        build_executor("cpu", wants)
    assert caught.value.field == "kv_cache_dtype"
