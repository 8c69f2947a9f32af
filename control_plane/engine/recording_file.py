"""The file of a recording: records go to a thread that writes them, so the engine never waits.

The format is that of protos/hetero/compute/v1/recording.proto. What cannot be written is lost
together with all that would follow; the engine goes on.
"""

from __future__ import annotations

import os
import queue
import stat
import threading
from typing import Final

import structlog

from planes.errors import ConfigError
from planes.transport import MAX_PLANE_MESSAGE_BYTES

FORMAT_VERSION: Final = 1

MAX_RECORD_BYTES: Final = MAX_PLANE_MESSAGE_BYTES + 64
"""A message as large as the link carries, and what a record adds to it."""

MAX_WAITING_BYTES: Final = MAX_PLANE_MESSAGE_BYTES
"""Records that wait for a slow disk. At more the recording ends."""

CLOSE_PATIENCE_S: Final = 5.0
"""A disk that does not answer must not keep the process from ending."""

FILE_MODE: Final = 0o600
"""Prompts and answers are in it."""

_log = structlog.get_logger(__name__)


class RecordingFile:
    """A new file of records.

    `write` and `close` belong to one thread. Raises ConfigError, naming `record`, if the file
    cannot be made or holds something already: a recording is never overwritten.
    """

    def __init__(self, path: str, *, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self.path = path
        self._file = open(_create(path), "wb")  # noqa: SIM115 - closed by the thread
        self._max_waiting_bytes = max_waiting_bytes
        self._records: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._has_stopped = False
        self._bytes_given = 0
        self._bytes_taken = 0  # written by the thread only
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()

    @property
    def is_recording(self) -> bool:
        """Whether what is written still reaches the file, as far as is known."""
        return not self._has_stopped

    def write(self, record: bytes) -> None:
        """Add a record; never waits and never fails."""
        if self._has_stopped:
            return
        data = encode_length(len(record)) + record
        if len(record) > MAX_RECORD_BYTES:
            self._stop(f"a record has {len(record)} bytes, at most {MAX_RECORD_BYTES} are kept")
        elif self._bytes_given - self._bytes_taken + len(data) > self._max_waiting_bytes:
            self._stop(f"the disk is slow: {self._max_waiting_bytes} bytes wait for it")
        else:
            self._bytes_given += len(data)
            self._records.put(data)

    def close(self) -> None:
        """Write what waits and close the file. Harmless when called again."""
        self._has_stopped = True
        self._records.put(None)
        self._thread.join(CLOSE_PATIENCE_S)

    def _stop(self, why: str) -> None:
        """End the recording and say so once; any thread."""
        if not self._has_stopped:
            self._has_stopped = True
            self._records.put(None)
            _log.error("recording stopped; requests go on", file=self.path, error=why)

    def _run(self) -> None:
        try:
            with self._file as file:
                while (record := self._records.get()) is not None:
                    file.write(record)
                    if self._records.empty():
                        file.flush()
                    self._bytes_taken += len(record)
        except OSError as error:
            self._stop(error.strerror or str(error))


def encode_length(length: int) -> bytes:
    """Return a length as a varint: seven bits a byte, lowest first; the last one is below 128."""
    encoded = bytearray()
    while length >= 0x80:
        encoded.append(length & 0x7F | 0x80)
        length >>= 7
    encoded.append(length)
    return bytes(encoded)


def _create(path: str) -> int:
    """Open a file that is new, or empty and an ordinary one, for nobody else to read."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, FILE_MODE)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"record: cannot write {path!r}: {why}", field="record") from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"record: {path!r} is not an ordinary file", field="record")
        if found.st_size:
            raise ConfigError(
                f"record: {path!r} holds {found.st_size} bytes already, and a recording "
                "overwrites nothing; name another file or remove this one",
                field="record",
            )
        os.fchmod(descriptor, FILE_MODE)
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(
            f"record: cannot write {path!r}: {error.strerror}", field="record"
        ) from None
    except ConfigError:
        os.close(descriptor)
        raise
    return descriptor
