"""The file of a recording: records go to a thread that writes them, so the engine never waits.

The format is that of protos/hetero/compute/v1/recording.proto. What cannot be written is lost
together with all that would follow; the engine goes on.
"""

from __future__ import annotations

import fcntl
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

MAX_KEPT_FILES: Final = 1000
"""Of one name: what was recorded before is kept."""

FILE_MODE: Final = 0o600
"""Prompts and answers are in it."""

_log = structlog.get_logger(__name__)


class RecordingFile:
    """A new file of records: `path`, or path.1 and so on where something is kept there.

    `write` and `close` belong to one thread. Raises ConfigError, naming `record`, if the file
    cannot be made.
    """

    def __init__(self, path: str, *, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self.path, descriptor = _create_free(path)
        self._file = open(descriptor, "wb")  # noqa: SIM115 - closed by the thread
        self._max_waiting_bytes = max_waiting_bytes
        self._records: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._has_stopped = False
        self._is_closing = False
        self._bytes_given = 0
        self._bytes_taken = 0  # written by the thread only
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()

    @property
    def is_recording(self) -> bool:
        """Whether what is written still reaches the file, as far as is known."""
        return not (self._has_stopped or self._is_closing)

    def write(self, record: bytes) -> None:
        """Add a record; never waits and never fails."""
        if not self.is_recording:
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
        self._is_closing = True
        self._records.put(None)
        self._thread.join(CLOSE_PATIENCE_S)
        if self._thread.is_alive():
            self._stop(f"the disk is slow: it had {CLOSE_PATIENCE_S:g} s for the end")

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


def _create_free(path: str) -> tuple[str, int]:
    """Open `path`, or, where something is kept there, the first that is free of `path`.1, .2, ….

    A control plane that is started again after its end has the same settings as before.
    """
    for name in (path, *(f"{path}.{number}" for number in range(1, MAX_KEPT_FILES))):
        descriptor = _create(name)
        if descriptor is not None:
            return name, descriptor
    raise ConfigError(
        f"record: {path!r} and {MAX_KEPT_FILES - 1} more of that name are kept already; a "
        "recording overwrites nothing: name another file or remove them",
        field="record",
    )


def _create(path: str) -> int | None:
    """Open a file that is new, or empty and an ordinary one, for nobody else to read.

    None if it holds something, or another control plane keeps it and has yet to write its first
    record. Raises ConfigError.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, FILE_MODE)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"record: cannot write {path!r}: {why}", field="record") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ConfigError(f"record: {path!r} is not an ordinary file", field="record")
        if not _lock(descriptor) or os.fstat(descriptor).st_size:
            os.close(descriptor)
            return None
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


def _lock(descriptor: int) -> bool:
    """Keep a file until it is closed; whether nobody else does."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks
    return True
