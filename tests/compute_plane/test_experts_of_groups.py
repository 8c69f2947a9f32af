"""Mixtures whose tokens choose groups of experts first, on both executors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from compute_plane.cpu.model_table import ModelTable
from compute_plane.cpu.packed_weights import pack_weights
from compute_plane.cuda.expert_kernels import ExpertKernels
from compute_plane.cuda.expert_operations import Routing
from compute_plane.cuda.expert_products import choose
from compute_plane.cuda.experts import DeviceExperts
from compute_plane.cuda.reference_experts import ReferenceExperts
from compute_plane.cuda.reference_operations import ReferenceOperations
from compute_plane.model.spec import Mixture, ModelSpec
from kernels.cpu.catalogue import add_experts, group_by_expert, route_tokens
from kernels.cpu.operands import Routing as Operands
from kernels.cuda.route_experts import RouteExpertsVariant
from kernels.reference import mixture as reference
from tests.compute_plane.cuda.simulated_launcher import SimulatedLauncher
from tests.compute_plane.cuda.torch_executors import tiny_plan
from tests.compute_plane.executor.tiny_llama import pool_for, tiny_spec
from tests.compute_plane.executor.tiny_sources import ArraySource, model_in_memory
from tests.compute_plane.executor.tiny_weights import tiny_weights
from tests.devices import STAND_IN, Target
from tests.golden.batch_driver import BatchDriver, DrivenSequence

DENSE = {"dense_layers": 1, "dense_size": 64}
LARGEST = Mixture(12, 3, False, weight_scale=1.5, num_groups=4, groups_per_token=2)
SUMMED = Mixture(
    12, 3, True, "sigmoid", 2.5, True, 32, **DENSE, num_groups=4, groups_per_token=2
)  # fmt: skip
MIXTURES = {"largest": ("mixtral", LARGEST), "summed": ("dots1", SUMMED)}
KINDS = pytest.mark.parametrize("kind", MIXTURES)
CPU = Target("cpu", "cpu")


def spec_of(kind: str) -> ModelSpec:
    architecture, mixture = MIXTURES[kind]
    return replace(tiny_spec(quantisable=True), architecture=architecture, mixture=mixture)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_groups": 5}, "num_groups must divide 12 experts, got 5"),
        ({"num_groups": 0}, "num_groups must divide 12 experts, got 0"),
        ({"groups_per_token": 5}, "groups_per_token must be 1 to 4, got 5"),
        ({"groups_per_token": 0}, "groups_per_token must be 1 to 4, got 0"),
        ({"num_groups": 1}, "groups_per_token must be 1 to 1, got 2"),
        ({"experts_per_token": 7}, "groups_per_token must be enough for 7 experts, got 2 groups "
         "of 3"),
        ({"num_groups": 12, "groups_per_token": 3}, "num_groups must be at most 6, for groups are "
         "chosen by their two largest scores, got 12"),
    ],
)  # fmt: skip
def test_groups_that_cannot_be_are_a_mixtures_fault(changes: dict[str, int], message: str) -> None:
    assert replace(SUMMED, **changes).faults() == [message]


def test_groups_that_can_be_are_none() -> None:
    for count, chosen in ((1, 1), (2, 1), (4, 1), (4, 4), (6, 2)):
        for mixture in (LARGEST, SUMMED):
            assert replace(mixture, num_groups=count, groups_per_token=chosen).faults() == []
    assert replace(LARGEST, num_groups=12, groups_per_token=3).faults() == []
    alone = Mixture(1, 1, corrects_choice=True)
    assert alone.faults() == []  # no groups: nothing is chosen by its two largest scores
    assert "num_groups must divide" in replace(LARGEST, num_experts=0, num_groups=0).faults()[-1]


def routed(logits: np.ndarray, mixture: Mixture, correction: np.ndarray | None):
    shape = len(logits), mixture.experts_per_token
    chosen, weights = np.empty(shape, np.int32), np.empty(shape, np.float32)
    reference.route(
        logits, normalises=mixture.normalises_weights, chosen=chosen, weights=weights,
        is_sigmoid=mixture.scores == "sigmoid", correction=correction,
        scale=mixture.weight_scale, num_groups=mixture.num_groups,
        groups_per_token=mixture.groups_per_token,
    )  # fmt: skip
    return chosen, weights


@KINDS
@pytest.mark.parametrize("normalises", [False, True])
def test_torch_chooses_as_the_reference_does(kind: str, normalises: bool) -> None:
    mixture, random = replace(MIXTURES[kind][1], normalises_weights=normalises), np.random
    logits = random.default_rng(0).standard_normal((50, 12), np.float32)
    logits[7] = 0  # all are equal: the lowest numbers
    logits[8] = [1, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2, 2]
    logits[9] = [2, 2, 0, 0, 0, 0, 5, 2, 0, 0, 0, 0]  # group 2 counts most, and 0 is lower than 7
    correction = None
    if mixture.corrects_choice:
        correction = random.default_rng(1).standard_normal(12, np.float32) / 4
    for added in (correction, None if correction is None else 0 * correction):
        expected, weighed = routed(logits, mixture, added)
        tensor = None if added is None else torch.from_numpy(added)
        chosen, weights = choose(torch.from_numpy(logits), mixture, tensor)
        np.testing.assert_array_equal(chosen.numpy(), expected)
        np.testing.assert_allclose(weights.numpy(), weighed, rtol=1e-5)


@KINDS
def test_torch_sends_a_row_of_nan_to_experts_that_exist(kind: str) -> None:
    mixture = MIXTURES[kind][1]
    correction = torch.zeros(12) if mixture.corrects_choice else None
    logits = torch.zeros(3, 12)
    logits[0], logits[1, 4] = torch.nan, torch.nan
    chosen, weights = choose(logits, mixture, correction)
    assert ((chosen >= 0) & (chosen < 12)).all()
    assert weights[0].isnan().all()
    assert weights[2].isfinite().all()


def experts_of(spec: ModelSpec) -> DeviceExperts:
    layer = tiny_plan(spec, torch.bfloat16, {}).place(torch.device("cpu")).layers[-1]
    assert isinstance(layer.feedforward, DeviceExperts)
    return layer.feedforward


def assert_same(one: Routing, other: Routing) -> None:
    torch.testing.assert_close(one.weights, other.weights, atol=1e-5, rtol=0)
    assert torch.equal(one.order, other.order)


@KINDS
def test_the_operations_of_a_device_choose_among_groups_by_the_kernel_and_without_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, launcher = spec_of(kind), SimulatedLauncher()
    mixture, experts = MIXTURES[kind][1], experts_of(spec)
    x = np.random.default_rng(3).standard_normal((9, spec.hidden_size), np.float32)
    rows = torch.from_numpy(x).bfloat16()
    kernels = ExpertKernels(launcher, spec, "bfloat16", tiny_plan(spec, torch.bfloat16, {}).experts)
    launcher.prepare(kernels.variants)
    operations = ReferenceExperts(ReferenceOperations())
    expected = operations.route(rows, experts, mixture)
    free = operations.route(rows, experts, replace(mixture, num_groups=1, groups_per_token=1))
    assert not torch.equal(free.order, expected.order)
    assert_same(kernels.route(rows, experts, mixture), expected)
    assert [name for name, _ in launcher.launched if name.endswith("_g4_2")]
    monkeypatch.setattr(RouteExpertsVariant, "takes", lambda *_: False)
    assert_same(kernels.route(rows, experts, mixture), expected)


@KINDS
@pytest.mark.parametrize("has_groups", [False, True])
def test_the_record_of_routing_has_the_groups_and_no_other_record_has_its_words(
    kind: str, has_groups: bool
) -> None:
    spec, mixture = spec_of(kind), MIXTURES[kind][1]
    if not has_groups:
        mixture = replace(mixture, num_groups=1, groups_per_token=1)
        spec = replace(spec, mixture=mixture)
    weights = pack_weights(spec, ArraySource(spec, tiny_weights(spec), {}, None))
    table = ModelTable(spec, weights, pool_for(spec, 4, 16), max_tokens=16)
    made = list(zip(table.table._operations, table.table._records, strict=True))
    routing = [record for operation, record in made if operation is route_tokens]
    others = [record for operation, record in made if operation in (group_by_expert, add_experts)]
    assert len(others) == 2 * len(routing) > 0
    for record in routing:
        assert record[Operands.NUM_GROUPS] == (4 if has_groups else 0)
        assert record[Operands.GROUPS_PER_TOKEN] == mixture.groups_per_token
    for record in others:
        assert record[Operands.NUM_GROUPS] == record[Operands.GROUPS_PER_TOKEN] == 0


def logits_of(target: Target, spec: ModelSpec, told: list[int] | None = None):
    """Return the logits of a prompt of several tokens and of a few behind it, and the tokens."""
    model = model_in_memory(spec, tiny_weights(spec), {})
    sequence, seen = DrivenSequence([5, 17, 40, 41, 42, 9, 100]), []
    with target.running(
        model, num_blocks=8, block_size=16, dtype="float32", keep_logits=True
    ) as executor:
        driver = BatchDriver(executor, num_blocks=8, block_size=16)
        for _ in range(3):
            batch = driver.batch([sequence])
            output = executor.execute(batch)
            assert output.logits is not None
            seen += list(output.logits)
            driver.commit([sequence], batch, output)
            if told is not None:
                sequence.tokens[:] = told[: len(sequence.tokens)]
    return np.stack(seen), sequence.tokens


@KINDS
def test_models_say_the_same_on_both_executors_and_another_thing_without_groups(kind: str) -> None:
    spec = spec_of(kind)
    expected, tokens = logits_of(CPU, spec)
    found, _ = logits_of(STAND_IN, spec, tokens)
    np.testing.assert_allclose(found, expected, atol=1e-3)
    free = replace(MIXTURES[kind][1], num_groups=1, groups_per_token=1)
    without, _ = logits_of(CPU, replace(spec, mixture=free), tokens)
    assert np.abs(without - expected).max() > 0.05
