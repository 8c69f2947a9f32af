from __future__ import annotations

PATH = "/v1/responses"

KINDS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]


def test_a_response_has_one_message_of_text(on_loop):
    async def test(served):
        answer = await served.respond("Hi", max_output_tokens=4, metadata={"a": "b"}, user="me")
        assert answer["id"].startswith("resp_")
        assert answer["status"] == "incomplete"
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
        assert (answer["metadata"], answer["user"], answer["store"]) == ({"a": "b"}, "me", False)
        (message,) = answer["output"]
        assert message["content"] == [
            {"type": "output_text", "text": ">tna", "annotations": [], "logprobs": []}
        ]
        assert answer["usage"]["input_tokens"] == len("<user>Hi</><assistant>")
        assert answer["usage"]["output_tokens"] == 4
        whole = await served.respond("Hi")
        assert (whole["status"], whole["incomplete_details"]) == ("completed", None)

    on_loop(test)


def test_instructions_and_earlier_output_are_part_of_the_conversation(on_loop):
    async def test(served):
        earlier = (await served.respond("Hi", max_output_tokens=1))["output"]
        await served.respond(
            [
                {"role": "user", "content": "Hi"},
                *earlier,
                {"type": "message", "role": "developer", "content": "Be kind."},
                {"role": "user", "content": [{"type": "input_text", "text": "And?"}]},
            ],
            instructions="Be brief.",
            max_output_tokens=1,
        )
        assert bytes(served.engine.submitted[-1].input_tokens).decode() == (
            "<system>Be brief.</><user>Hi</><assistant>></><system>Be kind.</><user>And?</>"
            "<assistant>"
        )

    on_loop(test)


def test_a_streamed_response_is_told_in_typed_and_numbered_events(on_loop):
    async def test(served):
        whole = await served.respond("Hi", include=["message.output_text.logprobs"])
        events = await served.events(
            PATH, {"input": "Hi", "include": ["message.output_text.logprobs"]}
        )
        assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
        assert all(name == data["type"] for name, data in events)
        kinds = [name for name, _ in events]
        assert list(dict.fromkeys(kinds)) == [*KINDS, "response.completed"]
        deltas = [data for name, data in events if name == "response.output_text.delta"]
        final = events[-1][1]["response"]
        part = final["output"][0]["content"][0]
        assert "".join(delta["delta"] for delta in deltas) == part["text"]
        assert [entry for delta in deltas for entry in delta["logprobs"]] == part["logprobs"]
        assert part == whole["output"][0]["content"][0]
        assert final["usage"] == whole["usage"]
        assert events[0][1]["response"]["status"] == "in_progress"

    on_loop(test)


def test_a_response_that_was_cut_off_ends_as_incomplete(on_loop):
    async def test(served):
        events = await served.events(PATH, {"input": "Hi", "max_output_tokens": 3})
        assert events[-1][0] == "response.incomplete"
        assert events[-2][1]["item"]["status"] == "incomplete"

    on_loop(test)
