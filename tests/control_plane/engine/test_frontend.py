"""What API tasks get of the engine, through its thread and a fake compute plane."""

from __future__ import annotations

import asyncio

import pytest

from control_plane.core.request import FinishReason, RequestState
from control_plane.core.request_options import RequestOptions
from control_plane.errors import DrainingError, RequestNotFoundError, SlowReaderError
from control_plane.text.chat_template import ChatTemplate
from planes.errors import TokenizationError, ValidationError
from tests.control_plane.engine.frontend_driver import (
    asking,
    collect,
    running_frontend,
    text_of,
    until,
    until_free,
)

STOP, LENGTH, CANCELLED = FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED


@pytest.fixture
def serve(compute_address):
    """Run a coroutine function on a front end."""

    def run(story, **options):
        async def play():
            loop = asyncio.get_running_loop()
            async with running_frontend(loop, compute_address, **options) as frontend:
                return await story(frontend)

        return asyncio.run(play())

    return run


def test_a_stop_string_ends_the_answer_before_it_and_frees_its_blocks(serve, expected):
    whole = expected("hello", 40)
    stop = whole[20:23]

    async def story(frontend):
        generation = await frontend.submit("hello", asking(40, stop=(stop,)))
        deltas = await collect(generation)
        await until_free(frontend)
        return generation, deltas, (await frontend.list_requests(include_ended=True))[-1]

    generation, deltas, info = serve(story)
    before = whole[: whole.index(stop)]
    assert text_of(deltas) == before
    assert [t for delta in deltas for t in delta.token_ids] == list(before.encode())
    assert generation.num_generated_tokens == len(before)
    ended = [delta for delta in deltas if delta.finish_reason is not None]
    assert [(delta.finish_reason, delta.matched_stop) for delta in ended] == [(STOP, stop)]
    assert (deltas[-1].end.state, deltas[-1].end.finish_reason) == (RequestState.COMPLETED, STOP)
    assert info.finish_reason is STOP


def test_a_sample_that_stops_lets_the_others_go_on(serve, expected):
    texts = [expected("hello", 30, 0, sample) for sample in range(3)]
    stop = texts[1][10:14]
    assert stop not in texts[0]
    assert stop not in texts[2]

    async def story(frontend):
        generation = await frontend.submit("hello", asking(30, n=3, stop=(stop,)))
        return generation, await collect(generation)

    generation, deltas = serve(story)
    assert [text_of(deltas, i) for i in range(3)] == [texts[0], texts[1][:10], texts[2]]
    reasons = {d.sample_index: d.finish_reason for d in deltas if d.finish_reason is not None}
    assert reasons == {0: LENGTH, 1: STOP, 2: LENGTH}
    assert generation.num_generated_tokens == 70
    assert deltas[-1].end.finish_reason is LENGTH


def test_stop_tokens_end_the_answer(serve, expected):
    whole = expected("hello", 30)
    token = ord(whole[7])

    async def story(frontend):
        plain = await collect(await frontend.submit("hello", asking(30, stop_token_ids=(token,))))
        included = asking(30, stop_token_ids=(token,), include_stop=True)
        return plain, await collect(await frontend.submit("hello", included))

    plain, included = serve(story)
    before = whole[: whole.index(chr(token))]
    assert (text_of(plain), plain[-1].matched_stop) == (before, token)
    assert (text_of(included), included[-1].finish_reason) == (before + chr(token), STOP)


def test_an_answer_goes_on_behind_the_tokens_its_reader_has(serve, expected):
    whole = expected("hello", 30, 9)

    async def story(frontend):
        for num_known in (1, 13, 29, 30):
            known = whole[:num_known].encode()
            generation = await frontend.submit("hello", asking(30, 9), continued=known)
            deltas = await collect(generation)
            assert text_of(deltas) == whole[num_known:]
            assert deltas[0].offset == num_known
            assert generation.num_generated_tokens == 30
            assert deltas[-1].finish_reason is deltas[-1].end.finish_reason is LENGTH

    serve(story)


def test_a_continued_answer_that_has_ended_already_ends_at_once(serve, expected):
    whole = expected("hello", 30, 9)
    letter = whole[9]

    async def story(frontend):
        known = whole[: whole.index(letter) + 1].encode()
        by_token = asking(30, 9, stop_token_ids=(ord(letter),), include_stop=True)
        by_text = asking(30, 9, stop=(letter,), include_stop=True)
        for params, matched in ((by_token, ord(letter)), (by_text, letter)):
            deltas = await collect(await frontend.submit("hello", params, continued=known))
            assert [(d.text, d.finish_reason, d.matched_stop) for d in deltas] == [
                ("", STOP, matched)
            ]
        assert frontend.metrics.total_requests == 0

    serve(story)


@pytest.mark.parametrize(
    ("fields", "known", "field"),
    [
        ({"n": 2}, b"a", "n"),
        ({"beam_width": 2}, b"a", "beam_width"),
        ({"seed": None}, b"a", "seed"),
        ({"max_tokens": 2}, b"abc", "continued"),
        ({}, [-1], "continued"),
        ({}, [259], "continued"),
        ({}, ["a"], "continued"),
    ],
)
def test_what_cannot_be_continued_is_refused(serve, fields, known, field):
    async def story(frontend):
        with pytest.raises(ValidationError) as caught:
            await frontend.submit("hello", asking(**fields), continued=known)
        assert caught.value.field == field
        assert "None" not in caught.value.message

    serve(story)


def test_log_probabilities_of_the_prompt_come_with_the_first_piece(serve, fake_plane):
    fake_plane.features = (*fake_plane.features, "prompt_logprobs")

    async def story(frontend):
        params = asking(3, num_prompt_logprobs=2)
        for _ in range(2):  # what is cached is computed all the same
            generation = await frontend.submit("hello", params)
            async with generation:
                await generation.next_delta()
                logprobs = generation.prompt_logprobs
                assert logprobs[0] is None
                assert [entry.logprob for entry in logprobs[1:]] == [-1.0, -2.0, -3.0, -4.0]
                assert all(entry.top_token_ids == (97, 98) for entry in logprobs[1:])
        plain = await frontend.submit("hello", asking(3))
        await collect(plain)
        assert plain.prompt_logprobs is None

    serve(story)


def test_a_plane_without_log_probabilities_of_prompts_refuses_them(serve):
    async def story(frontend):
        with pytest.raises(ValidationError, match="lacks prompt_logprobs, got 0"):
            await frontend.submit("hello", asking(num_prompt_logprobs=0))

    serve(story)


async def rest_of(generation):
    while True:
        await generation.next_delta()


def test_a_reader_that_takes_nothing_is_cut_off_at_the_bound(serve):
    async def story(frontend):
        generation = await frontend.submit("hello", asking(200, ignore_eos=True))
        async with generation:
            await generation.admitted()
            await generation.next_delta()
            await until(lambda: generation.has_ended)
            with pytest.raises(SlowReaderError):
                await rest_of(generation)
        await until_free(frontend)
        assert frontend.metrics.cancelled_requests == 1
        assert frontend.metrics.generated_tokens < 100

    serve(story, max_unread_tokens=32)


def test_requests_are_aborted_by_name_and_by_number(serve, fake_plane):
    fake_plane.may_run.clear()

    async def story(frontend):
        for known_as in ("it", None):
            generation = await frontend.submit("hello", asking(50), RequestOptions(name="it"))
            await generation.admitted()
            frontend.abort(known_as or generation.engine_id)
            fake_plane.may_run.set()
            deltas = await collect_rest(generation)
            assert deltas[-1].end.state is RequestState.CANCELLED
            assert deltas[-1].finish_reason is CANCELLED
        for unknown in ("it", "", 77):
            with pytest.raises(RequestNotFoundError):
                frontend.abort(unknown)

    async def collect_rest(generation):
        async with generation:
            deltas = []
            while not deltas or deltas[-1].end is None:
                deltas.append(await generation.next_delta())
        return deltas

    serve(story)


def test_the_prefix_cache_is_emptied(serve):
    async def story(frontend):
        async def cached():
            generation = await frontend.submit("a prompt of some length", asking(2))
            return (await collect(generation))[-1].end.cached_tokens

        assert (await cached(), await cached()) == (0, 20)
        assert await frontend.flush_prefix_cache() > 0
        await until(lambda: frontend.memory_stats.cached_blocks == 0)
        assert await cached() == 0

    serve(story)


def test_a_server_that_drains_refuses_what_is_new_and_ends_what_runs(serve, expected):
    told = []

    async def story(frontend):
        generation = await frontend.submit("hello", asking(20))
        await generation.admitted()
        frontend.drain()
        with pytest.raises(DrainingError):
            await frontend.submit("hello", asking(20))
        assert text_of(await collect_after(generation)) == expected("hello", 20)

    async def collect_after(generation):
        async with generation:
            deltas = [await generation.next_delta()]
            while deltas[-1].end is None:
                deltas.append(await generation.next_delta())
        return deltas

    serve(story, on_drain=lambda: told.append(True))
    assert told == [True]


TEMPLATE = ChatTemplate(
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if tools %}[{{ tools | length }}]{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_text_becomes_tokens_and_tokens_text(serve):
    async def story(frontend):
        assert await frontend.tokenize("hé") == list("hé".encode())
        assert await frontend.tokenize("hé", add_special_tokens=False) == list("hé".encode())
        long = "x" * 5000
        assert len(await frontend.tokenize(long)) == 5000
        assert await frontend.detokenize([*list(b"abc"), 257]) == "abc"
        assert len(await frontend.detokenize([120] * 1000)) == 1000
        assert (frontend.token_bytes(0xC3), frontend.token_bytes(257)) == (b"\xc3", b"")
        for ids, said in (([259], "0 to 258, got 259"), ([0] * 2049, "2048"), (["a"], "integers")):
            with pytest.raises(ValidationError, match=said):
                await frontend.detokenize(ids)
        with pytest.raises(ValidationError, match="at most"):
            await frontend.tokenize("x" * (2048 * 64 + 1))

    serve(story)


def test_a_conversation_becomes_a_prompt(serve):
    messages = [{"role": "user", "content": "hi"}]
    tool = {"type": "function", "function": {"name": "f"}}

    async def story(frontend):
        chat = await frontend.apply_chat_template(messages, [tool])
        assert chat == ("<user>hi[1]<assistant>", list(b"<user>hi[1]<assistant>"), None, ())
        bare = await frontend.apply_chat_template(messages, add_generation_prompt=False)
        assert bare.text == "<user>hi"
        for wrong, said in (
            ([], "must not be empty"),
            ([{"role": "user", "content": "x" * 200_000}], "at most 131072 are taken"),
            ([{"role": "user", "content": {1, 2}}], "must be JSON"),
        ):
            with pytest.raises(ValidationError, match=said):
                await frontend.apply_chat_template(wrong)

    serve(story, chat_template=TEMPLATE)


def test_a_template_that_refuses_and_a_model_without_one_are_the_callers_matter(serve):
    async def refuses(frontend):
        with pytest.raises(TokenizationError, match="no system"):
            await frontend.apply_chat_template([{"role": "system", "content": "x"}])

    async def ignores_tools(frontend):
        tool = {"type": "function", "function": {"name": "f"}}
        with pytest.raises(ValidationError, match="no place for tools") as caught:
            await frontend.apply_chat_template([{"role": "user", "content": "x"}], [tool])
        assert caught.value.field == "tools"

    async def ignores_tool_calls(frontend):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
        asked = {"role": "user", "content": "x"}
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        with pytest.raises(ValidationError, match="no place for tool calls") as caught:
            await frontend.apply_chat_template([asked, called, asked])
        assert caught.value.field == "messages"
        await frontend.apply_chat_template([asked, {**called, "tool_calls": []}, asked])

    async def wants_tool_calls(frontend):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        assert (await frontend.apply_chat_template([called])).text == "f"

    async def has_none(frontend):
        with pytest.raises(ValidationError, match="no chat template"):
            await frontend.apply_chat_template([{"role": "user", "content": "x"}])

    async def has_a_broken_one(frontend):
        assert not frontend.has_chat_template
        with pytest.raises(ValidationError, match=r"^it is invalid: line 3$") as caught:
            await frontend.apply_chat_template([{"role": "user", "content": "x"}])
        assert caught.value.field == "messages"

    serve(refuses, chat_template=ChatTemplate("{{ raise_exception('no system') }}"))
    serve(ignores_tools, chat_template=ChatTemplate("{{ messages[0].content }}"))
    plain = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    serve(ignores_tool_calls, chat_template=ChatTemplate(plain))
    strict = "{{ messages[0].tool_calls[0].function.name }}"
    serve(wants_tool_calls, chat_template=ChatTemplate(strict))
    serve(has_none)
    serve(has_a_broken_one, why_no_chat="it is invalid: line 3")
