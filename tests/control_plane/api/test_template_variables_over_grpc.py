"""Variables of the chat template over gRPC: the request's, over those of the server."""

from __future__ import annotations

import grpc
import pytest

from protos.hetero.inference.v1 import inference_pb2 as pb

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>{{ mood }}"
MESSAGES = [pb.ChatMessage(role="user", content="hi")]
SAMPLING = pb.SamplingParams(max_tokens=5, seed=3)


@pytest.fixture
def control_plane(launch, tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    process = launch(
        f"--chat-template={template}", '--chat-template-kwargs={"mood": "glad", "unread": 1}'
    )
    process.ready()
    # A default that the template does not read is no reason not to serve.
    process.wait_for_log("does not read what --chat-template-kwargs sets")
    return process


def test_a_template_is_told_what_the_request_says_over_the_servers_defaults(stub, field_of):
    def texts(told):
        asked = pb.ApplyChatTemplateRequest(messages=MESSAGES, chat_template_kwargs_json=told)
        prompt = stub.ApplyChatTemplate(asked).text
        chat = pb.ChatRequest(messages=MESSAGES, sampling=SAMPLING, chat_template_kwargs_json=told)
        streamed = "".join(event.delta.text for event in stub.ChatStream(chat))
        plain = stub.Generate(pb.GenerateRequest(text=prompt, sampling=SAMPLING)).text
        assert stub.Chat(chat).text == streamed == plain
        return prompt

    assert texts("") == texts("{}") == texts('{"mood": "glad"}') == "<user>hi<assistant>glad"
    assert texts('{"mood": 7}') == "<user>hi<assistant>7"
    for told, said in (
        ("[1]", "must be the JSON text of an object"),
        ("{", "must be JSON"),
        ('{"mood": NaN}', "NaN is not in JSON"),
        ('{"unread": 1}', "does not read 'unread'; it reads mood"),
        ('{"tools": []}', "must not set 'tools'"),
        ('{"mood": ' + "[" * 9999, "not nested so deeply"),
        ('{"mood": "' + "x" * 33_000 + '"}', "at most 32768 bytes"),
    ):
        for call, kind in (
            (stub.ApplyChatTemplate, pb.ApplyChatTemplateRequest),
            (stub.Chat, pb.ChatRequest),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call(kind(messages=MESSAGES, chat_template_kwargs_json=told))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert field_of(caught.value) == "chat_template_kwargs_json"
            assert said in caught.value.details()


def test_special_tokens_are_spelled_out_only_where_the_tokenizer_can(stub, field_of):
    ids = pb.TokenIds(ids=[*b"hi", 257])
    assert stub.Detokenize(pb.DetokenizeRequest(token_ids=ids)).text == "hi"
    asked = pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=True)
    assert stub.Detokenize(asked).text == "hi"
    asked.skip_special_tokens = False
    with pytest.raises(grpc.RpcError) as caught:
        stub.Detokenize(asked)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field_of(caught.value) == "skip_special_tokens"
