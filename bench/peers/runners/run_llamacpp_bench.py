"""llama.cpp's own benchmarks, `llama-bench` and `llama-batched-bench`.

They draw their tokens themselves and sample nothing; every repetition is a process of its own,
whose loading and warm-up are not counted. `llama-bench` counts every generated token, behind a
context of all of the prompt but its last token; so does `run_engine`. `settings`: `directory` of
the programs, `-fa`: "on" unless told otherwise.
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
        given = len(prompts[0])
        if self._job.kind == "prefill":
            return self._bench(given, "-p", given, "-n", 0)
        return self._bench(output_tokens, "-p", 0, "-n", output_tokens, "-d", given - 1)

    def close(self) -> None:
        pass

    def _bench(self, counted: int, *arguments: Any) -> tuple[int, float]:  # noqa: ANN401 - as below
        lines = self._run("llama-bench", "-o", "json", "-r", "1", *arguments)
        [result] = json.loads(lines)
        return counted, result["avg_ns"] / 1e9

    def _batch(self, num_rows: int, num_prompt: int, num_output: int) -> tuple[int, float]:
        context = num_rows * (num_prompt + num_output)
        lines = self._run(
            "llama-batched-bench", "-c", context, "-npp", num_prompt, "-ntg", num_output,
            "-npl", num_rows, "--output-format", "jsonl",
        )  # fmt: skip
        [result] = [json.loads(line) for line in lines.splitlines() if '"t_tg"' in line]
        return num_rows * num_output, float(result["t"])

    def _run(self, program: str, *arguments: Any) -> str:  # noqa: ANN401 - text or a number
        sizes = ["-b", BATCH_TOKENS, "-ub", MICRO_BATCH_TOKENS]
        sizes += ["-fa", self._job.settings.get("-fa", "on")]
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
