"""Medians, ratios, and the one table of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.peers.cases import Case, Line
from bench.peers.models import DEFAULT_MODEL
from hetero_infer.bench.figures import median, ratio

HEADERS = ("case", "peer", "peer tok/s", "ours", "ours tok/s", "ratio", "quiet")


@dataclass(frozen=True, slots=True)
class Sample:
    """One repetition.

    `others`: cores that other processes kept busy meanwhile. `disturbed`: tokens a second of the
    attempts before it, which were not quiet.
    """

    tokens: int
    seconds: float
    others: float = 0.0
    is_quiet: bool = True
    disturbed: Sequence[float] = ()

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


@dataclass(slots=True)
class LineResult:
    """A peer and ours, round by round. `fault`: why there is nothing, or not all of it."""

    case: Case
    line: Line
    peer_versions: dict[str, str] = field(default_factory=dict)
    own_versions: dict[str, str] = field(default_factory=dict)
    peer: list[Sample] = field(default_factory=list)
    ours: list[Sample] = field(default_factory=list)
    fault: str | None = None

    @property
    def ratio(self) -> float:
        """Ours over the peer."""
        return ratio(median_rate(self.ours), median_rate(self.peer))

    def to_object(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "case": self.case.name,
            "peer": dataclasses.asdict(self.line.peer),
            "own_model": self.line.own_model,
            "fault": self.fault,
            "peer_versions": self.peer_versions,
            "own_versions": self.own_versions,
            "peer_tokens_per_second": median_rate(self.peer),
            "own_tokens_per_second": median_rate(self.ours),
            "ratio": self.ratio,
            "peer_samples": [_sample_object(sample) for sample in self.peer],
            "own_samples": [_sample_object(sample) for sample in self.ours],
        }


@dataclass(frozen=True, slots=True)
class Best:
    """The fastest peer of a case against ours on the default model, all its rounds together."""

    case: Case
    line: Line
    peer: Sequence[Sample]
    ours: Sequence[Sample]

    @property
    def ratio(self) -> float:
        """Ours over the peer."""
        return ratio(median_rate(self.ours), median_rate(self.peer))

    def to_object(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "case": self.case.name,
            "peer": self.line.peer.name,
            "weights": self.line.peer.weights,
            "peer_tokens_per_second": median_rate(self.peer),
            "own_tokens_per_second": median_rate(self.ours),
            "ratio": self.ratio,
        }


def median_rate(samples: Sequence[Sample]) -> float:
    """Return the median of the quiet samples; of all, if none was quiet; NaN of nothing."""
    quiet = [sample.rate for sample in samples if sample.is_quiet]
    return median(quiet or [sample.rate for sample in samples])


def best_of(results: Iterable[LineResult]) -> Best | None:
    """Return the fastest peer of one case's results; None without ours on the default model."""
    done = [result for result in results if result.peer and result.ours]
    ours = [
        sample
        for result in done
        if result.line.own_model == DEFAULT_MODEL
        for sample in result.ours
    ]
    if not ours:
        return None
    fastest = max(done, key=lambda result: median_rate(result.peer))
    return Best(fastest.case, fastest.line, fastest.peer, ours)


def to_object(results: Sequence[LineResult]) -> dict[str, Any]:
    """Return all results for JSON."""
    bests = [best_of(group) for group in by_case(results)]
    return {
        "lines": [result.to_object() for result in results],
        "best_peers": [best.to_object() for best in bests if best is not None],
    }


def to_markdown(results: Sequence[LineResult]) -> str:
    """Return one Markdown table; the last line of each case is its fastest peer's."""
    rows: list[Sequence[str]] = [HEADERS, ["---", "---", "--:", "---", "--:", "--:", "--:"]]
    for group in by_case(results):
        rows += [_row(result) for result in group]
        best = best_of(group)
        if best is not None:
            cells = _cells(best.case, best.line, DEFAULT_MODEL, best.peer, best.ours)
            cells[1] = f"best: {cells[1]}"
            rows.append([f"**{cell}**" for cell in cells])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def by_case(results: Sequence[LineResult]) -> list[list[LineResult]]:
    """Return the results of each case, in their order."""
    groups: dict[str, list[LineResult]] = {}
    for result in results:
        groups.setdefault(result.case.name, []).append(result)
    return list(groups.values())


def _row(result: LineResult) -> list[str]:
    if result.fault is not None:
        peer = result.line.peer
        fault = " ".join(result.fault.split()).replace("|", "/")
        return [result.case.title, f"{peer.name}, {peer.weights}", "failed", "", "", "", fault]
    return _cells(result.case, result.line, result.line.own_model, result.peer, result.ours)


def _cells(
    case: Case, line: Line, own_model: str, peer: Sequence[Sample], ours: Sequence[Sample]
) -> list[str]:
    every = [*peer, *ours]
    return [
        case.title,
        f"{line.peer.name}, {line.peer.weights}",
        f"{median_rate(peer):.1f}",
        own_model.removesuffix(".gguf"),
        f"{median_rate(ours):.1f}",
        f"{ratio(median_rate(ours), median_rate(peer)):.2f}",
        f"{sum(sample.is_quiet for sample in every)}/{len(every)}",
    ]


def _sample_object(sample: Sample) -> dict[str, Any]:
    return {**dataclasses.asdict(sample), "tokens_per_second": sample.rate}
