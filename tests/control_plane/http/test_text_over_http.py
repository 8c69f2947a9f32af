"""The tokenizer's three routes and `/v1/models`: what the model would see, and back."""

from __future__ import annotations

from control_plane.http.model_schema import Model, ModelList
from control_plane.http.text_schema import DetokenizeResponse, TokenizeResponse, TokenizerInfo
from tests.control_plane.http.conftest import checked


def test_a_text_becomes_tokens_and_tokens_text(on_loop):
    async def test(served):
        response = await served.post("/tokenize", {"model": "tiny/bytes", "prompt": "hé"})
        answer = checked(response, TokenizeResponse)
        assert answer == {
            "count": 3, "max_model_len": 512, "tokens": list("hé".encode()), "token_strs": None
        }  # fmt: skip
        body = {"prompt": "hé", "return_token_strs": True, "add_special_tokens": False}
        answer = checked(await served.post("/tokenize", body), TokenizeResponse)
        assert answer["token_strs"] == ["h", "bytes:\\xc3", "bytes:\\xa9"]
        body = {"tokens": [*answer["tokens"], 257]}
        answer = checked(await served.post("/detokenize", body), DetokenizeResponse)
        assert answer == {"prompt": "hé"}  # the end-of-sequence token has no text

    on_loop(test)


def test_no_text_has_no_tokens_and_back(on_loop):
    async def test(served):
        answer = checked(await served.post("/tokenize", {"prompt": ""}), TokenizeResponse)
        assert (answer["count"], answer["tokens"]) == (0, [])
        answer = checked(await served.post("/detokenize", {"tokens": []}), DetokenizeResponse)
        assert answer == {"prompt": ""}

    on_loop(test)


def test_a_conversation_has_the_tokens_that_a_chat_has(on_loop):
    tool = {"type": "function", "function": {"name": "f"}}
    messages = [{"role": "developer", "content": "x"}, {"role": "user", "content": "Hi"}]

    async def test(served):
        body = {"messages": messages, "tools": [tool]}
        answer = checked(await served.post("/tokenize", body), TokenizeResponse)
        await served.chat(messages=messages, tools=[tool], max_tokens=1)
        assert answer["tokens"] == served.engine.submitted[0].input_tokens
        body = {"messages": messages, "add_generation_prompt": False}
        answer = checked(await served.post("/tokenize", body), TokenizeResponse)
        assert bytes(answer["tokens"]) == b"<system>x</><user>Hi</>"
        # vLLM's clients say so; templates have their own special tokens.
        plain = checked(
            await served.post("/tokenize", {**body, "add_special_tokens": False}), TokenizeResponse
        )
        assert plain == answer
        error = await served.error("/tokenize", {**body, "add_special_tokens": True})
        assert error["param"] == "add_special_tokens"

    on_loop(test)


def test_the_loaded_model_is_listed_and_found_by_its_name(on_loop):
    async def test(served):
        listed = checked(await served.client.get("/v1/models"), ModelList)
        found = checked(await served.client.get("/v1/models/tiny/bytes"), Model)
        ends = {"has_more": False, "first_id": "tiny/bytes", "last_id": "tiny/bytes"}
        assert listed == {"object": "list", "data": [found], **ends}
        assert (found["id"], found["max_model_len"]) == ("tiny/bytes", 512)

    on_loop(test)


def test_special_tokens_are_named_for_clients_that_tokenize_here(on_loop):
    async def test(served):
        info = checked(await served.client.get("/tokenizer_info"), TokenizerInfo)
        tokenizer = served.frontend.tokenizer
        assert info == {
            "bos_token": f"token_id:{tokenizer.bos_token_id}",
            "eos_token": f"token_id:{tokenizer.eos_token_id}",
            "pad_token": f"token_id:{tokenizer.pad_token_id}",
        }

    on_loop(test)
