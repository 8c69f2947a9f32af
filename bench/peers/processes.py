"""An engine as a child process that loads a model once and measures when it is told to.

The protocol is that of `runners/runner.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from hetero_infer.config import child_environment
from planes.errors import ExecutionError

RUNNERS = Path(__file__).parent / "runners"

ANSWER_TIMEOUT_S = 600.0
"""For loading, and for one repetition."""

STOP_GRACE_S = 10.0


class PeerError(ExecutionError):
    """A peer ended, or did not answer."""

    reason = "PEER_FAILED"


class RunnerProcess:
    """`runner.py NAME` under an interpreter, with its job loaded. Raises PeerError.

    `log`: where everything goes that it prints.
    """

    def __init__(
        self,
        interpreter: Path,
        name: str,
        job: dict[str, Any],
        *,
        environ: Mapping[str, str],
        log: IO[str],
    ) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [str(interpreter), str(RUNNERS / "runner.py"), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=dict(environ),
            process_group=0,  # so that whatever it starts can be ended with it
        )
        try:
            self.versions: dict[str, str] = self._ask(job)["versions"]
        except BaseException:  # Ctrl-C too: the worker must not outlive this
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The process whose descendants are the engine."""
        return [self._process.pid]

    def measure(self, prompts: list[list[int]], output_tokens: int) -> tuple[int, float]:
        """Run once; return tokens and seconds. Raises PeerError."""
        answer = self._ask({"prompts": prompts, "output_tokens": output_tokens})
        return int(answer["tokens"]), float(answer["seconds"])

    def close(self) -> None:
        """End it, kindly at first."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_GRACE_S)
        self._kill()
        self._process.wait()
        self._process.stdout.close()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        watchdog = threading.Timer(ANSWER_TIMEOUT_S, self._kill)
        watchdog.start()
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            watchdog.cancel()
        if not line:
            raise PeerError(f"{self.name} ended, or was silent for {ANSWER_TIMEOUT_S:.0f} s")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def peer_environment(libraries: Iterable[Path] = (), threads: int | None = None) -> dict[str, str]:
    """Return the environment of a peer: not our import path, no network, our number of threads."""
    environ = child_environment()
    del environ["PYTHONPATH"]
    environ["HF_HUB_OFFLINE"] = "1"
    paths = [str(path) for path in libraries]
    if paths:
        environ["LD_LIBRARY_PATH"] = ":".join(paths)
    if threads is not None:
        environ["OMP_NUM_THREADS"] = str(threads)
        cpus = sorted(os.sched_getaffinity(0))[:threads]
        environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cpus))
        environ["VLLM_CPU_KVCACHE_SPACE"] = "2"
    return environ
