"""A compute plane in this process, spoken to through a real gRPC server on a unix socket."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from compute_plane.app import ComputePlane
from compute_plane.config import ComputePlaneConfig
from compute_plane.executor.interface import ExecutionBatch, ExecutionOutput
from compute_plane.executor.registry import BuiltExecutor, ExecutorContext
from compute_plane.executor.simulated import SimulatedExecutor
from planes.transport import plane_channel_options
from protos.hetero.compute.v1 import compute_pb2, compute_pb2_grpc

SERVICE = "hetero.compute.v1.ComputeService"
BLOCK_SIZE = 4
NUM_BLOCKS = 96
TIMEOUT_S = 20.0
"""Ends a test that hangs; nothing is expected to take long."""


class WatchedExecutor(SimulatedExecutor):
    """The simulated executor, which tests may hold at the door of a step or let fail.

    `entered` is released as a step begins; a closed `gate` keeps it from going on.
    """

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks=num_blocks, block_size=block_size)
        self.entered = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self.failed_rows: dict[int, str] = {}
        self.batches: list[ExecutionBatch] = []

    def execute(self, batch: ExecutionBatch) -> ExecutionOutput:
        self.batches.append(batch)
        self.entered.release()
        assert self.gate.wait(TIMEOUT_S)
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        output = super().execute(batch)
        failed_rows, self.failed_rows = self.failed_rows, {}
        return dataclasses.replace(output, failed_rows=failed_rows)


class Harness:
    """A plane, its executor and a channel to it."""

    def __init__(
        self, directory: Path, *, block_size: int = BLOCK_SIZE, **settings: object
    ) -> None:
        self.faults = threading.Event()
        self.config = ComputePlaneConfig(
            listen=f"unix:{directory}/compute.sock",
            executor="simulated",
            block_size=block_size,
            max_num_blocks=NUM_BLOCKS,
            max_slots=8,
            max_rows=6,
            max_tokens_per_batch=40,
            **settings,  # type: ignore[arg-type]
        )
        self.plane = ComputePlane(self.config, on_fault=self.faults.set, build=self._build)
        self.address = self.plane.start()
        self.channel = grpc.insecure_channel(self.address.target, plane_channel_options())
        self.stub = compute_pb2_grpc.ComputeServiceStub(self.channel)

    def _build(self, name: str, context: ExecutorContext) -> BuiltExecutor:
        self.executor = WatchedExecutor(
            num_blocks=context.num_blocks, block_size=context.block_size
        )
        return BuiltExecutor(name, self.executor, "simulated/test")

    def close(self) -> None:
        self.executor.gate.set()
        self.channel.close()
        self.plane.stop()

    def describe(self) -> compute_pb2.DescribeResponse:
        return self.stub.Describe(compute_pb2.DescribeRequest(), timeout=TIMEOUT_S)

    def open(self, controller: str = "test", *, take_over: bool = True) -> Controller:
        request = compute_pb2.OpenRequest(
            protocol_version=1, controller=controller, take_over=take_over
        )
        return Controller(self, self.stub.Open(request, timeout=TIMEOUT_S))


class Controller:
    """One session: counts steps and remembers what it was told to expect."""

    def __init__(self, harness: Harness, opened: compute_pb2.OpenResponse) -> None:
        self.harness = harness
        self.session = opened.session
        self.epoch = opened.epoch
        self.last_step = opened.last_step

    def batch(self, **parts: object) -> compute_pb2.ExecutionBatch:
        """The next batch of the session; `parts` may also overwrite session, epoch and step."""
        self.last_step += 1
        header = {"session": self.session, "epoch": self.epoch, "step_id": self.last_step}
        return compute_pb2.ExecutionBatch(**{**header, **parts})  # type: ignore[arg-type]

    def execute_one(self, batch: compute_pb2.ExecutionBatch) -> compute_pb2.ExecutionOutput:
        return self.harness.stub.ExecuteOne(batch, timeout=TIMEOUT_S)

    def run(self, **parts: object) -> list[int]:
        """Execute the next batch; its tokens."""
        output = self.execute_one(self.batch(**parts))
        assert not output.row_failures
        return list(output.sampled_token_ids)

    @contextlib.contextmanager
    def stream(self) -> Iterator[Stream]:
        stream = Stream(self.harness.stub)
        try:
            yield stream
        finally:
            stream.cancel()


class Stream:
    """An Execute stream under the test's hand."""

    def __init__(self, stub: compute_pb2_grpc.ComputeServiceStub) -> None:
        self._requests: queue.SimpleQueue[compute_pb2.ExecutionBatch | None] = queue.SimpleQueue()
        self.call = stub.Execute(iter(self._requests.get, None), timeout=TIMEOUT_S)

    def send(self, batch: compute_pb2.ExecutionBatch) -> None:
        self._requests.put(batch)

    def receive(self) -> compute_pb2.ExecutionOutput:
        return next(self.call)

    def half_close(self) -> None:
        self._requests.put(None)

    def cancel(self) -> None:
        self._requests.put(None)
        self.call.cancel()

    def ending(self) -> grpc.RpcError:
        """How the plane ended the stream, which it must have done."""
        try:
            output = next(self.call)
        except grpc.RpcError as error:
            return error
        raise AssertionError(f"the stream goes on with step {output.step_id}")


def start(
    slot: int,
    text: bytes,
    block_ids: list[int],
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    **parts: object,
) -> compute_pb2.SlotStart:
    """A slot's start with the bytes of `text` as its prompt."""
    return compute_pb2.SlotStart(
        slot=slot,
        token_ids=list(text),
        num_prompt_tokens=len(text),
        block_ids=block_ids,
        sampling=compute_pb2.SamplingParams(temperature=temperature, top_p=top_p, seed=seed),
        **parts,  # type: ignore[arg-type]
    )


def violated_fields(error: grpc.RpcError) -> list[str]:
    """The fields that the error's BadRequest details name."""
    return [
        violation.field
        for detail in _details(error)
        if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR)
        for violation in error_details_pb2.BadRequest.FromString(detail.value).field_violations
    ]


def reason(error: grpc.RpcError) -> str:
    """The word of the error's ErrorInfo."""
    (info,) = [
        error_details_pb2.ErrorInfo.FromString(detail.value)
        for detail in _details(error)
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR)
    ]
    assert info.domain == "hetero-paged-infer"
    return str(info.reason)


def _details(error: grpc.RpcError) -> list[object]:
    status = rpc_status.from_call(error)
    return [] if status is None else list(status.details)


def first_batch_parts(text: bytes = b"hello", slot: int = 0, first_block: int = 0) -> dict:
    blocks = list(range(first_block, first_block + 8))
    return {
        "starts": [start(slot, text, blocks)],
        "slots": [slot],
        "query_lens": [len(text)],
        "positions": [0],
        "sampled_rows": [0],
    }


def decode_parts(position: int, slot: int = 0) -> dict:
    return {"slots": [slot], "query_lens": [1], "positions": [position], "sampled_rows": [0]}
