"""How much of the processors the planes and the client take while streams run."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hetero_infer.bench.figures import median, ratio
from hetero_infer.bench.report import Table
from hetero_infer.bench.server import StartedPlanes, describe
from planes.errors import ExecutionError

PARTIES = ("control_plane", "compute_plane", "client")


def seconds_of_process(pid: int) -> float:
    """Return the processor time of a process of this user, that of its ended threads included.

    Linux counts it to the nanosecond for every process. Raises ExecutionError where it does not say
    it: another system, or the process is gone.
    """
    if sys.platform != "linux":
        raise ExecutionError(f"processor time of process {pid}: only Linux tells it")
    try:
        # As clock_getcpuclockid(3) makes it: the id's complement, and CPUCLOCK_SCHED.
        return time.clock_gettime((~pid << 3) | 2)
    except OSError as error:
        raise ExecutionError(f"processor time of process {pid}: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class Usage:
    """Seconds on the wall, and of processor time of each party meanwhile.

    Of the control plane that is everything it does: scheduling, both sides of gRPC, detokenising.
    """

    seconds: float
    control_plane: float
    compute_plane: float
    client: float

    def since(self, earlier: Usage) -> Usage:
        """Return what came after another reading."""
        return Usage(
            *(mine - its for mine, its in zip(_values(self), _values(earlier), strict=True))
        )

    def share(self, party: str, num_threads: int) -> float:
        """Return the part that a party takes of the time in which the engine's threads compute.

        What does not fit beside those threads is taken from them: with a thread on every core, this
        is the share of a step that the party costs.
        """
        return ratio(getattr(self, party), self.seconds * num_threads)

    def to_object(self, num_threads: int, num_tokens: int) -> dict[str, Any]:
        """Return it for JSON: seconds, shares, and microseconds of the control plane a token."""
        shares = {party: self.share(party, num_threads) for party in PARTIES}
        return {
            "processor_seconds": asdict(self),
            "shares": shares,
            "control_plane_us_per_token": 1e6 * ratio(self.control_plane, num_tokens),
        }


def _values(usage: Usage) -> tuple[float, ...]:
    return (usage.seconds, *(getattr(usage, party) for party in PARTIES))


class ProcessorMeter:
    """Reads what both planes and this process, their client, use while something runs."""

    def __init__(self, planes: StartedPlanes) -> None:
        self._planes = planes
        self._before = self._read()
        self.num_threads = max(describe(planes.compute).device.num_threads, 1)

    def start(self) -> None:
        """Count from here."""
        self._before = self._read()

    def stop(self, num_tokens: int) -> dict[str, Any]:
        """Return what was used since `start`, in which that many tokens came, for JSON."""
        return self._read().since(self._before).to_object(self.num_threads, num_tokens)

    def _read(self) -> Usage:
        return Usage(
            seconds=time.perf_counter(),
            control_plane=seconds_of_process(self._planes.control_pid),
            compute_plane=seconds_of_process(self._planes.compute_pid),
            client=time.process_time(),
        )


def median_usage(samples: Sequence[dict[str, Any]], num_threads: int) -> dict[str, Any]:
    """Return the medians of what `to_object` says of several runs."""
    return {
        "threads": num_threads,
        **{
            f"{party}_share": median([sample["shares"][party] for sample in samples])
            for party in PARTIES
        },
        "control_plane_us_per_token": median(
            [sample["control_plane_us_per_token"] for sample in samples]
        ),
    }


def usage_table(results: Sequence[dict[str, Any]]) -> Table:
    """Tell of each level what `median_usage` says, under the key `processors`."""
    threads = results[0]["processors"]["threads"]
    rows = []
    for result in results:
        figures = result["processors"]
        shares = [f"{100 * figures[f'{party}_share']:.1f} %" for party in PARTIES]
        per_token = f"{figures['control_plane_us_per_token']:.0f}"
        rows.append([str(result["concurrency"]), *shares, per_token])
    return Table(
        [
            "streams",
            "control plane CPU",
            "compute plane CPU",
            "client CPU",
            "control plane µs/token",
        ],
        rows,
        f"Processor time, of the run's time × {threads} engine thread{'s' * (threads != 1)}:",
    )
