"""A peer and ours in turns: peer, ours, peer, ours, … on the same prompts."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from bench.peers.cases import Case, Line, settings_of
from bench.peers.contention import QuietRule, repeat_until_quiet
from bench.peers.environments import llama_cpp_builds, python_of
from bench.peers.models import model_path
from bench.peers.own_server import OwnServer
from bench.peers.processes import PeerError, RunnerProcess, peer_environment
from bench.peers.results import LineResult, Sample
from hetero_infer.config import EngineConfig, child_environment

FIRST_TOKEN, LAST_TOKEN = 100, 49000
"""Prompts are drawn from these: the embedded model's ordinary tokens."""


class Contestant(Protocol):
    """An engine with its model loaded."""

    @property
    def pids(self) -> list[int]:
        """Processes whose work, and their descendants', is the engine's."""
        ...

    @property
    def versions(self) -> Mapping[str, str]:
        """What it says of itself."""
        ...

    def measure(self, prompts: list[list[int]], output_tokens: int) -> tuple[int, float]:
        """Run once; return tokens and seconds."""
        ...

    def close(self) -> None:
        """End it."""
        ...


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What holds for all cases. `log`: where the engines print to."""

    directory: Path
    threads: int
    repeat: int
    seed: int
    quiet: QuietRule
    log: IO[str]


def run_line(case: Case, line: Line, options: RunOptions) -> LineResult:
    """Measure one peer and ours; a peer that fails is a result too. Raises EngineError of ours."""
    try:
        peer = _open_peer(case, line, options)
    except PeerError as error:
        return LineResult(case, line, fault=error.message)
    with closing(peer), closing(_open_ours(case, line, options)) as ours:
        try:
            return take_turns(case, line, peer, ours, options)
        except PeerError as error:
            return LineResult(case, line, fault=error.message)


def take_turns(
    case: Case, line: Line, peer: Contestant, ours: Contestant, options: RunOptions
) -> LineResult:
    """Measure `repeat` rounds after one that is not counted."""
    for contestant in (peer, ours):
        contestant.measure(next(_prompts(case, options.seed, 0)), case.output_tokens)
    result = LineResult(case, line, dict(peer.versions), dict(ours.versions))
    for number in range(1, options.repeat + 1):
        for contestant, samples in ((peer, result.peer), (ours, result.ours)):
            # Both draw alike; a further attempt gets new prompts, lest a cache of prefixes help it.
            prompts = _prompts(case, options.seed, number)
            samples.append(_sample(contestant, case, prompts, options.quiet))
    return result


def _prompts(case: Case, seed: int, number: int) -> Iterator[list[list[int]]]:
    """Draw the prompts of a round, and new ones for each further attempt."""
    draw = random.Random(f"{seed}/{number}")
    while True:
        yield [
            draw.choices(range(FIRST_TOKEN, LAST_TOKEN), k=case.prompt_tokens)
            for _ in range(case.num_prompts)
        ]


def _sample(
    contestant: Contestant, case: Case, prompts: Iterator[list[list[int]]], rule: QuietRule
) -> Sample:
    attempts = repeat_until_quiet(
        lambda: contestant.measure(next(prompts), case.output_tokens), contestant.pids, rule
    )
    for attempt in attempts[:-1]:
        sys.stderr.write(f"others used {attempt.others:.2f} cores: once more\n")
    [kept] = attempts[-1:]
    disturbed = [tokens / seconds for tokens, seconds in (a.value for a in attempts[:-1])]
    return Sample(*kept.value, kept.others, kept.is_quiet, disturbed)


def _open_peer(case: Case, line: Line, options: RunOptions) -> RunnerProcess:
    peer = line.peer
    libraries = llama_cpp_builds(options.directory) if peer.environment == "llamacpp" else []
    return RunnerProcess(
        python_of(options.directory, peer.environment),
        peer.runner,
        {
            "kind": case.kind,
            "model": str(model_path(options.directory, peer.model)),
            "threads": options.threads,
            "settings": settings_of(peer, options.directory),
        },
        environ=peer_environment(libraries, options.threads),
        log=options.log,
    )


def _open_ours(case: Case, line: Line, options: RunOptions) -> Contestant:
    model = str(model_path(options.directory, line.own_model))
    if case.through_grpc:
        return OwnServer(case.kind, EngineConfig(model=model, num_threads=options.threads))
    job = {"kind": case.kind, "model": model, "threads": options.threads, "settings": {}}
    return RunnerProcess(
        Path(sys.executable), "engine", job, environ=child_environment(), log=options.log
    )
