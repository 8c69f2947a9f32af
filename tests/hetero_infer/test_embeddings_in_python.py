"""`embed` of the engine and of both clients, with the simulated executor."""

from __future__ import annotations

import asyncio
import dataclasses
import math

import numpy as np
import pytest

from compute_plane.executor.simulated import SPEC, hidden_states
from control_plane.core.embedding_params import MAX_INPUTS
from hetero_infer import (
    AsyncClient,
    Client,
    ContextLengthError,
    GenerationParams,
    InferenceEngine,
    ModelNotFoundError,
    ValidationError,
)
from hetero_infer.commands.server import own_server
from hetero_infer.config import EngineConfig
from tests.hetero_infer.small_engine import SMALL

TEXTS = [f"text {number} " + "x" * (number * 7 % 50) for number in range(100)]


def states_of(text: str) -> np.ndarray:
    return hidden_states(np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32))


def last_of(text: str) -> np.ndarray:
    return states_of(text) / math.hypot(*states_of(text))


def mean_of(text: str) -> np.ndarray:
    states = [states_of(text[:end]) for end in range(1, len(text) + 1)]
    mean = np.add.reduce(states) / len(text)
    return mean / math.hypot(*mean)


@pytest.fixture(scope="module")
def engine():
    """One engine for many tests: small enough that texts queue and come in chunks."""
    config = dataclasses.replace(SMALL, max_total_tokens=16, max_model_len=200)
    with InferenceEngine(config) as engine:
        yield engine


@pytest.fixture(scope="module")
def server():
    config = EngineConfig(executor="simulated", pooling="mean", max_model_len=200)
    with own_server(config, lambda _: None) as server:
        yield server.address


def test_texts_that_may_not_all_wait_are_embedded_one_after_the_other():
    config = dataclasses.replace(SMALL, max_num_seqs=1, max_queued_requests=1)
    with InferenceEngine(config) as engine:
        found = engine.embed(TEXTS[:5])
    for embedding, text in zip(found, TEXTS[:5], strict=True):
        np.testing.assert_allclose(embedding.values, last_of(text), rtol=1e-6)


def test_the_engine_embeds_beside_what_it_generates(engine):
    request_id = engine.submit_request("hello", GenerationParams(max_tokens=30, ignore_eos=True))
    found = engine.embed(TEXTS)
    for text, one in zip(TEXTS, found, strict=True):
        np.testing.assert_allclose(np.asarray(one.values), last_of(text), rtol=1e-6)
        assert np.asarray(one.values).dtype == np.float32
        assert one.num_tokens == len(text)
    (result,) = engine.run()
    assert (result.request_id, len(result.output_tokens)) == (request_id, 30)
    assert engine.get_memory_stats().used_blocks == 0


def test_the_engine_takes_tokens_and_cuts_and_leaves_lengths(engine):
    [one] = engine.embed([list(b"hello")], dimensions=1, normalize=False)
    assert list(one.values) == [np.float32(states_of("hello")[0])]


@pytest.mark.parametrize(
    ("inputs", "field"),
    [
        ("a text alone", "inputs"),
        ([1, 2, 3], "inputs[0]"),
        ([b"bytes"], "inputs[0]"),
        (7, "inputs"),
        ([], "inputs"),
        (["a"] * (MAX_INPUTS + 1), "inputs"),
        (["a", ""], "inputs[1]"),
        (["a", [300]], "inputs[1]"),
    ],
)
def test_what_is_no_list_of_texts_is_refused_by_all(engine, server, inputs, field):
    with Client(server) as client:
        for embed in (engine.embed, client.embed):
            with pytest.raises(ValidationError) as caught:
                embed(inputs)
            assert caught.value.field == field
    assert not engine.has_pending_work()


def test_a_text_that_is_too_long_is_told_from_the_others(engine):
    with pytest.raises(ContextLengthError, match=r"^inputs\[1\]: .*at most 200$"):
        engine.embed(["a", "b" * 201])
    assert len(engine.embed(["b" * 200])) == 1


def test_both_clients_get_what_the_engine_makes(server):
    async def ask():
        async with AsyncClient(server) as client:
            return await client.embed(TEXTS, dimensions=2)

    with Client(server) as client:
        found = client.embed(TEXTS, timeout_s=120)
        assert found == asyncio.run(ask())
        for text, one in zip(TEXTS, found, strict=True):
            np.testing.assert_allclose(np.asarray(one.values), mean_of(text), rtol=1e-5)
        [one] = client.embed([[104, 105]], dimensions=1, normalize=False)
        assert (len(one.values), one.num_tokens) == (1, 2)
        assert SPEC.hidden_size == 2


def test_the_servers_refusals_have_their_classes(server):
    with Client(server) as client:
        with pytest.raises(ContextLengthError):
            client.embed(["b" * 201])
        with pytest.raises(ModelNotFoundError):
            client.embed(["b"], model="other")
        with pytest.raises(ValidationError) as caught:
            client.embed(["b"], dimensions=3)
        assert caught.value.field == "dimensions"
        with pytest.raises(ValidationError) as caught:
            client.embed(["b"], dimensions=-1)
        assert caught.value.field == "dimensions"
