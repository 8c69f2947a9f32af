"""What kernels read before they wait for the launch ahead is written by none that may be under way.

Kernels say which arguments these are, and both simulators hold them to it; here it is held against
the order of launches in steps of whole models, torch's own among them (ADR 0031).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from compute_plane.cuda.attention_kernels import AttentionKernels
from compute_plane.cuda.executor import CudaExecutor
from compute_plane.cuda.latent_kernels import LatentKernels
from compute_plane.cuda.recurrence_kernels import RecurrenceKernels
from compute_plane.model.delta_net import DeltaNet
from compute_plane.model.mamba2 import Mamba2
from compute_plane.model.rope_scaling import YarnScaling
from compute_plane.model.short_convolution import ShortConvolution
from compute_plane.model.spec import Mixture, ModelSpec
from kernels.cuda.attention_decode import DecodeVariant
from kernels.cuda.attention_wide import WideDecodeVariant
from kernels.cuda.delta_rule import DeltaRuleVariant
from kernels.cuda.gated_convolution import GatedConvolutionVariant
from kernels.cuda.gated_row_norm import GatedRowNormVariant
from kernels.cuda.joint_norms import JointNormsVariant
from kernels.cuda.latent_attention import LatentDecodeVariant
from kernels.cuda.latent_write import LatentWriteVariant
from kernels.cuda.mamba2_inputs import Mamba2InputsVariant
from kernels.cuda.operations import all_variants
from kernels.cuda.rope_write_kv import RopeWriteKvVariant
from kernels.cuda.selective_scan import SelectiveScanVariant
from kernels.cuda.short_convolution import ShortConvolutionVariant
from tests.compute_plane.cuda.noted_launches import (
    Hazard,
    Launch,
    NotedLauncher,
    NotedLaunches,
    read_too_early,
)
from tests.compute_plane.cuda.steps_on_kernels import operations_on
from tests.compute_plane.cuda.torch_executors import RecordingDriver, torch_executor
from tests.compute_plane.executor.tiny_llama import (
    tiny_spec,
    with_gemma4,
    with_latents,
    with_single_layers,
    with_states_beside,
)
from tests.golden.batch_driver import BatchDriver, DrivenSequence, int32

NUM_BLOCKS, BLOCK_SIZE = 12, 16
POSITIONS = 5  # among a rotation's arguments
PROMPTS = [4, 5, 6, 7], [8, 9, 10]
SMALL = replace(
    tiny_spec(), vocab_size=41, num_heads=2, num_kv_heads=1, head_dim=64, hidden_size=64,
    intermediate_size=64,
)  # fmt: skip
STILL = replace(SMALL, architecture="exaone4", layers_without_rope=frozenset({1}))
FIRST = frozenset({0})
MIXTURE = Mixture(5, 2, shared_size=32, gates_shared=True)
DELTA_NET = DeltaNet(2, 4, 32, 64, 4, FIRST)
LATENTS = with_latents(SMALL)
assert LATENTS.latents is not None
ATTENTION = {RopeWriteKvVariant, DecodeVariant}
OF_DELTA_NET = {ShortConvolutionVariant, DeltaRuleVariant}
OF_MAMBA2 = {Mamba2InputsVariant, SelectiveScanVariant, GatedRowNormVariant}
OF_LATENTS = {LatentWriteVariant, LatentDecodeVariant}
SPECS: dict[str, tuple[ModelSpec, set[type]]] = {
    "all layers turn": (SMALL, ATTENTION),
    "one turns nothing": (STILL, ATTENTION),
    "none turns": (replace(STILL, layers_without_rope=frozenset({0, 1})), ATTENTION),
    "queries grow": (
        replace(SMALL, rope_scaling=YarnScaling(8.0, 64, 1.0, query_growth=0.1)), ATTENTION
    ),
    "heads normed together": (
        replace(SMALL, architecture="olmo2"), {JointNormsVariant, *ATTENTION}
    ),
    "windows": (replace(SMALL, window=5, layers_with_window=FIRST), ATTENTION),
    "latents": (replace(LATENTS, latents=replace(LATENTS.latents, query_rank=0)), OF_LATENTS),
    "latents of queries, too": (LATENTS, OF_LATENTS),
    "Gemma 4": (with_gemma4(replace(SMALL, head_dim=256)), {WideDecodeVariant, *ATTENTION}),
    "Qwen3.5": (
        replace(SMALL, architecture="qwen35", recurrence=DELTA_NET), OF_DELTA_NET | ATTENTION
    ),
    "Qwen3-Next": (
        replace(SMALL, architecture="qwen3next", recurrence=DELTA_NET, mixture=MIXTURE),
        OF_DELTA_NET | ATTENTION,
    ),
    "LFM2": (
        replace(SMALL, architecture="lfm2", recurrence=ShortConvolution(64, 3, FIRST)),
        {GatedConvolutionVariant, *ATTENTION},
    ),
    "Granite 4 H": (
        replace(SMALL, architecture="granitehybrid", recurrence=Mamba2(8, 32, 32, 4, 0.02, FIRST)),
        OF_MAMBA2 | ATTENTION,
    ),
    "Falcon-H1": (with_states_beside(SMALL), OF_MAMBA2 | ATTENTION),
    "Falcon-H1, norm behind the state": (
        with_states_beside(SMALL, has_norm=True), OF_MAMBA2 | ATTENTION
    ),
    "Nemotron-H": (with_single_layers(SMALL, "M-*M-"), OF_MAMBA2 | ATTENTION),
}  # fmt: skip
"""Models, and the kernels in their steps that read something before they wait."""


def prepared(spec: ModelSpec) -> tuple[CudaExecutor, NotedLaunches]:
    """Return a model on kernels that are noted, with a graph of four rows."""
    noted = NotedLaunches()
    made = torch_executor(
        spec, RecordingDriver(), dtype=torch.bfloat16, num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE, operations=operations_on(NotedLauncher(noted), spec, {}, "bfloat16"),
    )  # fmt: skip
    made.capture_decode_graph(4)
    return made, noted


def launches_of(made: CudaExecutor, noted: NotedLaunches) -> list[list[Launch]]:
    """Return those of a step of prompts, of one with a token beside a prompt, and of two decodes.

    These are launched one behind the other, the second with tokens that the first one samples.
    """
    driver = BatchDriver(made, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    rows = [DrivenSequence(list(prompt)) for prompt in PROMPTS]
    found: list[list[Launch]] = []

    def launched(running: list[DrivenSequence], sources: list[int] | None = None) -> Any:
        batch = driver.batch(running)
        if sources is not None:
            batch = replace(batch, input_sources=int32(sources))
        noted.launches = []
        with noted:
            step = made.launch(batch)
        found.append(noted.launches)
        for row in running:
            row.num_computed = len(row.tokens)
            row.tokens.append(1)
        return step

    launched(rows).answer()
    launched([*rows, DrivenSequence([11, 12])]).answer()
    under_way = [launched(rows), launched(rows, [0, 1])]
    for step in under_way:
        step.answer()
    return found


def readers(launches: Iterable[Launch]) -> set[type]:
    """Return the kernels that read something before they wait."""
    return {one.kind for one in launches if one.reads_early and one.kind is not None}


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", SPECS)
def test_nothing_that_may_be_under_way_writes_what_is_read_before_a_wait(name: str) -> None:
    spec, kinds = SPECS[name]
    launches = [one for step in launches_of(*prepared(spec)) for one in step]
    assert readers(launches) == kinds
    assert read_too_early(launches) == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [("windows", DecodeVariant), ("latents", LatentDecodeVariant), ("Gemma 4", WideDecodeVariant)],
)
def test_tokens_that_go_on_alone_are_among_these(name: str, kind: type) -> None:
    prompts, *_ = launches_of(*prepared(SPECS[name][0]))
    assert kind in readers(prompts)  # in which no row has one token, but behind the last keys


def test_all_kernels_that_read_before_they_wait_are_in_these_models() -> None:
    known = {type(one) for one in all_variants(every=False) if one.expectation.reads_early}
    assert set().union(*(kinds for _, kinds in SPECS.values())) == known


@pytest.mark.parametrize("name", ["all layers turn", "one turns nothing", "none turns"])
def test_tokens_of_layers_that_turn_nothing_are_at_the_first_position(name: str) -> None:
    spec, _ = SPECS[name]
    *_, replayed = launches_of(*prepared(spec))  # two rows, in a graph of four
    turned = [one for one in replayed if one.kind is RopeWriteKvVariant]
    assert len(turned) == spec.num_layers
    for layer, one in enumerate(turned):
        positions = one.given[POSITIONS].tolist()
        assert positions == ([0] * 4 if layer in spec.layers_without_rope else [6, 5, 0, 0])


def copied(value: Any, name: str = "") -> Any:
    """Return the same with copies of its tensors, or of the one that is called so."""
    if name:
        return replace(value, **{name: copied(getattr(value, name))})
    if isinstance(value, tuple):
        values = [copied(one) for one in value]
        return type(value)(*values) if hasattr(value, "_fields") else tuple(values)
    return value.clone() if isinstance(value, torch.Tensor) else value


ROTATION = AttentionKernels, "rope_write_kv"
DECODE = AttentionKernels, "attention_decode"
DECODE_OF_LATENTS = LatentKernels, "attention_decode"
CASES: Sequence[tuple[str, tuple[type, str], int, str, set[type]]] = [
    ("all layers turn", ROTATION, 5, "", {RopeWriteKvVariant}),
    ("all layers turn", ROTATION, 6, "", {RopeWriteKvVariant}),
    ("all layers turn", ROTATION, 7, "", {RopeWriteKvVariant}),
    ("queries grow", ROTATION, 8, "growth", {RopeWriteKvVariant}),
    ("heads normed together", ROTATION, 8, "norms", {JointNormsVariant}),
    ("windows", DECODE, 5, "", {DecodeVariant}),
    ("windows", DECODE, 6, "", {DecodeVariant}),
    ("Gemma 4", DECODE, 6, "", {DecodeVariant, WideDecodeVariant}),
    ("latents", (LatentKernels, "write"), 6, "", {LatentWriteVariant}),
    ("latents", (LatentKernels, "write"), 7, "", {LatentWriteVariant}),
    ("latents", (LatentKernels, "write"), 8, "", {LatentWriteVariant}),
    ("latents", DECODE_OF_LATENTS, 5, "", {LatentDecodeVariant}),
    ("latents", DECODE_OF_LATENTS, 6, "", {LatentDecodeVariant}),
    ("Qwen3.5", (RecurrenceKernels, "delta_net"), 5, "rows", OF_DELTA_NET),
    ("Qwen3.5", (RecurrenceKernels, "delta_net"), 6, "rates", {ShortConvolutionVariant}),
    ("LFM2", (RecurrenceKernels, "gated_convolution"), 5, "rows", {GatedConvolutionVariant}),
    ("LFM2", (RecurrenceKernels, "gated_convolution"), 6, "weight", {GatedConvolutionVariant}),
    ("Granite 4 H", (RecurrenceKernels, "mamba2"), 5, "rows", OF_MAMBA2),
    ("Granite 4 H", (RecurrenceKernels, "mamba2"), 6, "bias", {Mamba2InputsVariant}),
    ("Granite 4 H", (RecurrenceKernels, "mamba2"), 6, "skips", {SelectiveScanVariant}),
    ("Granite 4 H", (RecurrenceKernels, "mamba2"), 6, "norm", {GatedRowNormVariant}),
]
"""Models, operations that are given a copy, made anew, and the kernels that read it too early.

The last two read it behind launches that begin early, too: these have not waited for the copy.
"""


@pytest.mark.spread(6)
@pytest.mark.parametrize(("name", "operation", "place", "part", "kinds"), CASES)
def test_a_copy_that_is_made_just_ahead_is_read_too_early(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    operation: tuple[type, str],
    place: int,
    part: str,
    kinds: set[type],
) -> None:
    whole = getattr(*operation)

    def careless(*given: Any) -> None:
        whole(*given[:place], copied(given[place], part), *given[place + 1 :])

    monkeypatch.setattr(*operation, careless)
    steps = launches_of(*prepared(SPECS[name][0]))
    assert {one.kind for step in steps for one in read_too_early(step)} == kinds


HERE, ELSEWHERE = (64, 128), (128, 192)


@pytest.mark.parametrize(
    ("behind", "is_hazard"),
    [
        ([], True),
        ([Launch("early", begins_early=True), Launch("early", begins_early=True)], True),
        ([Launch("waits for all")], False),
        ([Launch("waits for all"), Launch("early", begins_early=True)], False),
    ],
)
@pytest.mark.parametrize("begins_early", [False, True])
@pytest.mark.parametrize("where", [HERE, ELSEWHERE])
def test_launches_are_under_way_back_to_one_that_waits_for_all(
    where: tuple[int, int], begins_early: bool, behind: list[Launch], is_hazard: bool
) -> None:
    writer = Launch("writer", begins_early, writes=[(0, 8), HERE])
    reader = Launch("reader", begins_early=True, reads_early={3: where})
    found = read_too_early([writer, *behind, reader])
    expected = [Hazard(None, "reader", 3, "writer")] if is_hazard and where == HERE else []
    assert found == expected
