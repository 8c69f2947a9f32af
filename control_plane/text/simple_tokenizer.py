"""A tokenizer without a vocabulary file: one token a byte."""

from __future__ import annotations

from collections.abc import Sequence

from planes.errors import ConfigError, TokenizationError

NUM_BYTES = 256
BOS_TOKEN_ID = 256
EOS_TOKEN_ID = 257
PAD_TOKEN_ID = 258
MIN_VOCAB_SIZE = 259


class SimpleTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8, 256 begins, 257 ends, 258 pads.

    `vocab_size` may be larger than 259: a model may have wider logits; the ids above have no text.
    `encode` adds no special tokens, so `decode(encode(text)) == text`.
    """

    def __init__(self, vocab_size: int = MIN_VOCAB_SIZE) -> None:
        if vocab_size < MIN_VOCAB_SIZE:
            raise ConfigError(
                f"vocab_size of the simple tokenizer must be at least {MIN_VOCAB_SIZE}, "
                f"got {vocab_size}",
                field="vocab_size",
            )
        self._vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of `text`."""
        try:
            return list(text.encode())
        except UnicodeEncodeError as error:
            raise TokenizationError(f"the prompt is not valid Unicode: {error.reason}") from None

    def encode_plain(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of `text`."""
        return self.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the byte tokens; the others have none."""
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the token's one byte, or none."""
        if not 0 <= token_id < self._vocab_size:
            raise TokenizationError(
                f"token id must be 0 to {self._vocab_size - 1}, got {token_id}", field="token_ids"
            )
        return bytes((token_id,)) if token_id < NUM_BYTES else b""

    @property
    def vocab_size(self) -> int:
        """Every id is below it."""
        return self._vocab_size

    @property
    def bos_token_id(self) -> int:
        """256."""
        return BOS_TOKEN_ID

    @property
    def eos_token_id(self) -> int:
        """257."""
        return EOS_TOKEN_ID

    @property
    def pad_token_id(self) -> int:
        """258."""
        return PAD_TOKEN_ID
