"""The results of `hetero-infer complete`: one JSON object a line, in a file a run can go on with.

Each result is written as one whole line. A run that finds a file takes the results in it for done;
a last line that was torn off is cut away, and lines that say an error are taken out, because those
jobs are tried again, or are gone from the input. A file that holds anything else is left alone, and
so is one that has an answer to another request than the one that has its id now, unless those are
to be done anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from hetero_infer.commands.batch_input import key_of
from planes.errors import ConfigError


class Results(Protocol):
    """Where results go."""

    @property
    def done(self) -> frozenset[str]:
        """Keys of the jobs whose results are there already."""

    @property
    def models(self) -> frozenset[str]:
        """Names of the models that gave these."""

    @property
    def num_changed(self) -> int:
        """Answers that were there, of requests that have changed since."""

    def write(self, result: Mapping[str, Any]) -> None:
        """Add the result of a job, which its `id` names. Raises OSError."""

    def close(self) -> None:
        """Write what waits for its turn, and let go."""


class ResultStream:
    """Results on standard output. `order`: keys of all jobs; None: results come as they end."""

    def __init__(self, order: Sequence[str] | None) -> None:
        self.done: frozenset[str] = frozenset()
        self.models: frozenset[str] = frozenset()
        self.num_changed = 0
        self._order = order
        self._next = 0
        self._held: dict[str, bytes] = {}

    def write(self, result: Mapping[str, Any]) -> None:
        """Print a result, or hold it until those before it have been printed."""
        if self._order is None:
            self._print(spell(result))
            return
        self._held[key_of(result["id"])] = spell(result)
        while self._next < len(self._order) and self._order[self._next] in self._held:
            self._print(self._held.pop(self._order[self._next]))
            self._next += 1

    def close(self) -> None:
        """Print what is held: a run that was cut off loses nothing it has."""
        for line in self._held.values():
            self._print(line)
        self._held.clear()

    def _print(self, line: bytes) -> None:
        sys.stdout.write(line.decode())
        sys.stdout.flush()


class ResultFile:
    """Results in a file. `hashes`: of the requests of all jobs, by the jobs' keys.

    `is_ordered`: the file is in their order when it is closed; until then results stand in it as
    they came, so that none is lost whatever happens. `redoes_changed`: take out answers to requests
    that have changed since; `num_changed` says how many.

    Raises ConfigError if the file cannot be written, is being written by another process, or holds
    something else than results of these jobs.
    """

    def __init__(
        self,
        name: str,
        hashes: Mapping[str, str | None],
        *,
        is_ordered: bool = False,
        redoes_changed: bool = False,
    ) -> None:
        self._name = name
        self._hashes = hashes
        self._is_ordered = is_ordered
        self._redoes_changed = redoes_changed
        self._size = 0
        self.done: frozenset[str] = frozenset()
        self.models: frozenset[str] = frozenset()
        self.num_changed = 0
        self._fd = self._open()
        try:
            self._is_regular = stat.S_ISREG(os.fstat(self._fd).st_mode)
            if self._is_regular:
                data = self._data()
                results = self._done_before(data)
                self._put(b"".join(results.values()), data)
                self.done = frozenset(results)
        except BaseException:  # whatever it is: nobody will enter what was not made, and close it
            os.close(self._fd)
            raise

    def write(self, result: Mapping[str, Any]) -> None:
        """Add a result. Raises OSError; then no part of it is there."""
        self._append(spell(result))

    def close(self) -> None:
        """Put the results in order if that is asked for, and let go of the file."""
        try:
            if self._is_ordered and self._is_regular:
                data = self._data()
                lines = {key: line for key, _, line in self._results(data)}
                self._put(b"".join(lines[key] for key in self._hashes if key in lines), data)
        finally:
            os.close(self._fd)

    def _open(self) -> int:
        try:
            fd = os.open(self._name, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise self._unusable(f"cannot be written: {why}") from None
        try:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise self._unusable("is being written by another process") from None
        return fd

    def _data(self) -> bytes:
        with open(self._fd, "rb", closefd=False) as file:
            file.seek(0)
            return file.read()

    def _done_before(self, data: bytes) -> dict[str, bytes]:
        """Return the lines that count, by the keys of their jobs. Raises ConfigError."""
        found: dict[str, bytes] = {}
        changed: set[str] = set()
        models: set[str] = set()
        for key, result, line in self._results(data):
            if "error" in result:
                continue
            if result.get("request_hash") != self._hashes[key]:
                changed.add(key)
                continue
            found.setdefault(key, line)
            models.add(str(result.get("model")))
        self.num_changed = len(changed)
        if changed and not self._redoes_changed:
            first = next(key for key in self._hashes if key in changed)
            others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise self._unusable(
                f"has an answer to another request than the input has now for the id {first}"
                f"{others}: prompt or parameters have changed since. --redo-changed answers what "
                "has changed anew; or give another file"
            )
        self.models = frozenset(models)
        return found

    def _results(self, data: bytes) -> Iterator[tuple[str, Mapping[str, Any], bytes]]:
        """Yield key, result and line of each whole line of these jobs. Raises ConfigError."""
        *lines, torn = data.split(b"\n")
        if torn and _result(torn) is not None:  # only its end is missing
            lines.append(torn)
        for number, line in enumerate(lines, start=1):
            result = _result(line)
            if result is None:
                raise self._unusable(f"holds something else than results, see line {number}")
            key = key_of(result["id"])
            if key not in self._hashes:
                if "error" in result:  # nobody asks again what failed
                    continue
                raise self._unusable(
                    f"has a result for the id {key} (line {number}), which is not in the input; "
                    "give another --output, or put that line back"
                )
            yield key, result, line + b"\n"

    def _put(self, kept: bytes, data: bytes) -> None:
        """Put `kept` in place of the file's `data`, so that at no time a result is lost."""
        if data.startswith(kept):
            if kept != data:
                os.ftruncate(self._fd, len(kept))
            self._size = len(kept)
            return
        target = os.path.realpath(self._name)
        temporary = f"{target}.{os.getpid()}.tmp"
        try:
            with open(temporary, "xb") as file:
                file.write(kept)
                file.flush()
                os.fsync(file.fileno())
                os.fchmod(file.fileno(), stat.S_IMODE(os.fstat(self._fd).st_mode))
            os.replace(temporary, target)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise self._unusable(f"cannot be written anew: {error.strerror}") from None
        before, self._fd = self._fd, self._open()
        os.close(before)
        self._size = len(kept)

    def _append(self, lines: bytes) -> None:
        """Write whole lines, or none. Raises OSError."""
        left = memoryview(lines)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError:
            with contextlib.suppress(OSError):  # a pipe
                os.ftruncate(self._fd, self._size)
            raise
        self._size += len(lines)

    def _unusable(self, why: str) -> ConfigError:
        return ConfigError(f"output: {self._name} {why}", field="output")


def spell(result: Mapping[str, Any]) -> bytes:
    """Return a result as one line."""
    # A lone surrogate, which only an id can have, stays the escape that it was.
    return json.dumps(result, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def _result(line: bytes) -> dict[str, Any] | None:
    """Return a line's result; None if it is none."""
    try:
        result = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(result, dict) or not ("text" in result or "error" in result):
        return None
    job_id = result.get("id")
    return result if isinstance(job_id, str | int) and not isinstance(job_id, bool) else None
