"""What the control plane asks of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

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
class ByteTokenizer(Protocol):
    """A tokenizer whose text is the concatenation of its tokens' bytes, read as UTF-8.

    Ill-formed bytes become U+FFFD, one for each maximal subpart (Unicode 3.9, table 3-8), as
    Python and Rust do.
    """

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token stands for; none for a special token."""
        ...
