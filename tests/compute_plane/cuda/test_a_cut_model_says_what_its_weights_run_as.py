"""The description of a model whose last layers run on the host speaks of both parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from compute_plane.cpu.executor import CpuExecutor
from compute_plane.cuda import build
from compute_plane.cuda.drivers import CpuDriver
from compute_plane.cuda.host_layers import HostLayersExecutor
from compute_plane.cuda.host_layers_build import _needs
from compute_plane.cuda.reference_operations import ReferenceOperations
from compute_plane.cuda.weights import DTYPES
from compute_plane.executor.registry import BuiltExecutor
from compute_plane.model.tensor import TensorFormat
from tests.compute_plane.cuda.test_a_memory_limit_is_kept_when_a_model_is_built import (
    built,
    context,
    limit_of,
)
from tests.compute_plane.cuda.torch_executors import tiny_model
from tests.compute_plane.executor.tiny_llama import tiny_spec
from tests.compute_plane.rpc.plane_harness import NUM_BLOCKS

SPEC = replace(
    tiny_spec(head_dim=64), num_layers=2, num_heads=4, hidden_size=256, intermediate_size=512
)


def cut_in_two(formats: dict[str, str], dtype: str = "auto") -> BuiltExecutor:
    """Build a model, but for its last layer and its head, on a device."""
    model = tiny_model(SPEC, {part: TensorFormat[label] for part, label in formats.items()})
    here = context(spec=SPEC, model=model, dtype=dtype)
    plan, driver = build.planned_weights(here, model, torch.device("cpu")), CpuDriver()
    operations = ReferenceOperations()
    whole = _needs(here, driver, plan, operations, DTYPES[plan.dtype], NUM_BLOCKS).whole
    limited = replace(here, gpu_memory_limit=whole - 1)
    made = build.build_on(limited, model, plan, driver, operations)
    assert isinstance(made.executor, HostLayersExecutor)
    made.executor.close()
    return made


def test_what_device_and_host_run_otherwise_is_named_as_both_and_what_they_run_alike_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = cut_in_two({"embed": "Q8_0", "lm_head": "Q6_K", "down": "FP8", "": "Q4_K"})
    # Those with most weights first, which are in a layer's other matrices; the device's of equals.
    assert made.dtype == "Q4_K, FP8, FP8 as Q8_0, Q6_K, Q8_0"
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "memory limit" in line)
    assert f"weight_format='{made.dtype}'" in line


def test_a_head_that_is_quantised_on_the_host_alone_is_named() -> None:
    """By it a replay on another plane knows that results may differ by what that rounds."""
    assert cut_in_two({"lm_head": "Q6_K"}).dtype == "F32, Q6_K"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_computed_in_is_named_where_nothing_stays_quantised(dtype: str) -> None:
    assert cut_in_two({"": "Q4_K"}, dtype).dtype == dtype


@pytest.mark.parametrize("tells", [False, True])
def test_prompts_are_told_apart_where_the_hosts_layers_do_so(
    monkeypatch: pytest.MonkeyPatch, tells: bool
) -> None:
    monkeypatch.setattr(CpuExecutor, "tells_prompts_apart", tells)
    assert built(gpu_memory_limit=limit_of(2)).tells_prompts_apart is tells


def test_wherever_it_is_cut_it_has_the_weights_of_all_layers() -> None:
    of_one, of_three = (built(gpu_memory_limit=limit_of(layers)).weights_bytes for layers in (1, 3))
    assert of_one == pytest.approx(of_three, rel=0.02)
