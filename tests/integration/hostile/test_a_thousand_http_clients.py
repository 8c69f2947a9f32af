"""A thousand HTTP clients at the same moment: each gets its text, or is told to come again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hetero_infer.config import EngineConfig
from planes.address import Address
from planes.descriptors import descriptor_limit, raise_descriptor_limit
from tests.faults.deployment import MIB, PATIENCE_S, Deployment, deployed
from tests.integration.hostile.raw_http import JSON, post

NUM_CLIENTS = 1000
NUM_PROMPTS = 16
NUM_TOKENS = 8
NUM_RUNNING = 64
ALLOWANCE_BYTES = 64 * MIB
FEW_DESCRIPTORS = 512
"""What a shell may give a process, or less: the server must ask for more."""

CONFIG = EngineConfig(
    executor="simulated",
    block_size=4,
    max_batch_size=256,
    max_num_seqs=NUM_RUNNING,
    compute_grace=PATIENCE_S,
)
HTTP = ("--http", "--http-port=0")


@contextlib.contextmanager
def descriptors(number: int) -> Iterator[None]:
    """Give children so many to begin with, and this process all that it may have."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(number, before[1]), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def http_of(deployment: Deployment) -> Address:
    assert deployment.control is not None
    assert deployment.control.http_address is not None
    return deployment.control.http_address


def body(model: str, number: int, *, stream: bool) -> bytes:
    fields = {
        "model": model, "prompt": f"prompt {number} " * 3, "max_tokens": NUM_TOKENS,
        "seed": number, "ignore_eos": True, "stream": stream,
    }  # fmt: skip
    return json.dumps(fields).encode()


def text_of(answer: bytes) -> str:
    """The text of a whole answer, or of a stream, which must have its end."""
    if not answer.startswith(b"data: "):
        return json.loads(answer)["choices"][0]["text"]
    *events, done, rest = answer.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert [chunk["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["finish_reason"] == "length"
    return "".join(chunk["text"] for chunk in chunks)


class Client:
    """One of them. HTTP/1.0: the answer ends with the connection."""

    def __init__(self, address: Address, data: bytes) -> None:
        self.address, self.data = address, data
        self.end = 0
        self.retry_after = ""
        self.text: str | None = None

    async def open(self) -> None:
        self.reader, self.writer = await asyncio.open_connection(
            self.address.host, self.address.port
        )
        self.writer.write(post("/v1/completions", self.data, JSON, version="1.0"))
        await self.writer.drain()

    async def read(self) -> None:
        answer = await self.reader.read()
        self.writer.close()
        await self.writer.wait_closed()
        head, _, data = answer.partition(b"\r\n\r\n")
        self.end = int(head.split()[1])
        for line in head.decode().split("\r\n"):
            if line.lower().startswith("retry-after: "):
                self.retry_after = line.split(": ")[1]
        if self.end == 200:
            self.text = text_of(data)


async def storm(deployment: Deployment, clients: list[Client], *, num_taken: int) -> None:
    """Let all come while the plane stands still, until so many are taken and the rest refused."""
    (plane,) = deployment.compute
    async with asyncio.timeout(PATIENCE_S):
        plane.stop()
        try:
            await asyncio.gather(*(client.open() for client in clients))
            reading = [asyncio.create_task(client.read()) for client in clients]
            while sum(task.done() for task in reading) < len(clients) - num_taken:
                await asyncio.wait([task for task in reading if not task.done()],
                                   return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
        finally:
            plane.wake()
        await asyncio.gather(*reading)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("num_clients", "max_queued"),
    [
        pytest.param(NUM_CLIENTS // 4, 75, id="250-short-queue"),
        pytest.param(NUM_CLIENTS, 300, id="1000-short-queue", marks=pytest.mark.slow),
        pytest.param(NUM_CLIENTS, 4096, id="1000-long-queue", marks=pytest.mark.slow),
        pytest.param(4 * NUM_CLIENTS, 1000, id="4000-short-queue", marks=pytest.mark.slow),
    ],
)
def test_each_of_a_thousand_clients_gets_its_text_or_is_told_to_come_again(num_clients, max_queued):
    if descriptor_limit() < 2 * num_clients:
        raise_descriptor_limit()
    if descriptor_limit() < 2 * num_clients:
        pytest.skip(f"this process may have {descriptor_limit()} files open only")
    config = replace(CONFIG, max_queued_requests=max_queued)
    with contextlib.ExitStack() as stack:
        with descriptors(FEW_DESCRIPTORS):
            deployment = stack.enter_context(deployed(config, *HTTP))
        stack.enter_context(deployment.explained())
        address = http_of(deployment)

        def clients(count: int) -> list[Client]:
            return [
                Client(address, body("simulated", i % NUM_PROMPTS, stream=i // NUM_PROMPTS % 2 > 0))
                for i in range(count)
            ]

        async def in_turn() -> list[str | None]:
            first = clients(2 * NUM_PROMPTS)
            for client in first:
                await client.open()
                await client.read()
            return [client.text for client in first]

        expected = asyncio.run(in_turn())
        assert expected[:NUM_PROMPTS] == expected[NUM_PROMPTS:]
        assert None not in expected
        num_taken = min(num_clients, max_queued + NUM_RUNNING)
        asyncio.run(storm(deployment, clients(num_clients), num_taken=num_taken))
        usage = deployment.usage()  # allocators keep what a storm needs
        came = clients(num_clients)
        asyncio.run(storm(deployment, came, num_taken=num_taken))
        ends = Counter(client.end for client in came)
        assert ends.keys() <= {200, 429}
        assert ends[200] >= min(num_clients, max_queued)
        assert (ends[429] > 0) == (num_clients > max_queued + NUM_RUNNING)
        for index, client in enumerate(came):
            if client.end == 200:
                assert client.text == expected[index % NUM_PROMPTS]
            else:
                assert int(client.retry_after) >= 1
        # Whole answers and streams alike.
        assert ends[200] > Counter(c.end for c in came if b'"stream": true' in c.data)[200] > 0
        deployment.check_at_rest(usage, ALLOWANCE_BYTES)
        again = asyncio.run(in_turn())
        assert again == expected


@pytest.mark.slow
@pytest.mark.model
def test_a_thousand_clients_of_a_real_model_are_all_answered(ports):
    async def run() -> list[Client]:
        clients = []
        for index in range(NUM_CLIENTS):
            fields = {"max_tokens": 4, "stream": index % 2 > 0, "prompt": f"{index % 7} and"}
            data = json.dumps(ports.completion(**fields)).encode()
            clients.append(Client(ports.http, data))
        await asyncio.gather(*(client.open() for client in clients))
        await asyncio.gather(*(client.read() for client in clients))
        return clients

    clients = asyncio.run(run())
    assert Counter(client.end for client in clients) == {200: NUM_CLIENTS}
    texts = {(client.data[client.data.index(b"prompt"):].split(b",")[0], client.text)
             for client in clients}  # fmt: skip
    assert len(texts) == 7
    ports.check_at_rest()
