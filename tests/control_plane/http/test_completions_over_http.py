from __future__ import annotations

import pytest

from control_plane.core.batch import TokenLogprobs
from control_plane.http.logprobs import completion_logprobs
from control_plane.http.spelling import SpelledToken

MODEL = "tiny/bytes"
PATH = "/v1/completions"
ANSWER = "iH#{} é漢😀."
"""Of the scripted engine (`conftest`) to the prompt `Hi`, by sample."""


def joined(events) -> dict[int, dict]:
    """The choices of a stream put together again, each with its one finish reason."""
    choices: dict[int, dict] = {}
    for _, data in events:
        for piece in data["choices"] if data != "[DONE]" else ():
            choice = choices.setdefault(
                piece["index"], {"text": "", "logprobs": None, "finish_reason": None}
            )
            assert choice["finish_reason"] is None, "something comes after the finish reason"
            choice["text"] += piece["text"]
            choice["finish_reason"] = piece["finish_reason"]
            for name, column in (piece["logprobs"] or {}).items():
                choice["logprobs"] = choice["logprobs"] or {}
                choice["logprobs"].setdefault(name, []).extend(column)
    assert all(choice["finish_reason"] for choice in choices.values())
    return choices


def test_a_completion_has_text_reason_usage_and_fingerprint(on_loop):
    async def test(served):
        answer = await served.complete("Hi", max_tokens=100)
        assert answer["id"].startswith("cmpl-")
        assert answer["object"] == "text_completion"
        assert answer["model"] == MODEL
        assert answer["system_fingerprint"] == "scripted/1"
        assert answer["choices"] == [
            {"index": 0, "text": ANSWER.format(0), "logprobs": None, "finish_reason": "stop"}
        ]
        assert answer["usage"] == {
            "prompt_tokens": 2,
            "completion_tokens": 15,
            "total_tokens": 17,
            "prompt_tokens_details": {"cached_tokens": 2},
        }

    on_loop(test)


def test_sixteen_tokens_are_generated_where_nothing_is_said(on_loop):
    async def test(served):
        answer = await served.complete("a longer prompt than that")
        assert answer["usage"]["completion_tokens"] == 16
        assert answer["choices"][0]["finish_reason"] == "length"

    on_loop(test)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3},
        {"echo": True},
        {"logprobs": 2},
        {"logprobs": 0, "echo": True, "n": 2},
        {"stop": ["漢"]},
        {"stop": "#", "include_stop_str_in_output": True, "logprobs": 1},
        {"prompt": ["Hi", "there"], "n": 2},
        {"max_tokens": 5},
        {"max_tokens": 0, "echo": True, "logprobs": 1},
    ],
)
def test_streamed_choices_equal_whole_ones(on_loop, fields):
    async def test(served):
        fields.setdefault("max_tokens", 30)
        whole = await served.complete(**fields)
        events = await served.events(PATH, {"prompt": "Hi", **fields})
        assert events[-1] == (None, "[DONE]")
        expected = {choice.pop("index"): choice for choice in whole["choices"]}
        assert joined(events) == expected

    on_loop(test)


def test_every_event_is_text_of_whole_characters(on_loop):
    async def test(served):
        events = await served.events(PATH, {"prompt": "Hi", "max_tokens": 30})
        pieces = [data["choices"][0]["text"] for _, data in events[:-1]]
        # A byte is a token; those that come while an event is sent are one event.
        assert "".join(pieces) == ANSWER.format(0)
        assert len(pieces) > len(ANSWER) // 2

    on_loop(test)


def test_usage_comes_last_and_only_if_it_is_asked_for(on_loop):
    async def test(served):
        body = {"prompt": "Hi", "max_tokens": 30}
        events = await served.events(PATH, {**body, "stream_options": {"include_usage": True}})
        assert all(data["usage"] is None for _, data in events[:-2])
        assert events[-2][1]["choices"] == []
        assert events[-2][1]["usage"]["total_tokens"] == 17
        events = await served.events(PATH, body)
        assert all("usage" not in data for _, data in events[:-1])

    on_loop(test)


def test_every_chunk_has_the_usage_so_far_if_that_is_asked_for(on_loop):
    async def test(served):
        body = {"prompt": "Hi", "max_tokens": 30, "n": 2}
        asked = {"continuous_usage_stats": True, "include_usage": True}
        events = await served.events(PATH, {**body, "stream_options": asked})
        chunks = [data for _, data in events[:-1]]
        assert chunks[-1]["choices"] == []
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert (counts[0] > 0, counts[-1]) == (True, 30)
        assert len(set(counts)) > 2
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {2}
        alone = await served.events(
            PATH, {**body, "stream_options": {"continuous_usage_stats": True}}
        )
        assert alone[-2][1]["choices"]  # no chunk that has the usage only
        assert alone[-2][1]["usage"]["completion_tokens"] == 30

    on_loop(test)


def test_lists_of_prompts_give_n_choices_each_in_order(on_loop):
    async def test(served):
        texts = [list(b"ab"), list(b"cd")]
        answer = await served.complete(texts, n=2, max_tokens=4, best_of=2)
        found = {choice["index"]: choice["text"] for choice in answer["choices"]}
        assert found == {0: "ba#0", 1: "ba#1", 2: "dc#0", 3: "dc#1"}
        assert answer["usage"]["prompt_tokens"] == 4
        assert answer["usage"]["completion_tokens"] == 16
        answer = await served.complete(list(b"xyz"), max_tokens=3)
        assert answer["choices"][0]["text"] == "zyx"
        answer = await served.complete(["one", "two"], max_tokens=3)
        assert [choice["text"] for choice in answer["choices"]] == ["eno", "owt"]

    on_loop(test)


def test_an_echo_with_logprobs_has_those_of_the_prompt_and_of_nothing_before_it(on_loop):
    async def test(served):
        answer = await served.complete("Héy", echo=True, logprobs=1, max_tokens=0)
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("Héy", "length")
        assert choice["logprobs"] == {
            "tokens": ["H", "bytes:\\xc3", "bytes:\\xa9", "y"],
            "token_logprobs": [None, -0.195, -0.169, -0.121],
            "top_logprobs": [
                None,
                {"z": -0.25, "bytes:\\xc3": -0.195},
                {"z": -0.25, "bytes:\\xa9": -0.169},
                {"z": -0.25, "y": -0.121},
            ],
            "text_offset": [0, 1, 1, 2],
        }
        assert answer["usage"]["completion_tokens"] == 0
        assert served.engine.submitted[0].params.max_tokens == 1  # the least an engine does
        answer = await served.complete(list(b"ab"), echo=True, max_tokens=2)
        assert answer["choices"][0]["text"] == "abba"

    on_loop(test)


def test_logprobs_count_offsets_in_the_text_of_the_choice(on_loop):
    async def test(served):
        answer = await served.complete("Hi", logprobs=0, max_tokens=7)
        logprobs = answer["choices"][0]["logprobs"]
        assert logprobs["tokens"] == [*"iH#0 ", "bytes:\\xc3", "bytes:\\xa9"]
        assert logprobs["text_offset"] == [0, 1, 2, 3, 4, 5, 5]
        assert logprobs["top_logprobs"][0] == {"i": -0.105}

    on_loop(test)


@pytest.mark.parametrize("echo", [False, True])
def test_the_token_that_ends_a_text_has_a_logprob_and_no_text(on_loop, echo):
    async def test(served):
        answer = await served.complete("Hi", logprobs=1, max_tokens=30, echo=echo)
        (choice,) = answer["choices"]
        text = "Hi" * echo + ANSWER.format(0)
        assert (choice["text"], choice["finish_reason"]) == (text, "stop")
        logprobs = choice["logprobs"]
        assert {name: column[-1] for name, column in logprobs.items()} == {
            "tokens": "token_id:257",
            "token_logprobs": -0.257,
            "top_logprobs": {"z": -0.25, "token_id:257": -0.257},
            "text_offset": len(text),
        }
        assert len(logprobs["tokens"]) == len(text.encode()) + 1
        assert answer["usage"]["completion_tokens"] == len(ANSWER.format(0).encode())
        answer = await served.complete("Hi", logprobs=1, max_tokens=30, stop="#")
        assert answer["choices"][0]["logprobs"]["tokens"] == ["i", "H"]

    on_loop(test)


def test_every_parameter_reaches_the_engine(on_loop):
    async def test(served):
        await served.complete(
            "Hi", max_tokens=7, temperature=0.5, top_p=0.7, seed=-1, stop=["x", "yz"],
            presence_penalty=0.1, frequency_penalty=0.2, repetition_penalty=1.1,
            logit_bias={"65": 3, "66": -1.5}, min_p=0.05, top_k=-1, ignore_eos=True,
            stop_token_ids=[7], include_stop_str_in_output=True, priority=-3, cache_salt="mine",
            min_tokens=5,
        )  # fmt: skip
        (request,) = served.engine.submitted
        params = request.params
        assert (params.max_tokens, params.temperature, params.top_p) == (7, 0.5, 0.7)
        assert (params.seed, params.stop, params.top_k) == (2**64 - 1, ("x", "yz"), 0)
        assert (params.presence_penalty, params.frequency_penalty) == (0.1, 0.2)
        assert (params.repetition_penalty, params.min_p, params.ignore_eos) == (1.1, 0.05, True)
        assert params.logit_bias == {65: 3, 66: -1.5}
        assert (params.stop_token_ids, params.include_stop) == ((7,), True)
        assert (request.priority, request.cache_salt, params.min_tokens) == (-3, "mine", 5)

    on_loop(test)


def test_defaults_are_those_of_openai_and_null_means_unset(on_loop):
    async def test(served):
        fields = (
            "temperature", "top_p", "n", "max_tokens", "stop", "seed", "logit_bias", "logprobs",
            "echo", "best_of", "stream", "stream_options", "user", "suffix", "top_k",
        )  # fmt: skip
        await served.complete("Hi", **dict.fromkeys(fields))
        (request,) = served.engine.submitted
        assert (request.params.temperature, request.params.top_p) == (1.0, 1.0)
        assert (request.params.max_tokens, request.params.n) == (16, 1)

    on_loop(test)


def test_what_a_completion_may_take_where_nothing_is_said_is_cut_to_what_is_left(on_loop):
    async def test(served):
        await served.complete([[65] * 500, [65] * 400])
        assert [one.params.max_tokens for one in served.engine.submitted] == [12, 16]
        body = {"model": MODEL, "prompt": [65] * 500, "max_tokens": 16}
        error = await served.error(PATH, body)
        assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")

    on_loop(test)


def test_harmless_fields_are_taken(on_loop):
    async def test(served):
        await served.complete(
            "Hi", user="me", metadata={"a": "b"}, store=False, service_tier="auto",
            parallel_tool_calls=True, logit_bias={}, stop=[],
        )  # fmt: skip

    on_loop(test)


def test_of_two_likely_tokens_of_one_name_the_likelier_one_is_told():
    class Namesakes:
        def spell(self, token_id):
            return SpelledToken("same" if token_id < 9 else "came", None)

    entry = TokenLogprobs(-3.0, (1, 2), (-0.5, -2.0))
    columns = completion_logprobs(Namesakes(), [9], [entry], [0])
    assert columns["top_logprobs"] == [{"same": -0.5, "came": -3.0}]


@pytest.mark.parametrize(
    ("wrong", "param", "said"),
    [
        ([259], "prompt[1]", "prompt[1]: token ids must be 0 to 258, got 259 at index 0"),
        (
            [7] * 512,
            "prompt[1]",
            "prompt[1]: the prompt has 512 tokens, max_model_len (512) leaves",
        ),
    ],
)
def test_of_several_prompts_the_wrong_one_is_named(on_loop, wrong, param, said):
    async def test(served):
        body = {"model": MODEL, "prompt": [[7], wrong, [8]], "max_tokens": 2}
        error = await served.error(PATH, body)
        assert error["param"] == param
        assert error["message"].startswith(said)
        error = await served.error(PATH, {**body, "prompt": [wrong]})
        assert error["param"] == "prompt"

    on_loop(test)


def test_what_is_wrong_for_all_prompts_is_no_prompts_fault(on_loop):
    async def test(served):
        body = {"model": MODEL, "prompt": ["a", "b"], "logit_bias": {"999": 1}}
        error = await served.error(PATH, body)
        assert error["param"] == "logit_bias"

    on_loop(test)
