"""`hetero-infer replay FILE --compute ADDRESS`: a recording on another compute plane.

Exit statuses: 0 no difference; 1 a difference, named; 2 the recording or the request cannot be
used; 3 the compute plane is not there, in use or lost. 1 means nothing else.
"""

from __future__ import annotations

import sys
from contextlib import closing
from typing import BinaryIO

from hetero_infer.replay.recording_reader import RecordingError, RecordingReader
from hetero_infer.replay.replay_plane import PlaneLostError, ReplayPlane
from hetero_infer.replay.replay_text import to_json, to_text
from hetero_infer.replay.replayer import Replayer, ReplayReport
from hetero_infer.replay.settings import ReplaySettings

EXIT_SAME = 0
EXIT_DIFFERENT = 1
EXIT_PLANE_LOST = 3


def replay(name: str, settings: ReplaySettings, *, as_json: bool) -> int:
    """Replay the file called `name`; the exit status.

    Raises RecordingError, and ConfigError if the recording does not fit the plane.
    """
    with _open(name) as file:
        reader = RecordingReader(file, name)
        report = ReplayReport()
        lost: PlaneLostError | None = None
        try:
            with closing(
                ReplayPlane(settings.address, takes_over=settings.take_over, tls=settings.tls)
            ) as plane:
                replayer = Replayer(
                    plane, report, finds_all=settings.all, tolerance=settings.tolerance
                )
                replayer.run(reader)
        except PlaneLostError as error:
            lost = error
    if lost is not None:
        where = f"in step {report.num_steps + 1} of the file: " if report.num_sessions else ""
        sys.stderr.write(f"hetero-infer: error: {where}{lost.message}\n")
    if lost is None or report.num_differences:
        is_truncated = reader.is_truncated
        sys.stdout.write(
            to_json(report, is_truncated=is_truncated)
            if as_json
            else to_text(
                report, name=name, compute=str(settings.address), is_truncated=is_truncated
            )
        )
    if lost is not None:
        return EXIT_PLANE_LOST
    return EXIT_DIFFERENT if report.num_differences else EXIT_SAME


def _open(name: str) -> BinaryIO:
    """Open a file to read. Raises RecordingError."""
    try:
        return open(name, "rb")
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise RecordingError(f"{name} cannot be read: {why}", field="recording") from None
