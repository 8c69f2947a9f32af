"""The control plane is killed in the middle of streams of either client, and started again."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from hetero_infer import AsyncClient, Client, EngineConfig, GenerationParams, ServerLostError
from hetero_infer.local_planes import (
    compute_socket,
    control_socket,
    private_directory,
    start_compute_plane,
    start_control_plane,
)
from hetero_infer.plane_process import wait_all_ready

CONFIG = EngineConfig(executor="simulated")
PARAMS = GenerationParams(max_tokens=300, seed=3, ignore_eos=True)
ASKED = [{"role": "user", "content": "hello"}]


class Planes:
    def __init__(self, directory, template, stack):
        self.compute, self.address = compute_socket(directory), control_socket(directory)
        self.flags = (f"--listen={self.address}", f"--chat-template={template}")
        compute = stack.enter_context(start_compute_plane(CONFIG, self.compute, lambda _: None))
        self.stack = stack
        self.start(compute)

    def start(self, *others):
        self.control = start_control_plane(
            CONFIG, self.compute, *self.flags, on_output=lambda _: None
        )
        self.stack.enter_context(self.control)
        wait_all_ready([*others, self.control])

    def kill(self):
        self.control.process.kill()
        self.control.process.wait()


@pytest.fixture(scope="module")
def planes(template):
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(private_directory())
        yield Planes(directory, template, stack)


@pytest.fixture(scope="module")
def undisturbed(planes):
    with Client(planes.address) as client, ThreadPoolExecutor() as pool:
        text = pool.submit(client.generate, "hello", PARAMS)
        chat = client.chat(ASKED, PARAMS)
        return text.result(), chat


@pytest.mark.wide
def test_streams_of_both_clients_go_on_as_if_nothing_had_happened(planes, undisturbed):
    text, chat = undisturbed
    with Client(planes.address) as client, asyncio.Runner() as runner:
        here = [
            client.stream("hello", PARAMS, resume=True),
            client.chat_stream(ASKED, PARAMS, resume=True),
        ]
        broken = client.stream("hello", PARAMS)
        for stream in (*here, broken):
            for _ in range(5):
                next(stream)
        there, other = runner.run(begin(planes.address))
        planes.kill()
        with pytest.raises(ServerLostError) as caught:
            broken.answer()
        assert caught.value.request_id
        planes.start()
        answers = [stream.answer() for stream in here] + runner.run(end(there, other))
        assert [answer.text for answer in answers] == [text.text, chat.text] * 2
        assert [answer.token_ids for answer in answers] == [text.token_ids, chat.token_ids] * 2
        # A program that was started anew goes on from what it wrote down.
        received = broken.received_token_ids
        assert 0 < len(received) < PARAMS.max_tokens
        rest = client.resume(broken.request, received).answer()
        assert received + rest.token_ids == text.token_ids
        assert broken.text + rest.text == text.text
        assert rest.started.received_tokens == len(received)


async def begin(address):
    client = AsyncClient(address)
    streams = [
        client.stream("hello", PARAMS, resume=True),
        client.chat_stream(ASKED, PARAMS, resume=True),
    ]
    for stream in streams:
        for _ in range(5):
            await anext(stream)
    return streams, client


async def end(streams, client):
    async with client:
        return await asyncio.gather(*(stream.answer() for stream in streams))
