"""How many layers a device with a memory limit takes, from byte counts alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compute_plane.cuda.cuda_driver import CudaDriver
from compute_plane.cuda.host_layers_plan import (
    GIB,
    DeviceBytes,
    device_bytes,
    first_weights,
    layers_within,
    working_bytes,
)
from compute_plane.cuda.weight_plan import plan_weights
from compute_plane.model.tensor import TensorFormat
from planes.errors import ConfigError
from tests.compute_plane.executor.tiny_llama import tiny_spec
from tests.compute_plane.executor.tiny_sources import ArraySource
from tests.compute_plane.executor.tiny_weights import tiny_weights

SPEC = replace(tiny_spec(), num_layers=5)
NEEDS = DeviceBytes(first=100, layers=(10, 20, 30), last=50)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (110, 1), (129, 1), (130, 2),
        (159, 2), (160, 2),  # all layers would fit, but not the head
        (209, 2), (210, 3), (1 << 60, 3),
    ],
)  # fmt: skip
def test_the_first_layers_that_fit_are_taken_and_all_only_with_the_head(
    limit: int, expected: int
) -> None:
    assert layers_within(NEEDS, limit) == expected


@given(
    st.integers(1, 10**6),
    st.lists(st.integers(1, 10**6), min_size=1, max_size=8),
    st.integers(1, 10**6),
    st.integers(1, 10**7),
)
def test_what_is_taken_fits_and_one_layer_more_would_not(
    first: int, layers: list[int], last: int, limit: int
) -> None:
    needs = DeviceBytes(first, tuple(layers), last)
    try:
        taken = layers_within(needs, limit)
    except ConfigError:
        assert limit < needs.least
        return
    assert needs.least <= limit
    if taken == len(layers):
        assert needs.whole <= limit
    else:
        assert first + sum(layers[:taken]) <= limit < needs.whole
        assert taken + 1 == len(layers) or first + sum(layers[: taken + 1]) > limit


@pytest.mark.parametrize("layers", [(3 * GIB, GIB), (GIB, GIB), (GIB,)])
def test_a_limit_below_one_layer_is_refused_with_the_smallest_that_works(
    layers: tuple[int, ...],
) -> None:
    needs = DeviceBytes(first=GIB // 3, layers=layers, last=GIB // 2)
    with pytest.raises(ConfigError, match=r"got 1 ") as info:
        layers_within(needs, GIB)
    assert info.value.field == "gpu_memory_limit"
    named = float(info.value.message.split("at least ")[1].split(" ")[0])
    assert layers_within(needs, int(named * GIB)) >= 1
    assert needs.least > int((named - 0.001) * GIB)


@pytest.mark.parametrize("formats", [{}, {"proj": TensorFormat.Q4_0, "v_proj": TensorFormat.F32}])
@pytest.mark.parametrize(
    ("tied", "architecture"), [(False, "llama"), (True, "qwen2"), (False, "qwen3")]
)
def test_what_is_counted_of_weights_is_what_is_placed(
    tied: bool, architecture: str, formats: dict[str, TensorFormat]
) -> None:
    spec = tiny_spec(tied=tied, quantisable=True, architecture=architecture)
    spec = replace(spec, num_layers=5)
    sizes = {"item_bytes": 2, "layer_bytes": {spec.heads: 0}, "max_tokens": 8}
    source = ArraySource(spec, tiny_weights(spec), formats)
    forgotten: list[str] = []
    source.forget_pages = lambda: forgotten.append("pages")  # type: ignore[method-assign]
    plan = plan_weights(spec, source, "bfloat16")
    needs = device_bytes(spec, plan, **sizes)
    working, norm = working_bytes(spec, 2, 8), 2 * spec.hidden_size
    for num_layers in (1, 3):
        placed = first_weights(plan, num_layers).place(torch.device("cpu"))
        assert len(placed.layers) == num_layers
        assert placed.num_bytes == needs.first - working + sum(needs.layers[:num_layers]) + norm
    assert forgotten == ["pages"] * 2
    head = 0 if tied else plan.lm_head.num_bytes
    logits = needs.last - norm - head
    assert plan.place(torch.device("cpu")).num_bytes == needs.whole - working - logits
    more = device_bytes(spec, plan, **{**sizes, "layer_bytes": {spec.heads: 70}})
    assert [a - b for a, b in zip(more.layers, needs.layers, strict=True)] == [70] * spec.num_layers


def test_working_memory_grows_with_the_tokens_of_a_step() -> None:
    one, two = (working_bytes(SPEC, 2, tokens) for tokens in (1000, 2000))
    widest = 5 * SPEC.hidden_size + 3 * SPEC.intermediate_size
    assert two - one >= 1000 * 2 * widest


def test_working_memory_has_angles_for_both_kinds_of_layers() -> None:
    local = replace(SPEC, local_rope_theta=10.0, layers_with_local_rope=frozenset({0}))
    table = 4 * SPEC.context_length * SPEC.head_dim  # cosines and sines
    assert working_bytes(local, 2, 8) - working_bytes(SPEC, 2, 8) == table


def test_a_limited_device_has_what_the_limit_leaves_and_torch_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told, free = [], 70
    played = {
        "set_device": lambda _: None, "Stream": lambda _: None, "Event": lambda: None,
        "graph_pool_handle": lambda: None,
        "mem_get_info": lambda _: (free, 100), "memory_reserved": lambda _: 15,
        "set_per_process_memory_fraction": lambda share, _: told.append(share),
    }  # fmt: skip
    for name, function in played.items():
        monkeypatch.setattr(torch.cuda, name, function)
    found = []
    for limit in (None, 40, 200):
        driver = CudaDriver(torch.device("cuda", 0), limit)
        found.append((driver.total_bytes(), driver.free_bytes()))
    assert found == [(100, 70), (40, 25), (100, 70)]
    assert told == [0.4, 1.0]
    free = 20  # others have taken the rest
    assert CudaDriver(torch.device("cuda", 0), 40).free_bytes() == 20
    assert CudaDriver(torch.device("cuda", 0), 10).free_bytes() == 0
