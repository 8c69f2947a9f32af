"""`hetero-infer complete`: many prompts, so many at once, their results as JSON Lines.

A result is `{"id": …, "request_hash": …, "text": …, …}`, as `--json` prints it, or `{"id": …,
"error": {"reason": …, "message": …, "field"?: …}}`. They come as they end unless order is asked
for. Exit statuses: 0 all done; 1 some ended in errors, or the server was lost; 130 Ctrl-C. A file
of results is always whole lines, and the next run goes on with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from control_plane.errors import (
    AdminTokenRequiredError,
    ComputeUnavailableError,
    DrainingError,
    EngineStoppedError,
    TokenMissingError,
    TokenUnknownError,
)
from hetero_infer.client import Answer, AsyncClient, Client
from hetero_infer.client.requests import can_resume
from hetero_infer.commands.answer_object import answer_object
from hetero_infer.commands.batch_input import Defaults, Job, read_jobs
from hetero_infer.commands.batch_output import ResultFile, Results, ResultStream
from hetero_infer.commands.server import Notices, Server, server_of
from hetero_infer.commands.target import CompleteSettings
from hetero_infer.config import Settings
from hetero_infer.generation_config import GenerationConfig
from hetero_infer.wire_errors import ServerLostError
from planes.errors import EngineError, ExecutionError

PROGRAM = "hetero-infer"

EXIT_FAILED = 1

PATIENCE_S: Final = 120.0
"""What one job waits for a server that is lost, or that says when to come again."""

RETRIES: Final = 8
"""Of a job that cannot go on where it was broken off; about 20 seconds."""

FATAL: Final = (
    ServerLostError,
    DrainingError,
    ComputeUnavailableError,
    EngineStoppedError,
    TokenMissingError,
    TokenUnknownError,
    AdminTokenRequiredError,
)
"""What would befall every job that is left: they are left undone, not written off."""


def complete(
    files: Sequence[str],
    settings: Settings,
    target: CompleteSettings,
    flags: Mapping[str, object],
) -> int:
    """Do all jobs; the exit status. Raises EngineError, OSError if results cannot be written."""
    generation = settings.resolve(GenerationConfig)
    generation.params.validate()
    generation.options.validate()
    defaults = Defaults(
        generation.params, generation.options, target.template_kwargs, generation.adapter or ""
    )
    jobs = read_jobs(files, target.input_file, defaults)
    notices = Notices()
    with contextlib.closing(_results(target, jobs)) as results:
        left = [job for job in jobs if job.key not in results.done]
        if results.num_changed:
            _say(f"answering anew what has changed since: {results.num_changed}")
        with _Tally(notices.console, len(jobs), len(results.done)) as tally:
            if left:
                with server_of(settings, target, flags, notices) as server:
                    # One that is not there is noticed here, soon.
                    with Client(server.address, token=server.token, tls=server.tls) as client:
                        client.model_info(defaults.model)
                        _compare_models(results, [one.model for one in client.list_models()])
                    asyncio.run(_Batch(server, results, tally, target.concurrency).run(left))
    return EXIT_FAILED if tally.num_failed else 0


def _results(target: CompleteSettings, jobs: Sequence[Job]) -> Results:
    if target.output in (None, "-"):
        return ResultStream([job.key for job in jobs] if target.ordered else None)
    return ResultFile(
        target.output or "",
        {job.key: job.request_hash for job in jobs},
        is_ordered=target.ordered,
        redoes_changed=target.redo_changed,
    )


def _compare_models(results: Results, models: Sequence[str]) -> None:
    """Warn of answers of different models in one file; `models`: the server's, adapters last."""
    for other in sorted(results.models.difference(models)):
        _say(f"warning: there are answers of {other!r} already; this server runs {models[0]!r}")


def _say(line: str) -> None:
    sys.stderr.write(f"{PROGRAM}: {line}\n")
    sys.stderr.flush()


class _Batch:
    """Jobs on their way through one server, `concurrency` at once."""

    def __init__(self, server: Server, results: Results, tally: _Tally, concurrency: int) -> None:
        self._server = server
        self._results = results
        self._tally = tally
        self._concurrency = concurrency
        self._is_lost = False

    async def run(self, jobs: Sequence[Job]) -> None:
        """Do the jobs. Raises the first error that would befall all the rest, too."""
        server = self._server
        async with AsyncClient(
            server.address, token=server.token, tls=server.tls, retries=RETRIES
        ) as client:
            self._tally.begin()
            waiting = iter(jobs)
            workers = [
                asyncio.create_task(self._work(client, waiting))
                for _ in range(min(self._concurrency, len(jobs)))
            ]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, client: AsyncClient, waiting: Iterator[Job]) -> None:
        """Do one job after the other, until none waits."""
        for job in waiting:
            try:
                answer = await self._answer(client, job)
            except FATAL:
                raise
            except EngineError as error:
                self._results.write({"id": job.id, "error": _error_object(error)})
                self._tally.add_failure()
            else:
                head = {"id": job.id, "request_hash": job.request_hash}
                self._results.write({**head, **answer_object(answer)})
                self._tally.add(answer.finished.completion_tokens)

    async def _answer(self, client: AsyncClient, job: Job) -> Answer:
        """Return the answer of a job. Raises EngineError."""
        request = job.request
        if isinstance(request, EngineError):
            raise request
        async with client.stream_request(
            request,
            resume=can_resume(request.params),
            patience_s=PATIENCE_S,
            on_lost=self._note_loss,
        ) as stream:
            answer = await stream.answer()
        self._is_lost = False
        if answer.finish_reason in ("cancelled", "error"):
            raise ExecutionError(f"the generation ended early: {answer.finish_reason}")
        return answer

    def _note_loss(self, error: EngineError, patience_s: float) -> None:
        """Say once for all jobs that wait why nothing ends, and how long that may last."""
        if not self._is_lost:
            self._is_lost = True
            self._tally.say(f"waiting up to {patience_s:g} s for the server: {error.message}")


def _error_object(error: EngineError) -> dict[str, Any]:
    found: dict[str, Any] = {"reason": error.reason, "message": error.message}
    return found if error.field is None else {**found, "field": error.field}


class _Tally:
    """Counts what is done and shows it: a bar on a terminal, one line at the end anywhere."""

    def __init__(self, console: Console, num_jobs: int, num_before: int) -> None:
        self.num_failed = 0
        self._num_jobs = num_jobs
        self._num_before = num_before
        self._num_done = 0
        self._num_tokens = 0
        self._began: float | None = None
        self._progress = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None

    def begin(self) -> None:
        """Start the clock: the server is there."""
        self._began = time.monotonic()
        self._progress.start()
        self._task = self._progress.add_task(
            "", total=self._num_jobs, completed=self._num_before, speed=""
        )

    def add(self, num_tokens: int) -> None:
        """Count a job that is done."""
        self._num_done += 1
        self._num_tokens += num_tokens
        self._advance()

    def add_failure(self) -> None:
        """Count a job that ended in an error."""
        self.num_failed += 1
        self._advance()

    def say(self, line: str) -> None:
        """Say something above the bar."""
        self._progress.console.print(f"{PROGRAM}: {line}", markup=False, highlight=False)

    def __enter__(self) -> _Tally:
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        parts = [f"{self._num_done} done"]
        if self.num_failed:
            parts.append(f"{self.num_failed} failed")
        if self._num_before:
            parts.append(f"{self._num_before} done before")
        num_left = self._num_jobs - self._num_done - self.num_failed - self._num_before
        if num_left:
            parts.append(f"{num_left} not done")
        line = ", ".join(parts) + (f"; {self._speed()}" if self._num_tokens else "")
        _say(line)

    def _advance(self) -> None:
        if self._task is not None:
            self._progress.update(self._task, advance=1, speed=self._speed())

    def _speed(self) -> str:
        elapsed_s = time.monotonic() - (self._began or 0.0)
        return f"{self._num_tokens / elapsed_s:.1f} tokens/s" if elapsed_s > 0 else ""
