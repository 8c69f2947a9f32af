"""What each stage of a decode step takes of a processor, one after the other on one thread.

    schedule → encode │ decode → prepare → launch │ answer → reply │ result → commit
    control plane     │ compute plane                              │ control plane

The stages are the planes' own code, two steps under way as between them; between the stages lies no
thread and no socket. Times are of the thread's processor time, so that neighbours count little.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, TypeVar

from bench.host.played_device import PlayedDriver
from compute_plane.executor.batch_checks import SlotLimits
from compute_plane.executor.interface import LaunchedStep, PipelinedExecutor
from compute_plane.executor.samples_ahead import SamplesAhead
from compute_plane.executor.slots import SlotTable
from compute_plane.executor.step import StepHeader, StepReply
from compute_plane.rpc.convert import batch_from_proto, header_from_proto, reply_to_proto
from control_plane.core.batch import StepBatch
from control_plane.core.generation_params import GenerationParams
from control_plane.core.interface import SchedulerConfig
from control_plane.core.kv_cache import KVCacheManager
from control_plane.core.request import Request
from control_plane.core.scheduler import Scheduler
from control_plane.engine.convert import batch_to_proto, result_from_proto
from hetero_infer.bench.figures import median
from protos.hetero.compute.v1 import compute_pb2

T = TypeVar("T")

COMPUTE: Final = ("decode", "prepare", "launch", "answer", "reply")
CONTROL: Final = ("schedule", "encode", "result", "commit")
STAGES: Final = ("schedule", "encode", *COMPUTE, "result", "commit")

UNDER_WAY: Final = 2
WARM_UP: Final = 8
"""Decode steps before the clock starts."""
ANY_EPOCH: Final = 1 << 63


@dataclass(frozen=True, slots=True)
class StageWork:
    """Rows that decode together, from about `context` tokens on, for so many steps.

    No two rows of a block's length enter their blocks together. `num_asking`: rows with a `penalty`
    of repetition (1: none), a bias of `num_biases` tokens and `num_logprobs` most likely tokens.
    `num_waiting`: sequences beyond a step's rows; so many rows of every step are others than in the
    step before.
    """

    rows: int
    context: int = 1024
    steps: int = 320
    temperature: float = 0.0
    num_asking: int = 0
    penalty: float = 1.0
    num_biases: int = 0
    num_logprobs: int | None = None
    num_waiting: int = 0

    @property
    def num_sequences(self) -> int:
        """Sequences that decode, in a step or not."""
        return self.rows + self.num_waiting


@dataclass(frozen=True, slots=True)
class _Sent:
    """A step under way."""

    header: StepHeader
    launched: LaunchedStep
    ahead: SamplesAhead


class StageTimes:
    """Microseconds of each stage, step by step."""

    def __init__(self) -> None:
        self._samples: dict[str, list[float]] = {stage: [] for stage in STAGES}

    def run(self, stage: str, work: Callable[[], T]) -> T:
        """Time a stage of the step at hand."""
        began = time.thread_time_ns()
        result = work()
        self._samples[stage].append((time.thread_time_ns() - began) / 1e3)
        return result

    def forget(self) -> None:
        """Drop what was measured so far."""
        for samples in self._samples.values():
            samples.clear()

    def medians(self) -> dict[str, float]:
        """Return the median of each stage."""
        return {stage: median(samples) for stage, samples in self._samples.items()}

    def means(self) -> dict[str, float]:
        """Return the mean of each stage, in which rare steps count too."""
        return {stage: sum(samples) / len(samples) for stage, samples in self._samples.items()}


class StageRun:
    """Both planes without threads and wires, on an executor with its device."""

    def __init__(
        self, executor: PipelinedExecutor, driver: PlayedDriver, limits: SlotLimits, work: StageWork
    ) -> None:
        self._executor = executor
        self._driver = driver
        self._work = work
        self._slots = SlotTable(limits)
        self._scheduler = _scheduler(limits, work)
        self._times = StageTimes()

    def measure(self) -> dict[str, Any]:
        """Return medians and means of all stages, and the runtime's calls of a step."""
        scheduler, times = self._scheduler, self._times
        under_way: deque[_Sent] = deque()
        num_decodes = 0
        while scheduler.has_pending_work():
            output = times.run("schedule", scheduler.schedule)
            if output is not None:
                under_way.append(self._send(output.batch))
                is_decode = not output.batch.starts and output.batch.num_tokens == self._work.rows
                num_decodes += is_decode
                if is_decode and num_decodes == WARM_UP:
                    times.forget()
                    self._driver.calls.take()
            if len(under_way) == UNDER_WAY or output is None:
                self._receive(under_way.popleft())
                scheduler.get_completed()
        num_counted = num_decodes - WARM_UP
        calls = asdict(self._driver.calls.take())
        return {
            "rows": self._work.rows,
            "work": asdict(self._work),
            "steps": num_counted,
            "medians_us": times.medians(),
            "means_us": times.means(),
            "calls_of_a_step": {name: count / num_counted for name, count in calls.items()},
        }

    def _send(self, batch: StepBatch) -> _Sent:
        times = self._times
        acked = max(batch.step_id - UNDER_WAY, 0)
        sent = times.run(
            "encode",
            lambda: batch_to_proto(
                batch, session=1, epoch=ANY_EPOCH, acked_step=acked
            ).SerializeToString(),
        )
        step = times.run(
            "decode", lambda: batch_from_proto(compute_pb2.ExecutionBatch.FromString(sent))
        )
        prepared = times.run("prepare", lambda: self._slots.prepare(step))
        if prepared.batch is None:
            raise ValueError("a step of decode rows has rows")
        whole = prepared.batch
        launched = times.run("launch", lambda: self._executor.launch(whole))
        header = header_from_proto(compute_pb2.ExecutionBatch.FromString(sent))
        return _Sent(header, launched, self._slots.count_ahead(prepared))

    def _receive(self, sent: _Sent) -> None:
        times, slots = self._times, self._slots
        result = times.run(
            "answer", lambda: slots.complete_ahead(sent.ahead, sent.launched.answer())
        )
        reply = StepReply(sent.header, result=result)
        answer = times.run("reply", lambda: reply_to_proto(reply).SerializeToString())
        step = times.run(
            "result", lambda: result_from_proto(compute_pb2.ExecutionOutput.FromString(answer))
        )
        times.run("commit", lambda: self._scheduler.commit(step))


def _scheduler(limits: SlotLimits, work: StageWork) -> Scheduler:
    scheduler = Scheduler(
        SchedulerConfig(
            max_batch_size=work.rows,
            max_num_seqs=work.num_sequences,
            max_model_len=limits.max_sequence_tokens,
            max_total_tokens=limits.max_tokens,
            memory_threshold=1.0,
        ),
        KVCacheManager(limits.num_blocks, limits.block_size),
    )
    params = GenerationParams(
        max_tokens=work.steps, temperature=work.temperature, seed=0, ignore_eos=True
    )
    asking = replace(
        params,
        repetition_penalty=work.penalty,
        logit_bias=dict.fromkeys(range(work.num_biases), 1.0),
        num_logprobs=work.num_logprobs,
    )
    for number in range(work.num_sequences):
        prompt = [number] * (work.context - number % limits.block_size)
        wanted = asking if number < work.num_asking else params
        scheduler.add_request(
            Request(number, prompt, replace(wanted, seed=number))  # none is like another
        )
    return scheduler
