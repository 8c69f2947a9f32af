"""Runs one engine as a child process: `python runner.py NAME`, JSON lines on stdin and stdout.

    parent → {"kind": …, "model": PATH, "threads": N, "settings": {…}}          the job
    child  → {"versions": {…}}                                              it is loaded
    parent → {"prompts": [[token id, …], …], "output_tokens": N}            measure once
    child  → {"tokens": N, "seconds": S}                                    … and again,
                                                                       until stdin ends
Kinds, and what is counted over what time:

    decode    one stream: tokens after the first, from the first token to the last
    prefill   one prompt: its tokens, from sending it to the first token
    batch     all prompts at once: all output tokens, from the first prompt sent to the last token

A parent that asks for one repetition at a time can look whether the machine was quiet, and let
two engines take turns. What the engine itself prints goes to stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Job:
    """What an engine is to load. `settings`: its own, by their names there."""

    kind: str
    model: str
    threads: int
    settings: dict[str, Any]


class Engine(Protocol):
    """A loaded engine."""

    versions: dict[str, str]

    def measure(self, prompts: list[list[int]], output_tokens: int) -> tuple[int, float]:
        """Run once; return tokens and seconds as the job's kind counts them."""
        ...

    def close(self) -> None:
        """End what it started."""
        ...


def main(name: str) -> None:
    # Engines print to stdout, some of them from C++: only this stream keeps the parent's pipe.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    job = Job(**json.loads(sys.stdin.readline()))
    engine: Engine = importlib.import_module(f"run_{name}").load(job)
    try:
        answer({"versions": engine.versions})
        for line in sys.stdin:
            tokens, seconds = engine.measure(**json.loads(line))
            answer({"tokens": tokens, "seconds": seconds})
    finally:
        engine.close()


if __name__ == "__main__":
    main(sys.argv[1])
