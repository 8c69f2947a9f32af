"""What the control plane asks of a tokenizer."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Final, Protocol, runtime_checkable

REPLACEMENT_CHARACTER: Final = "\N{REPLACEMENT CHARACTER}"

MAX_BYTES_PER_TOKEN = 64
"""A prompt longer than this many bytes for each token of the model's length is refused unread."""


@runtime_checkable
class Tokenizer(Protocol):
    """Turns text into token ids and back. Called from several threads at once.

    The names are those of the seed documents; a user's own object may be passed to the engine.
    """

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt. Raises TokenizationError."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids; special tokens have none. Raises TokenizationError."""
        ...

    @property
    def vocab_size(self) -> int:
        """Every id is below it."""
        ...

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, if there is one."""
        ...

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, if there is one."""
        ...

    @property
    def pad_token_id(self) -> int | None:
        """The token that fills up, if there is one."""
        ...


@runtime_checkable
class PlainTokenizer(Protocol):
    """A tokenizer that can leave out the special tokens `encode` adds.

    Prompts made by a chat template have them already.
    """

    def encode_plain(self, text: str) -> list[int]:
        """Return the token ids of a text and of nothing else. Raises TokenizationError."""
        ...


@runtime_checkable
class SpellingTokenizer(Protocol):
    """A tokenizer that can spell special tokens out, which `decode` leaves out."""

    def decode_with_special(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, of special ones their names. Raises TokenizationError."""
        ...


@runtime_checkable
class ByteTokenizer(Protocol):
    """A tokenizer whose text is the concatenation of its tokens' bytes, read as UTF-8.

    Ill-formed bytes become U+FFFD, one for each maximal subpart (Unicode 3.9, table 3-8), as
    Python and Rust do.
    """

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token stands for; none for a special token."""
        ...


@runtime_checkable
class PieceTokenizer(ByteTokenizer, Protocol):
    """A byte tokenizer as SentencePiece is one: each byte that is no text becomes a U+FFFD.

    The bytes of a token are those it has in the middle of a text. Where a text may begin with a
    space that only encoding has put there, `decode` leaves that out.
    """

    @property
    def adds_space(self) -> bool:
        """Whether encoding puts a space in front of a text."""
        ...


EACH_BYTE: Final = "hetero.each-byte"
"""How `bytes.decode` treats errors for a `PieceTokenizer`: one U+FFFD a byte."""


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return REPLACEMENT_CHARACTER * (error.end - error.start), error.end


codecs.register_error(EACH_BYTE, _replace_each_byte)
