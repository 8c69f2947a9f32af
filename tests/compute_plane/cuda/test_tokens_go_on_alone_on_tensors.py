"""Tokens whose output is wanted go through the last layers alone, on a device, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from torch import Tensor

from compute_plane.cuda.batch_layout import BatchLayout
from compute_plane.cuda.executor import CudaExecutor
from compute_plane.cuda.layer_products import Hidden, LayerProducts
from compute_plane.executor.interface import EmbeddingPart, EmbeddingWant, ExecutionBatch
from compute_plane.executor.token_layout import PoolShape
from compute_plane.model.late_layers import first_late_layer
from compute_plane.model.spec import ModelSpec
from tests.compute_plane.cuda.torch_executors import torch_executor
from tests.compute_plane.executor.tiny_llama import (
    tiny_spec,
    with_delta_net,
    with_gemma4,
    with_latents,
    with_single_layers,
    with_states_beside,
)
from tests.golden.batch_driver import BatchDriver, DrivenSequence

SPEC = tiny_spec(quantisable=True)
MODELS: dict[str, ModelSpec] = {
    "llama": SPEC,
    "gates": with_delta_net(SPEC),
    "latents": with_latents(SPEC),
    "keys of earlier layers": with_gemma4(SPEC),
    "experts": with_gemma4(SPEC, has_experts=True),
    "states beside": with_states_beside(SPEC),
    "a state behind the last keys": with_single_layers(SPEC, "*-M-"),
}
SIZES = {"num_blocks": 60, "block_size": 4, "keep_logits": True}
PROMPTS = range(3, 26), [30, 31, 32], [50], range(60, 71)
TOLERANCE = 2e-4
"""Of logits up to 5: products of other numbers of rows are added in another order."""


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each product had that is added to the residual stream."""
    found: list[int] = []
    add = LayerProducts.add

    def noting(self: LayerProducts, hidden: Hidden, x: Tensor, *rest: object) -> None:
        found.append(len(x))
        add(self, hidden, x, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(LayerProducts, "add", noting)
    return found


def made(spec: ModelSpec, *, alone: bool) -> CudaExecutor:
    executor = torch_executor(spec, **SIZES)  # type: ignore[arg-type]
    if not alone:
        executor._model.first_late = None
    return executor


def logits_of(executor: CudaExecutor, chunk: int | None) -> list[np.ndarray]:
    """Return the logits of steps in which prompts end, and of a step behind each."""
    driver = BatchDriver(executor, num_blocks=60, block_size=4)
    rows, found = [DrivenSequence(list(prompt)) for prompt in PROMPTS], []
    while len(found) < 9:
        batch = driver.batch(rows, chunk)
        output = executor.execute(batch)
        assert not output.failed_rows
        assert output.logits is not None
        found += list(output.logits)
        for row, sequence in enumerate(rows):
            sequence.num_computed = int(batch.seq_lens[row])
            if row in batch.sampled_rows:
                sequence.tokens.append(90 + row)
    return found


@pytest.mark.spread(6)
@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("kind", MODELS)
def test_what_comes_out_is_what_comes_out_when_all_go_on(
    kind: str, chunk: int | None, noted: list[int]
) -> None:
    spec = MODELS[kind]
    found = logits_of(made(spec, alone=True), chunk)
    num_alone = sum(noted)
    noted.clear()
    expected = logits_of(made(spec, alone=False), chunk)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)
    assert np.abs(expected).max() > 0.5
    assert num_alone < sum(noted)


@pytest.mark.parametrize("kind", MODELS)
def test_those_that_go_on_are_those_that_are_sampled(kind: str, noted: list[int]) -> None:
    spec = MODELS[kind]
    executor = made(spec, alone=True)
    first = first_late_layer(spec)
    assert first is not None
    driver = BatchDriver(executor, num_blocks=60, block_size=4)
    rows = [DrivenSequence(list(prompt)) for prompt in PROMPTS]
    executor.execute(driver.batch(rows, 5))
    sizes = set(noted)
    assert sizes == {5 + 3 + 1 + 5, 2}  # two of the four end within five tokens
    whole = noted.index(2)  # everything ahead of the first late layer's product
    assert set(noted[whole:]) == {2}


def test_nothing_goes_on_where_nothing_is_sampled(noted: list[int]) -> None:
    executor = made(MODELS["keys of earlier layers"], alone=True)
    driver = BatchDriver(executor, num_blocks=60, block_size=4)
    executor.execute(driver.batch([DrivenSequence(list(range(3, 26)))], 7))
    first = first_late_layer(MODELS["keys of earlier layers"])
    assert first == 2
    assert noted == [7] * (first * 3)  # of a layer attention, MLP and inputs


def with_prompt_logprobs(batch: ExecutionBatch) -> ExecutionBatch:
    return replace(
        batch,
        prompt_logprob_rows=[0],
        prompt_logprob_targets=[np.arange(batch.query_lens[0], dtype=np.int32)],
        prompt_num_logprobs=[2],
    )


def with_embedding(batch: ExecutionBatch) -> ExecutionBatch:
    return replace(batch, embeddings=[EmbeddingWant(0, EmbeddingPart.SUM)])


@pytest.mark.parametrize("change", [with_prompt_logprobs, with_embedding])
def test_all_go_on_where_more_is_wanted_of_a_prompt(
    change: Callable[[ExecutionBatch], ExecutionBatch], noted: list[int]
) -> None:
    executor = made(SPEC, alone=True)
    driver = BatchDriver(executor, num_blocks=60, block_size=4)
    batch = driver.batch([DrivenSequence(list(range(3, 14)))])
    executor.execute(change(batch))
    assert set(noted) == {11}


@pytest.mark.parametrize("kind", ["llama", "latents", "keys of earlier layers"])
def test_those_that_go_on_need_not_be_the_last_of_their_rows(kind: str, noted: list[int]) -> None:
    """Log-probabilities of two tokens in the middle of a prompt, no more than there are rows."""
    found = []
    for alone in (True, False):
        executor = made(MODELS[kind], alone=alone)
        driver = BatchDriver(executor, num_blocks=60, block_size=4)
        batch = driver.batch([DrivenSequence(list(prompt)) for prompt in PROMPTS])
        wanted = replace(
            batch, prompt_logprob_rows=[0], prompt_logprob_targets=[np.array([7, 9], np.int32)],
            prompt_num_logprobs=[2], sampled_rows=batch.sampled_rows[1:3],
            sampling=batch.sampling[1:3],
        )  # fmt: skip
        noted.clear()
        output = executor.execute(wanted)
        assert not output.failed_rows
        (logprobs,) = output.prompt_logprobs
        found.append((output.logits, logprobs))
        assert (4 in noted) == alone
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, atol=TOLERANCE)


def test_no_more_go_on_alone_than_there_are_rows() -> None:
    """What their block tables take is reckoned with."""
    driver = BatchDriver(made(SPEC, alone=True), num_blocks=60, block_size=4)
    batch = driver.batch([DrivenSequence(list(prompt)) for prompt in PROMPTS])
    layout = BatchLayout(batch, PoolShape(60, 4, 131, 0), max_tokens=64, tile_tokens=(16,))
    four = layout.late_tokens(np.array([3, 9, 9, 20, 0]))
    assert four is not None
    assert four.tolist() == [0, 3, 9, 20]
    assert layout.columns(four)["late_tables"].shape[0] == 4
    assert layout.late_tokens(np.array([3, 9, 20, 0, 5])) is None
    assert "late_tables" not in layout.columns()
