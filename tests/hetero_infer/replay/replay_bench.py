"""An engine that records on one plane in this process, and a replay on another one."""

from __future__ import annotations

import dataclasses
import io
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from compute_plane.executor.interface import ExecutionBatch, ExecutionOutput
from control_plane.config import SchedulingLimits
from control_plane.core.generation_params import GenerationParams
from control_plane.core.request import Request
from control_plane.engine.bring_up import connect, make_loop
from control_plane.engine.compute_client import ComputeClient
from control_plane.engine.loop import LoopOptions
from control_plane.engine.recording import Recorder
from control_plane.engine.recording_file import encode_length
from hetero_infer.replay.recording_reader import RecordingReader
from hetero_infer.replay.replay_plane import ReplayPlane
from hetero_infer.replay.replayer import Replayer, ReplayReport
from protos.hetero.compute.v1 import compute_pb2, recording_pb2
from tests.compute_plane.rpc.plane_harness import Harness

Prompt = tuple[str, GenerationParams]

PROMPTS: Sequence[Prompt] = (
    ("a prompt that fills some blocks", GenerationParams(max_tokens=14, seed=1, ignore_eos=True)),
    (
        "a prompt that fills others, twice",
        GenerationParams(max_tokens=9, seed=2, n=2, temperature=1.0, ignore_eos=True),
    ),
    ("short", GenerationParams(max_tokens=11, seed=3, temperature=0.7, ignore_eos=True)),
    ("asks", GenerationParams(max_tokens=5, seed=4, num_logprobs=2, ignore_eos=True)),
)


class RecordedRun:
    """An engine loop on this thread over a link that is recorded."""

    def __init__(self, harness: Harness, path: Path | None) -> None:
        self.recorder = None if path is None else Recorder(str(path))
        self.client = ComputeClient(harness.address, controller="test", recorder=self.recorder)
        connected = connect(self.client, SchedulingLimits(), stop=threading.Event())
        assert connected is not None
        self.news: list = []
        self.loop = make_loop(
            self.client, connected, self.news.extend, options=LoopOptions(pipeline_depth=2)
        )
        self._num_requests = 0

    def ask(
        self, prompts: Sequence[Prompt] = PROMPTS, requests: Sequence[Request] | None = None
    ) -> list:
        """Run prompts, or requests, to their ends; everything that was published about them."""
        self.news.clear()
        if requests is None:
            requests = [
                Request(self._num_requests + number, list(text.encode()), params)
                for number, (text, params) in enumerate(prompts, start=1)
            ]
        self._num_requests += len(requests)
        for request in requests:
            self.loop.inbox.submit(request)
        for _ in range(500):
            self.loop.step()
            if not self.loop.has_pending_work:
                return list(self.news)
        raise AssertionError("the requests did not end in 500 turns")

    def close(self) -> None:
        self.loop.close()
        self.client.shut_down()
        if self.recorder is not None:
            self.recorder.close()


def record(harness: Harness, path: Path, prompts: Sequence[Prompt] = PROMPTS) -> list:
    run = RecordedRun(harness, path)
    try:
        return run.ask(prompts)
    finally:
        run.close()


def replay(harness: Harness, recording: Path | bytes, **options) -> ReplayReport:
    data = recording if isinstance(recording, bytes) else recording.read_bytes()
    plane = ReplayPlane(harness.address, takes_over=True)
    report = ReplayReport()
    try:
        Replayer(plane, report, **options).run(RecordingReader(io.BytesIO(data), "test"))
    finally:
        plane.close()
    return report


def read(path: Path) -> list:
    """What a recording holds: messages of compute.proto, headers as what the plane said."""
    messages: list = []
    for item in records(path.read_bytes()):
        kind = item.WhichOneof("kind")
        if kind == "header":
            messages.append(compute_pb2.DescribeResponse.FromString(item.header.plane))
        elif kind == "batch":
            messages.append(compute_pb2.ExecutionBatch.FromString(item.batch))
        else:
            messages.append(compute_pb2.ExecutionOutput.FromString(item.output))
    return messages


def write(messages: list) -> bytes:
    """The recording of such messages."""
    data = b""
    for message in messages:
        content = message.SerializeToString()
        match message:
            case compute_pb2.DescribeResponse():
                header = recording_pb2.RecordingHeader(format_version=1, plane=content)
                item = recording_pb2.Record(header=header)
            case compute_pb2.ExecutionBatch():
                item = recording_pb2.Record(batch=content)
            case _:
                item = recording_pb2.Record(output=content)
        whole = item.SerializeToString()
        data += encode_length(len(whole)) + whole
    return data


def records(data: bytes) -> list[recording_pb2.Record]:
    reader = RecordingReader(io.BytesIO(data), "test")
    return list(reader._records())


def tamper(
    harness: Harness, change: Callable[[int, ExecutionBatch, ExecutionOutput], ExecutionOutput]
) -> Callable[[], None]:
    """Let the plane's executor answer otherwise; `change` gets the number of the step, from 1."""
    executor = harness.executor
    original = type(executor).execute
    numbers = iter(range(1, 1 << 30))

    def execute(batch: ExecutionBatch) -> ExecutionOutput:
        return change(next(numbers), batch, original(executor, batch))

    executor.execute = execute  # type: ignore[method-assign]

    def undo() -> None:
        del executor.execute

    return undo


def with_tokens(output: ExecutionOutput, index: int, token: int) -> ExecutionOutput:
    tokens = output.next_tokens.copy()
    tokens[index] = token
    return dataclasses.replace(output, next_tokens=tokens)
