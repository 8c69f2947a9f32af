"""`model` names an adapter: in every method, on a control plane in this process."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from protos.hetero.inference.v1 import inference_pb2 as pb
from tests.control_plane.metrics.whole_plane import reason_of, whole_plane

NAMES = ("fake", "poet", "lawyer/v2")
PARAMS = pb.SamplingParams(max_tokens=9, seed=3)


@pytest.fixture
def play(fake_plane, tmp_path):
    """Runs a scene with the methods of a plane that has adapters."""
    fake_plane.adapters = NAMES[1:]

    def run(scene):
        async def main():
            async with whole_plane(fake_plane, tmp_path) as served:
                await scene(served.rpc)

        asyncio.run(main())

    return run


def test_answers_are_those_of_the_adapter_and_in_its_name(play, expected):
    async def scene(rpc):
        for adapter, name in enumerate(NAMES):
            whole = expected("hello", 9, 3, adapter=adapter)
            request = pb.GenerateRequest(model=name, text="hello", sampling=PARAMS)
            answer = await rpc.Generate(request)
            assert (answer.model, answer.text) == (name, whole)
            events = [event async for event in rpc.GenerateStream(request)]
            assert events[0].started.model == name
            assert "".join(event.delta.text for event in events) == whole
            resumed = pb.ResumeRequest(generate=request, received_token_ids=whole[:4].encode())
            events = [event async for event in rpc.Resume(resumed)]
            assert "".join(event.delta.text for event in events) == whole[4:]
        unnamed = pb.GenerateRequest(text="hello", sampling=PARAMS)
        assert (await rpc.Generate(unnamed)).text == expected("hello", 9, 3)

    play(scene)


def test_lists_of_requests_say_what_computes_each(play):
    async def scene(rpc):
        for name in NAMES:
            await rpc.Generate(pb.GenerateRequest(model=name, text="hello", sampling=PARAMS))
        listed = await rpc.ListRequests(pb.ListRequestsRequest(include_ended=True))
        assert sorted(info.model for info in listed.requests) == sorted(NAMES)

    play(scene)


def test_embeddings_are_those_of_the_adapter(play, fake_plane):
    fake_plane.features = (*fake_plane.features, "embeddings")

    async def scene(rpc):
        found = []
        for name in NAMES:
            request = pb.EmbedRequest(model=name)
            request.inputs.add(text="hi")
            answer = await rpc.Embed(request)
            assert answer.model == name
            found.append(tuple(answer.embeddings[0].values))
        assert len(set(found)) == 3

    play(scene)


def test_adapters_are_listed_behind_their_model_and_described(play):
    async def scene(rpc):
        listed = (await rpc.ListModels(pb.ListModelsRequest())).models
        assert [(one.model, one.base_model, one.adapter_rank) for one in listed] == [
            ("fake", "", 0), ("poet", "fake", 8), ("lawyer/v2", "fake", 8),
        ]  # fmt: skip
        assert listed[1].num_parameters == 80
        for one in listed:
            assert await rpc.GetModelInfo(pb.GetModelInfoRequest(model=one.model)) == one
        tokens = await rpc.Tokenize(pb.TokenizeRequest(model="poet", text="hi"))
        assert list(tokens.token_ids) == list(b"hi")

    play(scene)


def test_another_name_is_not_found_and_told_which_there_are(play):
    async def scene(rpc):
        for call in (
            rpc.Generate(pb.GenerateRequest(model="x", text="hello")),
            rpc.GetModelInfo(pb.GetModelInfoRequest(model="x")),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            assert reason_of(caught.value) == "MODEL_NOT_FOUND"
            assert caught.value.details().endswith("with the adapters poet, lawyer/v2")

    play(scene)
