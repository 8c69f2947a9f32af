"""Adapters lie beside the weights, counted; what they cannot change is refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from compute_plane.cuda.adapters import DevicePair
from compute_plane.cuda.build import build_cuda, planned_weights
from compute_plane.executor.registry import ExecutorContext
from compute_plane.model import layout
from compute_plane.model.adapter import Adapter, LowRankPair
from compute_plane.model.errors import UnsupportedModelError
from compute_plane.model.spec import Mixture, ModelSpec
from planes.errors import ValidationError
from tests.compute_plane.cuda.adapted_models import (
    adapted_plan,
    drawn_adapter,
    source_of,
    two_adapters,
    with_adapters,
)
from tests.compute_plane.cuda.metered_device import MeteredDriver
from tests.compute_plane.cuda.test_the_pool_fills_what_steps_leave import (
    DEVICE_BYTES,
    MAX_TOKENS,
    SPEC,
    built_on,
    context,
)
from tests.compute_plane.cuda.torch_executors import tiny_model
from tests.compute_plane.executor.tiny_llama import (
    tiny_spec,
    with_delta_net,
    with_gemma4,
    with_latents,
)
from tests.golden.batch_driver import BatchDriver, DrivenSequence

WIDE = tiny_spec(quantisable=True)
QUERY = layout.layer_tensor(1, layout.QUERY)
BLOCK_SIZE = 4
CPU = torch.device("cpu")


def pair(num_outputs: int, num_inputs: int, *, rank: int = 2, value: float = 1.0) -> LowRankPair:
    down = np.full((rank, num_inputs), value, dtype=np.float32)
    return LowRankPair(down, np.ones((num_outputs, rank), dtype=np.float32))


def test_bytes_of_adapters_are_those_of_weights() -> None:
    source = source_of(SPEC)
    adapters = two_adapters(source)
    plain, plan = (adapted_plan(SPEC, source, own, torch.bfloat16) for own in ((), adapters))
    assert plan.adapters is not None
    weights = plan.place(CPU, 1)
    assert weights.adapters is not None
    held = [pair for pairs in weights.adapters.pairs.values() for pair in pairs if pair is not None]
    num_bytes = sum(pair.down.nbytes + pair.up.nbytes for pair in held)
    assert {one.dtype for pair in held for one in (pair.down, pair.up)} == {torch.bfloat16}
    assert plan.adapters.num_bytes == num_bytes
    assert plan.num_bytes == weights.num_bytes == plain.num_bytes + num_bytes
    # q, k, v of one; q and v of the other; o; gate and up; up alone; down.
    layer = [len(own.down) for own in held[: len(held) // SPEC.num_layers]]
    assert layer == [12, 6, 4, 8, 3, 4]


def test_a_device_has_room_for_steps_with_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest step has as many tokens as one may have, all with the one that takes most."""
    taken = set[tuple[int, int]]()
    add = DevicePair.add

    def noting(self: DevicePair, outputs: Tensor, x: Tensor) -> None:
        taken.add((len(x), len(self.down)))
        add(self, outputs, x)

    adapters = tuple(
        drawn_adapter(source_of(SPEC), name, rank=own) for name, own in (("a", 1), ("b", 60))
    )
    driver, wants = MeteredDriver(DEVICE_BYTES), context(tmp_path, adapters=adapters)
    monkeypatch.setattr(DevicePair, "add", noting)
    built = built_on(driver, wants)
    assert taken == {(MAX_TOKENS, 60), (MAX_TOKENS, 2 * 60), (MAX_TOKENS, 3 * 60)}
    assert built.weights_bytes > 2 * sum(adapter.facts.num_parameters for adapter in adapters)
    assert built.num_blocks is not None
    with driver.meter:
        sequences = BatchDriver(built.executor, num_blocks=built.num_blocks, block_size=BLOCK_SIZE)
        rows = [DrivenSequence(list(range(1, 1 + MAX_TOKENS // 2))) for _ in range(2)]
        batch = with_adapters(sequences.batch(rows), [2, 2])
        assert not built.executor.execute(batch).failed_rows
    assert driver.meter.peak <= 0.9 * DEVICE_BYTES


def test_an_executor_is_built_with_adapters(tmp_path: Path) -> None:
    model = tiny_model(SPEC)
    adapters = two_adapters(model.source)
    built = []
    for own in ((), adapters):
        wants = context(tmp_path, adapters=own, device="cpu", dtype="float32", fills_memory=False)
        built.append(build_cuda(wants, model))
    executor, plain = (one.executor for one in reversed(built))
    assert built[0].numerics_id == built[1].numerics_id
    rows = [DrivenSequence([3, 4, 5])]
    batch = BatchDriver(executor, num_blocks=10, block_size=BLOCK_SIZE).batch(rows)
    for number in (0, 1, 2):
        executor.execute(with_adapters(batch, [number]))
    with pytest.raises(ValidationError, match="3") as refused:
        executor.execute(with_adapters(batch, [3]))
    assert refused.value.field == "adapters"
    with pytest.raises(ValidationError) as refused:
        executor.execute(with_adapters(batch, [1, 1]))
    assert refused.value.field == "adapters"
    with pytest.raises(ValidationError):
        plain.execute(with_adapters(batch, [1]))


REFUSED = {
    "experts": replace(WIDE, architecture="qwen3moe", mixture=Mixture(5, 2)),
    "latents": with_latents(WIDE),
    "states": with_delta_net(WIDE),
    "no keys of its own": with_gemma4(WIDE),
}


@pytest.mark.parametrize(
    ("kind", "tensor"),
    [
        ("experts", layout.layer_tensor(0, layout.GATE)),
        ("latents", layout.layer_tensor(0, layout.QUERY)),
        ("latents", layout.layer_tensor(0, layout.OUTPUT)),
        ("states", layout.layer_tensor(0, layout.OUTPUT)),
        ("no keys of its own", layout.layer_tensor(4, layout.KEY)),
        ("experts", "model.embed_tokens.weight"),
        ("experts", layout.layer_tensor(2, layout.QUERY)),
    ],
)
def test_what_no_adapter_can_change_here_is_refused(kind: str, tensor: str) -> None:
    spec = REFUSED[kind]
    adapter = Adapter("mine", {tensor: pair(8, 8)})
    with pytest.raises(UnsupportedModelError, match=f"adapter mine: .*{tensor}"):
        adapted_plan(spec, source_of(spec), [adapter])


def of_other_inputs(found: LowRankPair) -> LowRankPair:
    return replace(found, down=found.down[:, 1:])


def of_other_outputs(found: LowRankPair) -> LowRankPair:
    return replace(found, up=found.up[1:])


def of_two_ranks(found: LowRankPair) -> LowRankPair:
    return replace(found, up=found.up[:, 1:])


@pytest.mark.parametrize("change", [of_other_inputs, of_other_outputs, of_two_ranks])
def test_pairs_of_other_shapes_are_refused(
    change: Callable[[LowRankPair], LowRankPair],
) -> None:
    fitting = pair(WIDE.query_size, WIDE.hidden_size)
    adapted_plan(WIDE, source_of(WIDE), [Adapter("mine", {QUERY: fitting})])
    adapter = Adapter("mine", {QUERY: change(fitting)})
    with pytest.raises(UnsupportedModelError, match=f"adapter mine: {QUERY} is"):
        adapted_plan(WIDE, source_of(WIDE), [adapter])


def test_numbers_that_a_step_cannot_hold_are_refused() -> None:
    large = Adapter("mine", {QUERY: pair(WIDE.query_size, WIDE.hidden_size, value=1e5)})
    source = source_of(WIDE)
    adapted_plan(WIDE, source, [large], torch.bfloat16).place(CPU, 1)
    with pytest.raises(UnsupportedModelError, match=rf"mine: .*{QUERY}.*not finite"):
        adapted_plan(WIDE, source, [large], torch.float16).place(CPU, 1)


def test_an_adapter_that_changes_nothing_is_one_nevertheless() -> None:
    plan = adapted_plan(WIDE, source_of(WIDE), [Adapter("nothing", {})])
    weights = plan.place(CPU, 1)
    assert weights.adapters is not None
    assert (weights.adapters.num_adapters, len(weights.adapters.pairs)) == (1, 0)
    assert weights.adapters.largest().pairs == {}


def test_the_largest_pair_of_each_projection_is_one_that_no_step_outdoes() -> None:
    source = source_of(WIDE)
    many = drawn_adapter(source, "many", roles=("self_attn.q_proj",), rank=9)
    other = drawn_adapter(source, "other", roles=("self_attn.q_proj", "self_attn.o_proj"), rank=2)
    weights = adapted_plan(WIDE, source, [many, other]).place(CPU, 1)
    assert weights.adapters is not None
    largest = weights.adapters.largest()
    assert largest.num_adapters == 1
    ranks = {len(pair.down) for pairs in largest.pairs.values() for pair in pairs if pair}
    assert ranks == {9, 2}
    assert largest.pairs.keys() == weights.adapters.pairs.keys()


def planned(tmp_path: Path, spec: ModelSpec, adapters: tuple[Adapter, ...]) -> ExecutorContext:
    model = tiny_model(spec)
    return replace(context(tmp_path, spec=spec, model=model), adapters=adapters)


def test_a_mixture_takes_adapters_of_its_attention(tmp_path: Path) -> None:
    spec = REFUSED["experts"]
    adapter = drawn_adapter(source_of(spec), "mine", roles=("self_attn.q_proj", "self_attn.o_proj"))
    wants = planned(tmp_path, spec, (adapter,))
    assert wants.model is not None
    plan = planned_weights(wants, wants.model, CPU)
    assert plan.adapters is not None
    assert [change.place for change in plan.adapters.changes] == ["qkv", "o"] * spec.num_layers
