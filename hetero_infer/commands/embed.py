"""`hetero-infer embed`: embeddings of texts, as JSON Lines in the order of the texts.

A line is `{"index": …, "embedding": […], "prompt_tokens": …}`; texts are counted from 0. Texts are
sent some at a time, and what is done is written at once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hetero_infer.commands.server import Notices, server_of
from hetero_infer.commands.target import EmbedSettings
from hetero_infer.config import Settings
from planes.errors import EngineError, ValidationError

if TYPE_CHECKING:
    from hetero_infer.client import Client

TEXTS_AT_ONCE: Final = 256
BYTES_AT_ONCE: Final = 128 << 10
"""Of a call: a message of any server has room for it."""

STDIN: Final = "-"


def embed(settings: Settings, target: EmbedSettings, flags: Mapping[str, object]) -> int:
    """Embed what the command line names and print it. Raises EngineError; returns the status."""
    if flags.get("input") == "":
        raise ValidationError("input must not be empty, got ''", field="input")
    calls = list(_calls(_texts(target)))  # what is wrong with them is said before anything starts
    notices = Notices()
    with server_of(settings, target, flags, notices) as server:
        from hetero_infer.client import Client  # imported by now, while the planes were starting

        with Client(
            server.address, token=server.token, tls=server.tls, on_wait=notices.tell_wait
        ) as client:
            first = 0
            for texts in calls:
                _write(client, texts, first, target)
                first += len(texts)
    return 0


def _write(client: Client, texts: list[str], first: int, target: EmbedSettings) -> None:
    try:
        found = client.embed(
            texts,
            dimensions=target.dimensions,
            normalize=target.normalize,
            model=target.adapter or "",
        )
    except EngineError as error:
        if error.field not in ("dimensions", "model"):  # those are of no text
            which = (
                f"texts {first} to {first + len(texts) - 1}" if len(texts) > 1 else f"text {first}"
            )
            error.message = f"{which}: {error.message}"
        raise
    for index, one in enumerate(found, start=first):
        values = [float(f"{value:.9g}") for value in one.values]
        line = {"index": index, "embedding": values, "prompt_tokens": one.num_tokens}
        sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _texts(target: EmbedSettings) -> Iterator[str]:
    """Yield the texts. Raises ValidationError for what cannot be read, and for empty ones."""
    if target.input is not None:
        if target.input_file is not None:
            raise ValidationError("input_file means nothing beside --input", field="input_file")
        yield _utf8(target.input.encode(errors="surrogateescape"), "input")
        return
    name = target.input_file or STDIN
    source = "standard input" if name == STDIN else name
    number = 0
    for number, line in enumerate(_lines(name), start=1):
        text = line.removesuffix(b"\n").removesuffix(b"\r")
        if not text:
            raise ValidationError(f"{source}, line {number} is empty", field="input_file")
        yield _utf8(text, f"{source}, line {number}")
    if number == 0:
        raise ValidationError(
            f"{source} is empty: give --input TEXT, or one text a line", field="input_file"
        )


def _lines(name: str) -> Iterator[bytes]:
    try:
        if name != STDIN:
            with Path(name).open("rb") as file:
                yield from file
        elif sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
            raise ValidationError(
                "there is no text: give --input TEXT, --input-file FILE, or one text a line on "
                "standard input",
                field="input",
            )
        else:
            yield from sys.stdin.buffer
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ValidationError(
            f"input_file: {name} cannot be read: {why}", field="input_file"
        ) from None


def _utf8(data: bytes, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValidationError(
            f"{what} is not valid UTF-8 (at byte {error.start})", field="input"
        ) from None


def _calls(texts: Iterator[str]) -> Iterator[list[str]]:
    """Yield the texts of each call."""
    found: list[str] = []
    size = 0
    for text in texts:
        num_bytes = len(text.encode())
        if found and (len(found) == TEXTS_AT_ONCE or size + num_bytes > BYTES_AT_ONCE):
            yield found
            found, size = [], 0
        found.append(text)
        size += num_bytes
    if found:
        yield found
