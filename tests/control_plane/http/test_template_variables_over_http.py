"""`chat_template_kwargs` over HTTP: what a template is told beside the conversation."""

from __future__ import annotations

import pytest

from control_plane.http.text_schema import DetokenizeResponse, TokenizeResponse
from tests.control_plane.http.conftest import MODEL, checked

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    "{{ (extra or {}) | tojson }}"
)
HI = [{"role": "user", "content": "Hi"}]
THINKING_OFF = {"enable_thinking": False}

PLACES = [
    ("/v1/chat/completions", {"messages": HI}),
    ("/v1/responses", {"input": "Hi"}),
    ("/tokenize", {"messages": HI}),
]


@pytest.mark.parametrize(
    ("variables", "prompt"),
    [
        (None, "<user>Hi<assistant>{}"),
        ({}, "<user>Hi<assistant>{}"),
        (THINKING_OFF, "<user>Hi<assistant><think></think>{}"),
        ({"enable_thinking": None}, "<user>Hi<assistant>{}"),
        (
            {"enable_thinking": False, "extra": {"é": [1, 0.5, None]}},
            '<user>Hi<assistant><think></think>{"é": [1, 0.5, null]}',
        ),
    ],
)
def test_the_template_is_told_what_the_request_says_wherever_there_is_one(
    on_loop, variables, prompt
):
    async def test(served):
        tokens = []
        for path, body in PLACES:
            asked = {"model": MODEL, **body, "chat_template_kwargs": variables}
            if path == "/tokenize":
                answer = checked(await served.post(path, asked), TokenizeResponse)
                tokens.append(answer["tokens"])
            else:
                assert (await served.post(path, asked)).status_code == 200
        tokens += [request.input_tokens for request in served.engine.submitted]
        assert [bytes(ids).decode() for ids in tokens] == [prompt] * 3

    on_loop(test, template=TEMPLATE)


@pytest.mark.parametrize(("path", "body"), PLACES)
@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"messages": []}, "must not set 'messages'"),
        ({"tools": []}, "must not set 'tools'"),
        ({"add_generation_prompt": False}, "must not set"),
        ({"bos_token": "<s>"}, "must not set"),
        ({"enable_thinkin": False}, "does not read 'enable_thinkin'; it reads enable_thinking"),
        ({"extra": [[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]}, "nested more than 16 deep"),
        ({"extra": "x" * 33_000}, "at most 32768 bytes"),
        ({str(number): 0 for number in range(65)}, "at most 64"),
        ([], "should be an object"),
        ("{}", "should be an object"),
    ],
)
def test_what_no_template_may_be_told_is_a_400_that_names_the_field(
    on_loop, path, body, variables, said
):
    async def test(served):
        asked = {"model": MODEL, **body, "chat_template_kwargs": variables}
        error = await served.error(path, asked)
        assert (error["param"], error["code"]) == ("chat_template_kwargs", "invalid_value")
        assert said in error["message"]

    on_loop(test, template=TEMPLATE)


EFFORTS = [("/v1/chat/completions", {"messages": HI}), ("/v1/responses", {"input": "Hi"})]
READS_EFFORT = "{{ messages[0].content }} {{ reasoning_effort }} {{ enable_thinking }}"
SWITCHED = "{{ messages[0].content }} {{ thinking }}"


def with_effort(path, effort):
    return {"reasoning": {"effort": effort}} if "resp" in path else {"reasoning_effort": effort}


@pytest.mark.parametrize(
    ("template", "effort", "variables", "prompt"),
    [
        (READS_EFFORT, "high", {}, "Hi high "),
        (READS_EFFORT, "none", {"reasoning_effort": "none"}, "Hi none "),
        (READS_EFFORT, None, {"reasoning_effort": "low"}, "Hi low "),
        (SWITCHED, "none", {}, "Hi False"),
        (SWITCHED, "minimal", {"thinking": True}, "Hi True"),
        (TEMPLATE, "none", {}, "<user>Hi<assistant><think></think>{}"),
        (TEMPLATE, "medium", {}, "<user>Hi<assistant>{}"),
    ],
)
def test_an_effort_is_told_to_the_template_in_the_variable_it_has_for_it(
    on_loop, template, effort, variables, prompt
):
    async def test(served):
        for path, body in EFFORTS:
            asked = {"model": MODEL, **body, **with_effort(path, effort)}
            answer = await served.post(path, {**asked, "chat_template_kwargs": variables})
            assert answer.status_code == 200
            if "resp" in path:
                assert answer.json()["reasoning"] == {"effort": effort, "summary": None}
        found = [bytes(request.input_tokens).decode() for request in served.engine.submitted]
        assert found == [prompt] * 2

    on_loop(test, template=template)


def test_an_effort_that_the_variables_contradict_is_refused(on_loop):
    async def test(served):
        for path, body in EFFORTS:
            asked = {"model": MODEL, **body, **with_effort(path, "low")}
            error = await served.error(path, {**asked, "chat_template_kwargs": THINKING_OFF})
            assert error["param"] in ("reasoning_effort", "reasoning.effort")
            assert "enable_thinking must be true" in error["message"]

    on_loop(test, template=TEMPLATE)


def test_a_text_has_no_template(on_loop):
    async def test(served):
        asked = {"prompt": "Hi", "chat_template_kwargs": THINKING_OFF}
        error = await served.error("/tokenize", asked)
        assert error["param"] == "chat_template_kwargs"
        error = await served.error("/v1/completions", {"model": MODEL, **asked})
        assert error["code"] == "unknown_parameter"

    on_loop(test)


def test_special_tokens_are_left_out_unless_they_are_asked_for(on_loop):
    class Naming:
        """Spells special tokens, as tokenizers with a vocabulary do."""

        def __init__(self, tokenizer):
            self._tokenizer = tokenizer

        def __getattr__(self, name):
            return getattr(self._tokenizer, name)

        def decode_with_special(self, tokens):
            return "".join(chr(token) if token < 256 else f"<|{token}|>" for token in tokens)

    async def test(served):
        tokens = {"tokens": [256, *b"Hi", 257]}
        refused = {**tokens, "skip_special_tokens": False}
        error = await served.error("/detokenize", refused)
        assert error["param"] == "skip_special_tokens"
        assert "has no decode_with_special" in error["message"]
        served.frontend._text._tokenizer = Naming(served.frontend.tokenizer)
        for fields, text in (
            ({}, "Hi"),
            ({"skip_special_tokens": None}, "Hi"),
            ({"skip_special_tokens": True}, "Hi"),
            ({"skip_special_tokens": False}, "<|256|>Hi<|257|>"),
        ):
            answer = await served.post("/detokenize", {**tokens, **fields})
            assert checked(answer, DetokenizeResponse) == {"prompt": text}

    on_loop(test)
