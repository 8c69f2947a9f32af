"""Reading a recording, which may be cut short, damaged or no recording at all.

The format is that of protos/hetero/compute/v1/recording.proto. A record is read only as long as its
length says, and its length is bounded; nothing else in a file decides how much memory is taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final, TypeVar

from google.protobuf.message import DecodeError, Message

from control_plane.engine.recording_file import FORMAT_VERSION, MAX_RECORD_BYTES
from planes.errors import ValidationError
from protos.hetero.compute.v1 import compute_pb2, recording_pb2

MAX_UNANSWERED: Final = 64
"""Batches without an output, one after the other; an engine has two under way."""

MAX_LENGTH_BYTES: Final = 5
"""Of a varint that says a record's length."""

MessageT = TypeVar("MessageT", bound=Message)


class RecordingError(ValidationError):
    """The file is not a recording, or damaged."""

    reason = "BAD_RECORDING"


@dataclass(frozen=True, slots=True)
class SessionStart:
    """A session with a plane begins. `number`: from 1 within the file."""

    number: int
    started_at_us: int
    plane: compute_pb2.DescribeResponse


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A batch, and what the plane answered; None: the recording ends before the answer."""

    batch: compute_pb2.ExecutionBatch
    output: compute_pb2.ExecutionOutput | None


class RecordingReader:
    """The sessions and steps of a file, in order; `is_truncated` once they have all been read.

    `name` is how errors call the file. Iterating raises RecordingError.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name
        self._num_read = 0
        self._offset = 0
        self._has_header = False
        self.is_truncated = False

    def __iter__(self) -> Iterator[SessionStart | RecordedStep]:
        unanswered: deque[compute_pb2.ExecutionBatch] = deque()
        num_sessions = 0
        for record in self._records():
            kind = record.WhichOneof("kind")
            if kind == "header":
                yield from _without_answers(unanswered)
                num_sessions += 1
                yield self._session(num_sessions, record.header)
            elif num_sessions == 0:
                raise self._not_a_recording("it does not begin with a header")
            elif kind == "batch":
                unanswered.append(self._parse(compute_pb2.ExecutionBatch(), record.batch))
                if len(unanswered) > MAX_UNANSWERED:
                    raise self._damaged(f"{len(unanswered)} batches in a row have no output")
            elif kind == "output":
                output = self._parse(compute_pb2.ExecutionOutput(), record.output)
                if not unanswered or unanswered[0].step_id != output.step_id:
                    raise self._damaged(f"an output of step {output.step_id} without its batch")
                yield RecordedStep(unanswered.popleft(), output)
            else:
                raise self._damaged("a record of no known kind")
        if num_sessions == 0:
            raise self._not_a_recording("it has no whole record")
        yield from _without_answers(unanswered)

    def _session(self, number: int, header: recording_pb2.RecordingHeader) -> SessionStart:
        if header.format_version != FORMAT_VERSION:
            raise self._not_a_recording(
                f"its format version is {header.format_version}, this program reads "
                f"{FORMAT_VERSION}"
            )
        plane = self._parse(compute_pb2.DescribeResponse(), header.plane)
        if plane.block_size < 1:
            raise self._damaged("its plane has a block_size of 0")
        self._has_header = True
        return SessionStart(number, header.started_at_us, plane)

    def _records(self) -> Iterator[recording_pb2.Record]:
        """Yield the whole records; note whether the file ends within one."""
        while (length := self._read_length()) is not None:
            data = self._file.read(length)
            self._offset += len(data)
            if len(data) < length:
                self.is_truncated = True
                return
            self._num_read += 1
            yield self._parse(recording_pb2.Record(), data)

    def _read_length(self) -> int | None:
        """Return the length of the next record; None at the end of the file."""
        length = 0
        for place in range(MAX_LENGTH_BYTES):
            byte = self._file.read(1)
            if not byte:
                self.is_truncated = place > 0
                return None
            self._offset += 1
            length |= (byte[0] & 0x7F) << (7 * place)
            if byte[0] < 0x80:
                if length > MAX_RECORD_BYTES:
                    break
                return length
        raise self._damaged(f"a record is longer than {MAX_RECORD_BYTES} bytes")

    def _parse(self, message: MessageT, data: bytes) -> MessageT:
        try:
            message.ParseFromString(data)
        except DecodeError:
            raise self._damaged(f"it is no {message.DESCRIPTOR.name}") from None
        return message

    def _damaged(self, why: str) -> RecordingError:
        if not self._has_header:
            return self._not_a_recording(why)
        return RecordingError(
            f"{self._name} is damaged at record {self._num_read} (before byte {self._offset}): "
            f"{why}",
            field="recording",
        )

    def _not_a_recording(self, why: str) -> RecordingError:
        return RecordingError(f"{self._name} is not a recording: {why}", field="recording")


def _without_answers(batches: deque[compute_pb2.ExecutionBatch]) -> Iterator[RecordedStep]:
    while batches:
        yield RecordedStep(batches.popleft(), None)
