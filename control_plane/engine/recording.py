"""Recording: what goes over the link between the planes, kept for `hetero-infer replay`.

The recorder stands in the link, where batches and outputs are messages already. So that a replay
has more to compare than tokens, it also asks the plane, where the plane can, for

- the digest of every KV block that a batch fills, and
- the log-probability of every token that is sampled;

neither changes what is computed. What only the recording asked for goes no further than here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import structlog

from control_plane.engine.recording_file import FORMAT_VERSION, RecordingFile
from control_plane.engine.recording_tables import BlockTables, filled_places
from protos.hetero.compute.v1 import compute_pb2, recording_pb2

DIGESTS = "block_digests"
LOGPROBS = "logprobs"
"""Features of the compute plane, as in `DescribeResponse`."""

_log = structlog.get_logger(__name__)


class _Asked(NamedTuple):
    """A batch under way: the samples whose log-probability nobody but the recording wants."""

    step_id: int
    samples: frozenset[int]


class Recorder:
    """Writes one link's stream to a file. Belongs to the engine thread, but for its making.

    `clock`: seconds since 1970. Raises ConfigError, naming `record`, if the file cannot be made.
    """

    def __init__(self, path: str, *, clock: Callable[[], float] = time.time) -> None:
        self._file = RecordingFile(path)
        self._clock = clock
        self._forget()
        _log.info("recording", file=self._file.path)

    def _forget(self) -> None:
        self._block_size = 0
        self._features: frozenset[str] = frozenset()
        self._tables = BlockTables()
        self._quiet_slots: set[int] = set()  # whose log-probabilities only the recording wants
        self._under_way: deque[_Asked] = deque()

    @property
    def is_recording(self) -> bool:
        """Whether what passes still reaches the file; False once a write has failed."""
        return self._file.is_recording

    def opened(self, plane: compute_pb2.DescribeResponse) -> None:
        """Note that a session began with this plane."""
        self._forget()
        self._block_size = plane.block_size
        self._features = frozenset(plane.features)
        header = recording_pb2.RecordingHeader(
            format_version=FORMAT_VERSION,
            started_at_us=int(self._clock() * 1e6),
            plane=plane.SerializeToString(),
        )
        self._write(recording_pb2.Record(header=header))

    def sent(self, batch: compute_pb2.ExecutionBatch) -> None:
        """Add to a batch what the recording asks for, and write it; before it is sent."""
        is_recording = self._file.is_recording
        self._ask_for_logprobs(batch, is_asking=is_recording and LOGPROBS in self._features)
        samples: frozenset[int] = frozenset()
        if self._quiet_slots:
            targets = batch.sampled_slots or [batch.slots[row] for row in batch.sampled_rows]
            samples = frozenset(k for k, slot in enumerate(targets) if slot in self._quiet_slots)
        self._under_way.append(_Asked(batch.step_id, samples))
        if is_recording:
            if DIGESTS in self._features:
                self._ask_for_digests(batch)
            self._write(recording_pb2.Record(batch=batch.SerializeToString()))

    def received(self, output: compute_pb2.ExecutionOutput) -> None:
        """Write an output, then take out of it what only the recording asked for."""
        if self._file.is_recording:
            self._write(recording_pb2.Record(output=output.SerializeToString()))
        output.ClearField("block_digests")
        while self._under_way and self._under_way[0].step_id < output.step_id:
            self._under_way.popleft()
        if not self._under_way or self._under_way[0].step_id != output.step_id:
            return
        quiet = self._under_way.popleft().samples
        if quiet:
            for entries in (output.sample_logprobs, output.draft_logprobs):
                asked_for = [entry for entry in entries if entry.sample not in quiet]
                del entries[:]
                entries.extend(asked_for)

    def close(self) -> None:
        """Write what waits and close the file. Harmless when called again."""
        self._file.close()

    def _ask_for_logprobs(self, batch: compute_pb2.ExecutionBatch, *, is_asking: bool) -> None:
        for start in batch.starts:
            if start.sampling.HasField("num_logprobs") or not is_asking:
                self._quiet_slots.discard(start.slot)
            else:
                start.sampling.num_logprobs = 0  # of the token itself, and no others
                self._quiet_slots.add(start.slot)

    def _ask_for_digests(self, batch: compute_pb2.ExecutionBatch) -> None:
        self._tables.apply(batch)
        places = filled_places(batch, self._block_size)
        if places:
            batch.digest_blocks.extend(self._tables.blocks_at(batch, places) or ())

    def _write(self, record: recording_pb2.Record) -> None:
        self._file.write(record.SerializeToString())
