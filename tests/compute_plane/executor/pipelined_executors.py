"""The simulated executor with a device of its own: steps are launched, and run later, in order."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np

from compute_plane.executor.interface import ExecutionBatch, ExecutionOutput, Int32Array
from compute_plane.executor.simulated import VOCAB_SIZE, SimulatedExecutor

TIMEOUT_S = 30.0
GARBAGE = 1 << 30
"""What a failed row "samples"; it must never be used as a token."""


class DelayedStep:
    """A step that its device has not run yet. `tokens`: of its samples, once it has."""

    def __init__(
        self, executor: DelayedExecutor, batch: ExecutionBatch, before: DelayedStep | None
    ) -> None:
        self.batch = batch
        self._executor = executor
        self._before = before
        self._is_over = threading.Event()
        self._output: ExecutionOutput | None = None
        self.failed_rows: dict[int, str] = {}
        self.failure: Exception | None = None
        self.tokens: Int32Array | None = None

    @property
    def is_over(self) -> bool:
        return self._is_over.is_set()

    def run(self) -> None:
        """Do what the device does, once it has done the step before."""
        if self.is_over:
            return
        batch = self.batch
        if self._before is not None:
            self._before.run()
        if batch.input_sources is not None:
            assert self._before is not None
            assert self._before.tokens is not None
            is_awaited = batch.input_sources >= 0
            sampled = self._before.tokens[batch.input_sources[is_awaited]]
            tokens = batch.input_tokens.copy()
            assert not tokens[is_awaited].any()
            tokens[is_awaited] = np.clip(sampled, 0, VOCAB_SIZE - 1)
            batch = replace(batch, input_tokens=tokens)
        self._before = None
        if self.failure is None:
            output = self._executor.execute(replace(batch, input_sources=None))
            failed_rows = self._executor.failed_rows(batch) | self.failed_rows
            self.tokens = output.next_tokens
            self.tokens[np.isin(batch.sampled_rows, list(failed_rows))] = GARBAGE
            self._output = replace(output, failed_rows=failed_rows)
        else:
            self.tokens = np.zeros(len(batch.sampled_rows), dtype=np.int32)
        self._is_over.set()

    def wait(self) -> None:
        assert self._is_over.wait(TIMEOUT_S)

    def answer(self) -> ExecutionOutput:
        if not self._executor.is_driven_by_hand:
            self.run()
        self.wait()
        if self.failure is not None:
            raise self.failure
        assert self._output is not None
        return self._output


class DelayedExecutor(SimulatedExecutor):
    """A `PipelinedExecutor` whose steps run when their answer is asked for, the latest moment.

    `is_driven_by_hand`: they run when the test calls `run` of them, and not before.
    `launch_failure`: raised by the next launch. `launches`: released at each launch.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_states: int = 0,
        is_driven_by_hand: bool = False,
    ) -> None:
        super().__init__(num_blocks=num_blocks, block_size=block_size, num_states=num_states)
        self.is_driven_by_hand = is_driven_by_hand
        self.steps: list[DelayedStep] = []
        self.launches = threading.Semaphore(0)
        self.launch_failure: Exception | None = None

    def launch(self, batch: ExecutionBatch) -> DelayedStep:
        if self.launch_failure is not None:
            failure, self.launch_failure = self.launch_failure, None
            raise failure
        # The histories of penalties are views, valid for the call.
        step = DelayedStep(self, batch, self.steps[-1] if self.steps else None)
        self.steps.append(step)
        self.launches.release()
        return step

    def failed_rows(self, batch: ExecutionBatch) -> dict[int, str]:  # noqa: ARG002
        """Return which rows of a step just run failed, beside those the test named."""
        return {}
