"""A compute plane without its process, around an executor of a real model."""

from __future__ import annotations

import queue

from compute_plane.executor.batch_checks import SlotLimits
from compute_plane.executor.device_thread import DeviceThread
from compute_plane.executor.interface import GPUExecutor
from compute_plane.executor.sessions import SessionLedger
from compute_plane.executor.slots import SlotTable
from compute_plane.executor.step import StepHeader, StepReply
from compute_plane.model.spec import ModelSpec
from compute_plane.rpc.convert import batch_from_proto, reply_to_proto
from control_plane.core.batch import StepBatch, StepResult
from control_plane.engine.convert import batch_to_proto, result_from_proto
from protos.hetero.compute.v1 import compute_pb2
from tests.waiting import PATIENCE_S

MAX_SLOTS = 16
NUM_STATES = MAX_SLOTS + 6
"""Of models with states: those of slots, and some that are kept."""


class ExecutorPlane:
    """Slots, session and device thread of a plane: protobuf in, protobuf out.

    Batches sent one after the other are launched as the plane launches them. One that is given up
    is closed, and the next one may have the same executor.
    """

    def __init__(
        self, executor: GPUExecutor, spec: ModelSpec, num_blocks: int, block_size: int
    ) -> None:
        limits = SlotLimits(
            max_slots=MAX_SLOTS,
            max_rows=16,
            max_tokens=256,
            num_blocks=num_blocks,
            block_size=block_size,
            vocab_size=spec.vocab_size,
            context_length=spec.context_length,
            embedding_size=spec.hidden_size,
            num_states=0 if spec.recurrence is None else NUM_STATES,
        )
        sessions = SessionLedger()
        self._session = sessions.open("test", take_over=False).session
        self._epoch = sessions.epoch
        self._has_failed = False
        self._device = DeviceThread(executor, SlotTable(limits), sessions, self._note_fault)
        self._device.start()
        self._answers: queue.SimpleQueue[object] = queue.SimpleQueue()

    def send(self, batch: StepBatch) -> None:
        """Have a batch run behind those sent before."""
        acked = batch.step_id - 1
        sent = batch_to_proto(batch, session=self._session, epoch=self._epoch, acked_step=acked)
        received = compute_pb2.ExecutionBatch.FromString(sent.SerializeToString())
        header = StepHeader(self._session, self._epoch, batch.step_id, acked)
        self._device.submit(header, batch_from_proto(received), self._answers.put)

    def receive(self) -> StepResult:
        """Wait for the answer to the oldest batch."""
        reply = self._answers.get(timeout=PATIENCE_S)
        assert isinstance(reply, StepReply), reply
        answer = reply_to_proto(reply).SerializeToString()
        return result_from_proto(compute_pb2.ExecutionOutput.FromString(answer))

    def run(self, batch: StepBatch) -> StepResult:
        """Run one batch."""
        self.send(batch)
        return self.receive()

    def close(self) -> None:
        """Finish what was sent, and end."""
        assert self._device.stop(PATIENCE_S)
        assert not self._has_failed

    def _note_fault(self) -> None:
        self._has_failed = True
