"""llama.cpp's own benchmarks, `llama-bench` and `llama-batched-bench`.

They draw their tokens themselves and sample nothing; every repetition is a process of its own,
whose loading and warm-up are not counted. `llama-bench` counts every generated token, from an
empty context; so does `run_engine`. `settings`: `directory` of the programs.
"""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.peers.runners.runner import Job

BATCH_TOKENS, MICRO_BATCH_TOKENS = 2048, 512


class LlamaBench:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._directory = job.settings["directory"]
        self.versions = {"llama.cpp": self._version()}

    def measure(self, prompts: list[list[int]], output_tokens: int) -> tuple[int, float]:
        if self._job.kind == "batch":
            return self._batch(len(prompts), len(prompts[0]), output_tokens)
        is_prefill = self._job.kind == "prefill"
        num_prompt, num_output = (len(prompts[0]), 0) if is_prefill else (0, output_tokens)
        [result] = json.loads(
            self._run(
                "llama-bench", "-o", "json", "-r", "1", "-p", num_prompt, "-n", num_output,
            )
        )  # fmt: skip
        return num_prompt + num_output, result["avg_ns"] / 1e9

    def close(self) -> None:
        pass

    def _batch(self, num_rows: int, num_prompt: int, num_output: int) -> tuple[int, float]:
        context = num_rows * (num_prompt + num_output)
        lines = self._run(
            "llama-batched-bench", "-c", context, "-npp", num_prompt, "-ntg", num_output,
            "-npl", num_rows, "--output-format", "jsonl",
        )  # fmt: skip
        [result] = [json.loads(line) for line in lines.splitlines() if '"t_tg"' in line]
        return num_rows * num_output, float(result["t"])

    def _run(self, program: str, *arguments: Any) -> str:  # noqa: ANN401 - text or a number
        sizes = ["-b", BATCH_TOKENS, "-ub", MICRO_BATCH_TOKENS, "-fa", "on"]
        command = [
            f"{self._directory}/{program}", "-m", self._job.model, "-t", self._job.threads,
            *sizes, *arguments,
        ]  # fmt: skip
        return subprocess.run(
            list(map(str, command)), stdout=subprocess.PIPE, text=True, check=True
        ).stdout

    def _version(self) -> str:
        done = subprocess.run(
            [f"{self._directory}/llama-bench", "--version"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True,
        )  # fmt: skip
        return done.stdout.splitlines()[0].strip()


def load(job: Job) -> LlamaBench:
    return LlamaBench(job)
