"""A front end in this process: event loop, engine thread and fake compute plane."""

from __future__ import annotations

import contextlib
import threading

from control_plane.config import SchedulingLimits
from control_plane.core.generation_params import GenerationParams
from control_plane.engine.bring_up import connect, make_loop
from control_plane.engine.compute_client import ComputeClient
from control_plane.engine.frontend import EngineFrontend, EngineParts
from control_plane.engine.gate import Gate
from control_plane.engine.loop import LoopOptions
from control_plane.engine.stream_hub import StreamHub
from control_plane.engine.thread import EngineThread
from tests.waiting import until


@contextlib.asynccontextmanager
async def running_frontend(event_loop, address, *, limits=None, **parts):
    """Yield a front end whose engine runs; nothing of it is left afterwards."""
    client = ComputeClient(address, controller="test")
    limits = limits or SchedulingLimits()
    connected = connect(client, limits, stop=threading.Event())
    hub, gate, faults = StreamHub(event_loop), Gate(), []
    options = LoopOptions(max_queued_requests=limits.max_queued_requests)
    loop = make_loop(client, connected, hub.publish, options=options)
    frontend = EngineFrontend(
        EngineParts(
            plane=connected.plane,
            tokenizer=connected.tokenizer,
            admission=connected.make_admission(),
            grammars=connected.make_grammars(),
            inbox=loop.inbox,
            hub=hub,
            gate=gate,
            metrics=lambda: loop.metrics,
            memory_stats=lambda: loop.memory_stats,
            max_queued_requests=limits.max_queued_requests,
            **{"text_end": connected.text_end, **parts},
        )
    )
    gate.set_linked(is_linked=True)
    thread = EngineThread(loop, on_fault=faults.append)
    thread.start()
    try:
        yield frontend
        assert len(hub) == 0
    finally:
        await event_loop.run_in_executor(None, thread.stop, 10.0)
        client.shut_down()
    assert faults == []


def asking(max_tokens=12, seed=0, **fields):
    return GenerationParams(max_tokens=max_tokens, seed=seed, **fields)


async def collect(generation):
    """Read to the end; the pieces."""
    async with generation:
        await generation.admitted()
        deltas = []
        while not deltas or deltas[-1].end is None:
            deltas.append(await generation.next_delta())
    return deltas


def text_of(deltas, sample=0):
    return "".join(delta.text for delta in deltas if delta.sample_index == sample)


async def until_free(frontend):
    """Wait until no request holds a block."""
    await until(lambda: frontend.memory_stats.used_blocks == 0)
