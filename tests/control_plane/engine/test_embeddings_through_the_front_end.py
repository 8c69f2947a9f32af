"""Embeddings as API tasks get them, through the engine thread and a fake compute plane."""

from __future__ import annotations

import asyncio
import math

import pytest

from control_plane.access.limits import Limits, Meter
from control_plane.access.principal import Principal, acting_as
from control_plane.config import SchedulingLimits
from control_plane.core.embedding import Pooling
from control_plane.core.embedding_params import EmbeddingParams
from control_plane.core.errors import ContextLengthError
from control_plane.core.request import RequestState
from control_plane.core.request_options import RequestOptions
from control_plane.engine import embedding
from control_plane.engine.embedding import pooling_of
from control_plane.errors import (
    DrainingError,
    RequestCancelledError,
    RequestFailedError,
    TokenRateError,
    TooManyConcurrentRequestsError,
)
from planes.errors import ValidationError
from tests.control_plane.conftest import hidden_states
from tests.control_plane.engine.frontend_driver import running_frontend, until, until_free

RAW = EmbeddingParams(normalize=False)


@pytest.fixture
def serve(fake_plane, compute_address):
    """Run a coroutine function on a front end whose compute plane gives hidden states."""
    fake_plane.features = (*fake_plane.features, "embeddings")

    def run(story, **options):
        async def play():
            loop = asyncio.get_running_loop()
            async with running_frontend(loop, compute_address, **options) as frontend:
                found = await story(frontend)
                await until_free(frontend)
                return found

        return asyncio.run(play())

    return run


def last_of(text: str) -> list[float]:
    return hidden_states(list(text.encode()))


def mean_of(text: str) -> list[float]:
    tokens = list(text.encode())
    states = [hidden_states(tokens[:end]) for end in range(1, len(tokens) + 1)]
    return [sum(column) / len(tokens) for column in zip(*states, strict=True)]


def test_each_text_has_its_own_in_the_order_given_and_is_normalised(serve) -> None:
    texts = [f"text {number} " + "x" * (number % 9) for number in range(100)]
    found = serve(lambda frontend: frontend.embed(texts, EmbeddingParams()))
    for text, one in zip(texts, found, strict=True):
        assert one.num_tokens == len(text)
        expected = last_of(text)
        length = math.hypot(*expected)
        assert list(one.values) == pytest.approx([value / length for value in expected])


@pytest.mark.parametrize("num_places", [1, 3])
def test_more_texts_than_may_wait_go_in_piece_by_piece(serve, num_places) -> None:
    texts = [f"text {number}" for number in range(9)]
    limits = SchedulingLimits(max_num_seqs=1, max_queued_requests=num_places)
    found = serve(lambda frontend: frontend.embed(texts, RAW), limits=limits)
    assert [list(one.values) for one in found] == [last_of(text) for text in texts]


def test_what_is_left_of_fewer_dimensions_is_normalised_anew(serve) -> None:
    async def story(frontend):
        return [
            (await frontend.embed(["hello"], params))[0].values
            for params in (RAW, EmbeddingParams(2, normalize=False), EmbeddingParams(2))
        ]

    raw, cut, normalised = serve(story)
    assert list(raw) == last_of("hello")
    assert list(cut) == last_of("hello")[:2]
    assert math.hypot(*normalised) == pytest.approx(1)
    assert normalised[0] / normalised[1] == pytest.approx(cut[0] / cut[1])


def test_tokens_are_taken_as_they_are_and_texts_get_their_end(serve, fake_plane) -> None:
    fake_plane.text_end = (257,)

    async def story(frontend):
        return await frontend.embed(["hello", list(b"hello")], RAW)

    text, tokens = serve(story)
    assert list(text.values) == hidden_states([*b"hello", 257])
    assert list(tokens.values) == last_of("hello")
    assert (text.num_tokens, tokens.num_tokens) == (6, 5)


@pytest.mark.parametrize(
    ("said", "configured"), [("mean", "auto"), ("last", "mean"), ("cls", "mean")]
)
def test_means_are_means_of_all_tokens_in_chunks_and_behind_cached_ones(
    serve, fake_plane, said, configured
) -> None:
    fake_plane.pooling = said

    async def story(frontend):
        first = await frontend.embed(["a text of some blocks"], RAW)
        return first + await frontend.embed(["a text of some blocks"], RAW)

    limits = SchedulingLimits(prefill_chunk=5)
    for one in serve(story, limits=limits, pooling=configured):
        assert list(one.values) == pytest.approx(mean_of("a text of some blocks"))
        assert one.cached_tokens == 0


def test_the_last_token_is_found_where_the_prompt_was_before(serve) -> None:
    async def story(frontend):
        await frontend.embed(["a text of some blocks"], RAW)
        return await frontend.embed(["a text of some blocks"], RAW)

    [one] = serve(story)
    assert one.cached_tokens == 20
    assert list(one.values) == last_of("a text of some blocks")


def test_pooling_is_the_models_word_the_operators_or_the_last_token() -> None:
    assert pooling_of("auto", "") is pooling_of("auto", "last") is Pooling.LAST
    assert pooling_of("auto", "mean") is pooling_of("mean", "rank") is Pooling.MEAN
    with pytest.raises(ValidationError, match=r"pooled by 'cls'.*--pooling takes last or mean"):
        pooling_of("auto", "cls")


REFUSED = [
    ([], EmbeddingParams(), "inputs", "1 to 2048 texts, got 0"),
    (["a"] * 2049, EmbeddingParams(), "inputs", "1 to 2048 texts, got 2049"),
    ([""], EmbeddingParams(), "inputs", "must not be empty"),
    (["a", ""], EmbeddingParams(), "inputs[1]", r"inputs\[1\]: .* must not be empty"),
    (["a", []], EmbeddingParams(), "inputs[1]", "at least 1 token"),
    (["a", [1, 400]], EmbeddingParams(), "inputs[1]", "token ids must be 0 to 258, got 400"),
    (["a", "b" * 65], EmbeddingParams(), "inputs[1]", "65 tokens, .* at most 64$"),
    (["a"], EmbeddingParams(0), "dimensions", "1 to 3, the model's own, got 0"),
    (["a"], EmbeddingParams(4), "dimensions", "1 to 3, the model's own, got 4"),
    (["a"], EmbeddingParams(True), "dimensions", "got True"),
    (["a"], EmbeddingParams(normalize=1), "normalize", "true or false, got 1"),
]


@pytest.mark.parametrize(("inputs", "params", "field", "said"), REFUSED)
def test_what_is_wrong_is_refused_by_name_before_anything_is_computed(
    serve, fake_plane, inputs, params, field, said
) -> None:
    async def story(frontend):
        with pytest.raises(ValidationError, match=said) as caught:
            await frontend.embed(inputs, params)
        assert caught.value.field == field
        assert frontend.metrics.total_requests == 0

    serve(story, limits=SchedulingLimits(max_model_len=64))
    assert fake_plane.batches == []


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("MAX_TOKENS", "at most 8 tokens together, got 9"),
        ("MAX_NUMBERS", "at most 8 numbers in one answer, got 9"),
    ],
)
def test_a_call_has_so_many_tokens_and_numbers(serve, monkeypatch, limit, said) -> None:
    monkeypatch.setattr(embedding, limit, 8)

    async def story(frontend):
        with pytest.raises(ValidationError, match=said) as caught:
            await frontend.embed(["one", "three", "x"], EmbeddingParams())
        assert caught.value.field == "inputs"
        assert isinstance(caught.value, ContextLengthError) == (limit == "MAX_TOKENS")

    serve(story)


def test_a_model_pooled_otherwise_is_refused_unless_the_operator_says_how(serve, fake_plane):
    fake_plane.pooling = "cls"

    async def story(frontend):
        with pytest.raises(ValidationError, match="'cls', which is not supported") as caught:
            await frontend.embed(["a"], EmbeddingParams())
        assert caught.value.field == "inputs"

    serve(story)


def test_a_plane_without_hidden_states_is_named(serve, fake_plane) -> None:
    fake_plane.features = ("copies",)

    async def story(frontend):
        with pytest.raises(ValidationError, match="lacks embeddings") as caught:
            await frontend.embed(["a"], EmbeddingParams())
        assert caught.value.field == "inputs"

    serve(story)


def test_hidden_states_that_are_no_numbers_fail_the_call_and_nobody_else(serve, fake_plane):
    fake_plane.poisoned_prompt = b"bad"

    async def story(frontend):
        good = asyncio.create_task(frontend.embed(["good"] * 3, RAW))
        with pytest.raises(RequestFailedError, match="NaN hidden states"):
            await frontend.embed(["fine", "bad one", "fine too"], RAW)
        return await good

    assert [list(one.values) for one in serve(story)] == [last_of("good")] * 3


def test_a_caller_who_leaves_takes_all_texts_along(serve, fake_plane) -> None:
    fake_plane.may_run.clear()

    async def story(frontend):
        call = asyncio.create_task(frontend.embed(["text"] * 100, RAW))
        await until(lambda: frontend.metrics.total_requests == embedding.MAX_AT_ONCE)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        fake_plane.may_run.set()
        await until(lambda: frontend.metrics.cancelled_requests == embedding.MAX_AT_ONCE)

    serve(story)


def test_an_operator_sees_texts_by_name_and_may_end_one(serve, fake_plane) -> None:
    fake_plane.may_run.clear()

    async def story(frontend):
        call = asyncio.create_task(
            frontend.embed(["text", "other"], RAW, RequestOptions(name="call"))
        )
        await until(lambda: frontend.metrics.total_requests == 2)
        assert [info.name for info in await frontend.list_requests()] == ["call-0", "call-1"]
        frontend.abort("call-1")
        fake_plane.may_run.set()
        with pytest.raises(RequestCancelledError):
            await call
        infos = await frontend.list_requests(include_ended=True)
        assert infos[-1].generated_tokens == (0,)

    serve(story)


def test_texts_are_counted_and_end_as_completed(serve) -> None:
    async def story(frontend):
        await frontend.embed(["text", "other"], RAW)
        metrics = frontend.metrics
        assert (metrics.completed_requests, metrics.prompt_tokens) == (2, 9)
        assert metrics.generated_tokens == 0
        info = (await frontend.list_requests(include_ended=True))[-1]
        assert info.state is RequestState.COMPLETED

    serve(story)


def test_they_are_computed_anew_when_the_plane_was_lost(serve, fake_plane) -> None:
    fake_plane.may_run.clear()

    async def story(frontend):
        call = asyncio.create_task(frontend.embed(["a text", "and another"], RAW))
        await until(lambda: len(fake_plane.batches) >= 1)
        await asyncio.to_thread(fake_plane.kill)
        fake_plane.start()
        return await call

    found = serve(story, limits=SchedulingLimits(prefill_chunk=3), pooling="mean")
    assert [list(one.values) for one in found] == [
        pytest.approx(mean_of("a text")),
        pytest.approx(mean_of("and another")),
    ]


def test_a_call_is_one_request_of_its_token_whose_tokens_are_booked(serve) -> None:
    ends = []

    class WatchedMeter(Meter):
        def end(self):
            super().end()
            ends.append(self.num_requests)

    meter = WatchedMeter(Limits(max_concurrent_requests=1, max_tokens_per_minute=1000), 0.0)
    principal = Principal("somebody", meter, lambda: 0.0)

    async def story(frontend):
        with acting_as(principal):
            call = asyncio.create_task(frontend.embed(["text"] * 100, RAW))
            await until(lambda: frontend.metrics.completed_requests > 0)
            assert call.done() or meter.num_requests == 1
            await call
            assert ends == [0]
            meter.begin(0.0)
            with pytest.raises(TooManyConcurrentRequestsError):
                await frontend.embed(["text"], RAW)
            meter.end()
            meter.book(599, 0.0)
            await frontend.embed(["t"], RAW)
        with pytest.raises(TokenRateError):
            meter.check(0.0)

    serve(story, wants_principal=True)


def test_a_server_that_drains_takes_no_more(serve) -> None:
    async def story(frontend):
        frontend.drain()
        with pytest.raises(DrainingError):
            await frontend.embed(["text"], RAW)

    serve(story)
