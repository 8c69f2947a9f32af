"""Hidden states of rows from the CUDA executor on torch's CPU device, and from a cut model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from compute_plane.executor.interface import EmbeddingPart, EmbeddingWant
from planes.errors import ValidationError
from tests.compute_plane.cuda import cut_executors
from tests.compute_plane.cuda.torch_executors import SPEC, RecordingDriver, torch_executor
from tests.compute_plane.executor.embedded_texts import embed
from tests.compute_plane.executor.tiny_llama import pool_for, tiny_executor, tiny_spec
from tests.compute_plane.executor.tiny_weights import tiny_weights
from tests.golden.batch_driver import BatchDriver, DrivenSequence

LAST, SUM = EmbeddingPart.LAST, EmbeddingPart.SUM


def texts(*lengths: int) -> list[list[int]]:
    random = np.random.default_rng(6)
    return [random.integers(0, SPEC.vocab_size, length).tolist() for length in lengths]


@pytest.mark.parametrize("part", [LAST, SUM])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_they_are_those_of_the_cpu_executor_whole_and_in_chunks(part, architecture) -> None:
    spec = tiny_spec(architecture=architecture)
    given, company = texts(90, 1, 33), texts(5, 1)
    with tiny_executor(spec, tiny_weights(spec), pool_for(spec, 60, 4)) as cpu:
        expected = embed(cpu, given, part)
    executor = torch_executor(spec)
    for chunk in (None, 7):
        found = embed(executor, given, part, chunk=chunk, company=company)
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=3e-4)


def test_a_step_with_them_takes_no_graph_and_waits_for_its_copy() -> None:
    device = RecordingDriver()
    executor = torch_executor(driver=device)
    executor.capture_decode_graph(1)
    given = texts(1)
    expected = embed(torch_executor(), given, LAST)
    device.take_calls()
    np.testing.assert_array_equal(embed(executor, given, LAST), expected)
    batch = BatchDriver(executor, num_blocks=60, block_size=4).batch([DrivenSequence(given[0])])
    output = executor.execute(replace(batch, embeddings=[EmbeddingWant(0, LAST)]))
    np.testing.assert_array_equal(output.embeddings, expected)
    assert len(output.next_tokens) == 1
    assert "replay" not in device.take_calls()
    executor.execute(batch)
    assert "replay" in device.take_calls()


def test_layers_of_16_bits_give_them_in_float32() -> None:
    given = texts(20)
    found = embed(torch_executor(dtype=torch.bfloat16), given, LAST)
    assert (found != torch.from_numpy(found).bfloat16().double().numpy()).mean() > 0.9


def test_they_are_not_scaled_as_logits_are() -> None:
    given = texts(9)
    np.testing.assert_array_equal(
        embed(torch_executor(), given, LAST),
        embed(torch_executor(replace(SPEC, logits_scale=0.25)), given, LAST),
    )


@pytest.mark.parametrize("part", [LAST, SUM])
def test_a_model_with_layers_on_the_host_gives_them_too(part) -> None:
    spec, given = cut_executors.SPEC, texts(21, 4)
    with tiny_executor(spec, tiny_weights(spec), pool_for(spec, 60, 4)) as cpu:
        expected = embed(cpu, given, part)
    cut = cut_executors.cut_executor()
    found = embed(cut, given, part, chunk=6)
    cut.close()
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=3e-4)


def test_a_row_that_is_not_there_is_refused_before_anything_is_launched() -> None:
    executor = torch_executor()
    batch = BatchDriver(executor, num_blocks=60, block_size=4).batch([DrivenSequence(texts(3)[0])])
    with pytest.raises(ValidationError) as caught:
        executor.launch(replace(batch, embeddings=[EmbeddingWant(1, LAST)]))
    assert caught.value.field == "embeddings"
