"""How much of anything a caller may send, so that reading it holds nobody else up.

The bounds of bytes follow from the loaded model: what no prompt of it could use is refused before
it is read. The bounds of numbers do not: they say how long one look at a request may take.
"""

from __future__ import annotations

from typing import Final

from control_plane.text.tokenizer import MAX_BYTES_PER_TOKEN

MAX_MESSAGES: Final = 2048
MAX_PARTS: Final = 1024
"""Parts of text in one message."""

MAX_TOOL_CALLS: Final = 128
"""In one message."""

MAX_JSON_BYTES: Final = 32 << 10
"""Of one text that is JSON itself: the arguments of a call, the schema of a tool."""

MAX_ELEMENTS: Final = 16_384
"""Texts, lists and objects of one request, names of fields included; 1 µs to 3 µs for each."""

MAX_NUMBERS: Final = 65_536
"""Members of lists of one HTTP body, beside those that one prompt of token ids has."""

MAX_INLINE_BYTES: Final = 16 << 10
"""Longer requests are read on another thread: the event loop must not wait milliseconds."""

_SPELLING: Final = 3
"""Bytes of JSON for one of a text: `ensure_ascii` writes six for one of two, as in Cyrillic."""

_REST_OF_BODY: Final = 128 << 10
_LEAST_BODY: Final = 256 << 10
_LARGEST_BODY: Final = 8 << 20

_REST_OF_MESSAGE: Final = 256 << 10
_LARGEST_MESSAGE: Final = 16 << 20


def max_text_bytes(max_model_len: int) -> int:
    """Return the bytes of a text that is worth tokenizing."""
    return max_model_len * MAX_BYTES_PER_TOKEN


def max_body_bytes(max_model_len: int) -> int:
    """Return the bytes of an HTTP body: its longest text, spelled badly, and all the rest.

    3 · 64 · max_model_len + 128 KiB, but 256 KiB at least and 8 MiB at most. Token ids, at most 8
    bytes each, need less than a text does; several prompts of one body share it.
    """
    wanted = _SPELLING * max_text_bytes(max_model_len) + _REST_OF_BODY
    return min(max(wanted, _LEAST_BODY), _LARGEST_BODY)


def max_message_bytes(max_model_len: int) -> int:
    """Return the bytes of a gRPC message: its longest text, as many of tools, and all the rest.

    2 · 64 · max_model_len + 256 KiB, at most 16 MiB. Token ids need less than a text does.
    """
    return min(2 * max_text_bytes(max_model_len) + _REST_OF_MESSAGE, _LARGEST_MESSAGE)
