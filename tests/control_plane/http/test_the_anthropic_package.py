"""Anthropic's own client, retries off, against a real port; behind it the scripted engine."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from control_plane.access.keyring import Keyring
from control_plane.access.limits import Limits
from control_plane.access.token_file import add_token
from control_plane.errors import ComputeUnavailableError, QueueFullError
from tests.control_plane.http.conftest import MODEL
from tests.control_plane.http.own_server import Server
from tests.control_plane.text.known_templates import QWEN

HI = {"role": "user", "content": "Hi"}
SKY = {"name": "sky", "description": "What it is like.", "input_schema": {"type": "object"}}
CALLS = (
    "<think>\nRain?\n</think>\n\nHm.\n"
    '<tool_call>\n{"name": "sky", "arguments": {"at": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "sky", "arguments": {"at": "Ulm"}}\n</tool_call>'
)
ASKED = {"model": MODEL, "max_tokens": 250, "messages": [HI]}


class City(BaseModel):
    name: str
    people: int


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    file = tmp_path_factory.mktemp("tokens") / "t.json"
    token = add_token(file, "alice", Limits(), admin=False, shares_cache=False)
    server = Server(template=QWEN, keyring=Keyring(file), max_model_len=2000)
    yield server, token
    server.close()


@pytest.fixture
def server(running):
    yield running[0]
    engine = running[0].engine
    engine.hold = engine.error = engine.refusal = engine.says = None


@pytest.fixture(scope="module")
def client(running, anthropic):
    server, token = running
    url = f"http://{server.address}"
    with anthropic.Anthropic(base_url=url, api_key=token, max_retries=0) as client:
        yield client


def test_a_message_whole_and_streamed_is_the_same(server, client):
    server.engine.says = ["It rains."]
    whole = client.messages.create(**ASKED, system="Be brief.", stop_sequences=["!"])
    assert (whole.content[0].text, whole.stop_reason) == ("It rains.", "end_turn")
    with client.messages.stream(**ASKED, system="Be brief.", stop_sequences=["!"]) as stream:
        assert "".join(stream.text_stream) == "It rains."
        streamed = stream.get_final_message()
    assert streamed.usage == whole.usage
    assert (streamed.stop_reason, streamed.role) == ("end_turn", "assistant")
    counted = client.messages.count_tokens(model=MODEL, messages=[HI], system="Be brief.")
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


def test_models_are_listed_and_described(client, anthropic):
    [model] = client.models.list(limit=1)
    assert (model.id, model.type, model.display_name) == (MODEL, "model", MODEL)
    assert model.created_at.timestamp() == model.model_extra["created"]
    assert client.models.retrieve(MODEL) == model
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("another")


def test_tools_are_called_and_answered_as_anthropic_does_it(server, client):
    server.engine.says = [CALLS]
    asked = {**ASKED, "tools": [SKY], "extra_body": {"seed": 1}}
    whole = client.messages.create(**asked)
    thought, said, *calls = whole.content
    assert (thought.thinking, said.text, whole.stop_reason) == ("Rain?", "Hm.", "tool_use")
    assert [call.input for call in calls] == [{"at": "Köln"}, {"at": "Ulm"}]
    # The package puts the deltas together itself.
    with client.messages.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_message()
    assert {"text", "thinking", "input_json", "signature"} <= kinds
    told = [block.model_dump(exclude={"signature", "parsed_output"}) for block in streamed.content]
    assert told == [block.model_dump(exclude={"signature"}) for block in whole.content]
    server.engine.says = ["It rains."]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"} for call in calls]
    prompts = set()
    for content in (whole.content, [block.model_dump() for block in streamed.content]):
        answer = {"role": "assistant", "content": content}
        conversation = [HI, answer, {"role": "user", "content": results}]
        again = client.messages.create(**{**asked, "messages": conversation})
        assert again.content[0].text == "It rains."
        prompts.add(bytes(server.engine.submitted[-1].input_tokens).decode())
    (prompt,) = prompts
    assert prompt.count("<tool_call>\n{") == prompt.count("<tool_response>\nrain") == 2
    assert "<think>\nRain?\n</think>" in prompt


def test_the_packages_own_runner_calls_functions(server, client, anthropic):
    asked_for = []

    @anthropic.beta_tool
    def sky(at: str) -> str:
        """Say what the sky is like.

        Args:
            at: the town
        """
        asked_for.append(at)
        server.engine.says = ["It rains."]
        return "rain"

    server.engine.says = [CALLS]
    last = client.beta.messages.tool_runner(**ASKED, tools=[sky]).until_done()
    assert (asked_for, last.content[0].text) == (["Köln", "Ulm"], "It rains.")


def test_answers_are_parsed_into_a_model_of_pydantic(server, client):
    server.engine.says = ['{"name": "Köln", "people": 1087353}']
    parsed = client.messages.parse(**ASKED, output_format=City)
    assert parsed.parsed_output == City(name="Köln", people=1087353)
    structure = server.engine.submitted[-1].params.structured_outputs
    assert structure.kind == "json"


def test_what_the_package_gets_has_the_types_that_it_declares(server, client):
    server.engine.says = [CALLS]
    answer = client.messages.create(**ASKED, tools=[SKY])
    assert [type(block).__name__ for block in answer.content] == [
        "ThinkingBlock", "TextBlock", "ToolUseBlock", "ToolUseBlock",
    ]  # fmt: skip
    type(answer).model_validate(answer.model_dump(by_alias=True), strict=True)
    for event in client.messages.create(**ASKED, tools=[SKY], stream=True):
        type(event).model_validate(event.model_dump(by_alias=True), strict=True)
        assert type(event).__name__ != "BaseModel"


def test_refusals_are_the_clients_own_errors(running, server, client, anthropic):
    with pytest.raises(anthropic.BadRequestError, match="stop_sequences") as caught:
        client.messages.create(**ASKED, stop_sequences=[""])
    error = caught.value
    assert (error.type, error.request_id) == ("invalid_request_error", error.body["request_id"])
    with pytest.raises(anthropic.NotFoundError, match="'other'"):
        client.messages.create(**{**ASKED, "model": "other"})
    server.engine.refusal = QueueFullError("4 requests wait already")
    with pytest.raises(anthropic.RateLimitError) as caught:
        client.messages.create(**ASKED)
    assert caught.value.response.headers["retry-after"] == "1"
    url = f"http://{running[0].address}"
    with (
        anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0) as other,
        pytest.raises(anthropic.AuthenticationError),
    ):
        other.messages.create(**ASKED)
    with anthropic.Anthropic(base_url=url, auth_token=running[1], max_retries=0) as other:
        assert other.messages.count_tokens(model=MODEL, messages=[HI]).input_tokens > 0


def test_a_failure_in_mid_stream_is_raised_behind_the_text_before_it(server, client, anthropic):
    server.engine.says = ["It rains."]
    server.engine.hold, server.engine.error = 3, ComputeUnavailableError("it is away")
    texts = []
    with (
        pytest.raises(anthropic.APIStatusError, match="it is away") as caught,
        client.messages.stream(**ASKED) as stream,
    ):
        texts.extend(stream.text_stream)
    assert caught.value.type == "overloaded_error"
    assert "".join(texts) == "It "
