"""A device thread over an executor that a test drives by hand, and batches for it."""

from __future__ import annotations

import queue
import threading
from dataclasses import replace

from compute_plane.executor.device_thread import DeviceThread
from compute_plane.executor.draft_model import Drafter
from compute_plane.executor.sessions import SessionLedger
from compute_plane.executor.slots import SlotTable
from compute_plane.executor.step import (
    SamplingKey,
    StepBatch,
    StepHeader,
    StepReply,
)
from tests.compute_plane.executor.pipelined_executors import (
    TIMEOUT_S,
    DelayedExecutor,
    DelayedStep,
)
from tests.compute_plane.executor.slot_batches import GREEDY, LIMITS, start, step

TEXT = b"text"
PENALISED = SamplingKey(0.0, 1.0, 0, 0, presence_penalty=1.0)


class Driven:
    """A device thread over an executor that the test drives by hand."""

    def __init__(self, drafter: Drafter | None = None) -> None:
        self.executor = DelayedExecutor(
            num_blocks=LIMITS.num_blocks, block_size=LIMITS.block_size, is_driven_by_hand=True
        )
        self.sessions = SessionLedger()
        self.broken = threading.Event()
        self.slots = SlotTable(replace(LIMITS, has_draft_model=drafter is not None))
        self.device = DeviceThread(
            self.executor, self.slots, self.sessions, self.broken.set, drafter
        )
        self.answers: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.device.start()
        self.num_seen = 0
        self.open()

    def open(self) -> None:
        self.session = self.sessions.open("test", take_over=True).session
        self.last_step = 0

    def send(self, batch: StepBatch, step_id: int | None = None) -> None:
        self.last_step = self.last_step + 1 if step_id is None else step_id
        header = StepHeader(self.session, self.sessions.epoch, self.last_step, 0)
        self.device.submit(header, batch, self.answers.put)

    def launched(self) -> DelayedStep:
        """The next step that is launched."""
        assert self.executor.launches.acquire(timeout=TIMEOUT_S)
        self.num_seen += 1
        return self.executor.steps[self.num_seen - 1]

    def reply(self) -> StepReply:
        answer = self.answers.get(timeout=TIMEOUT_S)
        assert isinstance(answer, StepReply)
        return answer

    def tokens(self) -> list[int]:
        """Of the next reply, in which nothing fails."""
        result = self.reply().result
        assert result is not None
        assert not result.row_failures
        tokens: list[int] = result.sampled_token_ids.tolist()
        return tokens

    def begin(self, *slots: int, sampling: SamplingKey = GREEDY) -> list[int]:
        """Start slots with the text and run that; their first tokens."""
        self.send(prompts(*slots, sampling=sampling))
        self.launched().run()
        return self.tokens()


def prompts(*slots: int, sampling: SamplingKey = GREEDY) -> StepBatch:
    """Rows that compute the text in some slots; slot s has the blocks from 8s on."""
    starts = [start(slot, TEXT, range(8 * slot, 8 * slot + 8), sampling) for slot in slots]
    return step([(slot, 0, len(TEXT)) for slot in slots], starts=starts)


def decode(position: int, *slots: int) -> StepBatch:
    return step([(slot, position, 1) for slot in slots])
