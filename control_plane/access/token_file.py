"""The file of tokens: a JSON list, in which a token stands as its SHA-256.

    [{"name": "alice", "sha256": "9f86…", "max_concurrent_requests": 8,
      "max_tokens_per_minute": 60000, "admin": false, "shares_cache": false}]

Only `name` and `sha256` are required. Tokens are 256 random bits: nobody guesses one from its hash,
not at any number of hashes a second, so salt and slow hashing, which protect what people make up,
would only make every request slower. (For the same reason the server takes no token but ours.)
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import structlog

from control_plane.access.limits import Limits
from control_plane.errors import UnreadableTokensError
from planes.errors import ConfigError
from planes.json_members import RepeatedKeyError, members_once

KEY: Final = "api_tokens"
"""The setting that names the file."""

MAX_FILE_BYTES: Final = 4 << 20
"""About 25 000 tokens: a changed file is read between two answers, and nobody waits long."""

MAX_LIMIT: Final = 1 << 40

TOKEN_PREFIX: Final = "hpi_"
"""So that scanners, and people, know one when they see it where it should not be."""

TOKEN_BYTES: Final = 32

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
HASH: Final = re.compile(r"[0-9a-f]{64}")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token of the file. `sha256`: of the whole token's bytes, in lower-case hex."""

    name: str
    sha256: str
    max_concurrent_requests: int | None = None
    max_tokens_per_minute: int | None = None
    admin: bool = False
    shares_cache: bool = False

    @property
    def limits(self) -> Limits:
        """What it may use."""
        return Limits(self.max_concurrent_requests, self.max_tokens_per_minute)


KEYS: Final = frozenset(field.name for field in fields(TokenEntry))


def hash_of(token: str) -> str:
    """Return what the file has of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def new_token() -> str:
    """Return a token that nobody has."""
    return TOKEN_PREFIX + secrets.token_urlsafe(TOKEN_BYTES)


def check_name(name: str) -> None:
    """Raise ConfigError for what is no name of a token."""
    if NAME.fullmatch(name) is None:
        raise ConfigError(
            "name: 1 to 64 letters, digits, dots, dashes and underscores, the first a letter or "
            f"digit, got {name!r}",
            field="name",
        )


def read_tokens(path: Path) -> tuple[TokenEntry, ...]:
    """Read the file. Raises ConfigError that names it and the first fault."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            mode = found.st_mode
            # A pipe, too, may be named; what it has is known when it is read.
            data = b"" if found.st_size > MAX_FILE_BYTES else file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        message = f"{KEY}: {path} cannot be read: {error.strerror}"
        raise UnreadableTokensError(message, field=KEY) from None
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _wrong(
            path, f"can be written by others than its owner (mode {stat.S_IMODE(mode):04o})"
        )
    if mode & stat.S_IROTH:
        _log.warning("everybody on this machine may read the file of tokens", file=str(path))
    if max(found.st_size, len(data)) > MAX_FILE_BYTES:
        raise _wrong(path, f"has more than {MAX_FILE_BYTES} bytes")
    try:
        values = json.loads(data, object_pairs_hook=members_once)
    except RepeatedKeyError as error:
        raise _wrong(path, f"cannot be used: {error}") from None
    except (ValueError, RecursionError) as error:
        raise _wrong(path, f"is not valid JSON: {error}") from None
    if not isinstance(values, list):
        raise _wrong(path, f"must be a JSON list, got {type(values).__name__}")
    entries = tuple(_entry(path, index, value) for index, value in enumerate(values))
    for field in ("name", "sha256"):
        _check_distinct(path, field, [getattr(entry, field) for entry in entries])
    return entries


def add_token(path: Path, name: str, limits: Limits, *, admin: bool, shares_cache: bool) -> str:
    """Make a token, put its hash into the file, which may be new, and return the token.

    Raises ConfigError if there is one of that name, or the file cannot be read or written.
    """
    check_name(name)
    token = new_token()
    entry = TokenEntry(
        name,
        hash_of(token),
        limits.max_concurrent_requests,
        limits.max_tokens_per_minute,
        admin,
        shares_cache,
    )

    def add(entries: Sequence[TokenEntry]) -> list[TokenEntry]:
        if any(other.name == name for other in entries):
            raise ConfigError(f"name: {path} has a token {name!r} already", field="name")
        return [*entries, entry]

    _change(path, add)
    return token


def remove_token(path: Path, name: str) -> None:
    """Take a token out of the file.

    Raises ConfigError if there is none of that name, or the file cannot be read or written.
    """

    def remove(entries: Sequence[TokenEntry]) -> list[TokenEntry]:
        left = [entry for entry in entries if entry.name != name]
        if len(left) == len(entries):
            raise ConfigError(f"name: {path} has no token {name!r}", field="name")
        return left

    _change(path, remove)


def _change(path: Path, change: Callable[[Sequence[TokenEntry]], list[TokenEntry]]) -> None:
    """Replace the file by a changed one, whole; nobody else changes it meanwhile."""
    path = path.resolve()  # a link stays one
    with _locked(path.parent):
        before = path.stat() if path.exists() else None
        entries = change(() if before is None else read_tokens(path))
        text = json.dumps([_as_json(entry) for entry in entries], indent=2) + "\n"
        try:
            _replace(path, text.encode(), before)
        except OSError as error:
            raise _wrong(path, f"cannot be written: {error.strerror}") from None


def _replace(path: Path, data: bytes, before: os.stat_result | None) -> None:
    """Write the file anew beside it and put it in its place.

    A new file is its owner's alone; one that is replaced keeps its owner, and a group that may read
    it: the server may run as another user than the one who makes tokens.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if before is not None:
                if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(file.fileno(), before.st_uid, before.st_gid)
                os.fchmod(file.fileno(), 0o600 | before.st_mode & stat.S_IRGRP)
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:  # Ctrl-C too: half a file must not stay beside the whole one
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keep other commands from changing files of the directory. Raises ConfigError."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise _wrong(directory, f"cannot be opened: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _as_json(entry: TokenEntry) -> dict[str, object]:
    """Return what the file says of a token: what is not the default."""
    return {key: value for key, value in asdict(entry).items() if value not in (None, False)}


def _entry(path: Path, index: int, value: object) -> TokenEntry:
    """Check one element of the list."""
    where = f"entry {index}"
    if not isinstance(value, dict):
        raise _wrong(path, f"{where} must be an object, got {type(value).__name__}")
    given: dict[str, Any] = value
    unknown = sorted(given.keys() - KEYS)
    if unknown:
        # A limit with a wrong name would be no limit.
        raise _wrong(path, f"{where} has an unknown key {unknown[0]!r}")
    for key, pattern, what in (("name", NAME, "a name"), ("sha256", HASH, "64 hex digits")):
        text = given.get(key)
        if not isinstance(text, str) or pattern.fullmatch(text) is None:
            raise _wrong(path, f"{where}: {key} must be {what}, got {text!r}")
    for key in ("max_concurrent_requests", "max_tokens_per_minute"):
        number = given.get(key)
        is_number = isinstance(number, int) and not isinstance(number, bool)
        if number is not None and not (is_number and 1 <= number <= MAX_LIMIT):
            raise _wrong(path, f"{where}: {key} must be 1 to {MAX_LIMIT}, got {number!r}")
    for key in ("admin", "shares_cache"):
        if not isinstance(given.get(key, False), bool):
            raise _wrong(path, f"{where}: {key} must be true or false, got {given[key]!r}")
    return TokenEntry(**given)


def _check_distinct(path: Path, field: str, values: Sequence[str]) -> None:
    seen: set[str] = set()
    for index, value in enumerate(values):
        if value in seen:
            raise _wrong(path, f"entry {index}: {field} {value!r} is there twice")
        seen.add(value)


def _wrong(path: Path, what: str) -> ConfigError:
    return ConfigError(f"{KEY}: {path} {what}", field=KEY)
