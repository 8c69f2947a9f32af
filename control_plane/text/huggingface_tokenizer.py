"""Tokenizers in Hugging Face's `tokenizer.json` format.

What a prompt becomes: the same as with transformers' `tokenizer(text)`. In particular the names of
special tokens inside a prompt (`<|im_start|>`) are read as those tokens: who builds prompts from
other people's text takes that out first, or sends token ids. The beginning-of-sequence token is
put in front if and only if the model's description says so (`add_bos_token`); the post-processor
of the file is not consulted, because the two often disagree and the model's own word counts.
"""

from __future__ import annotations

import functools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from control_plane.text.tokenizer import EACH_BYTE
from planes.errors import TokenizationError

if TYPE_CHECKING:
    import tokenizers


MAX_CHARACTERS_AT_ONCE: Final = 512
MAX_TOKENS_AT_ONCE: Final = 512
"""The library holds the interpreter for what it does alone, half a second for 100 kB, and lets go
of it for what it does in batches, which takes a turn of another thread."""

LONE_SURROGATE: Final = re.compile("[\ud800-\udfff]")
"""Half of a pair: Python's texts may have them, no other text may."""


def load_huggingface_tokenizer(
    tokenizer_json: bytes,
    *,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
    add_bos_token: bool = False,
) -> HuggingFaceTokenizer:
    """Read a `tokenizer.json`.

    The result's text is bytes concatenated where the file's decoder is byte-level, as with GPT-2,
    Llama 3, Qwen and SmolLM (`HuggingFaceByteTokenizer`), or SentencePiece's, as with Llama 2 and
    Mistral 7B (`SentencePieceTokenizer`). Raises TokenizationError.
    """
    import tokenizers  # here, because a simple tokenizer does without the library

    try:
        # The library's errors are bare `Exception`s; any of them means a file it cannot read.
        backend = tokenizers.Tokenizer.from_buffer(tokenizer_json)
        # What it pickles is the decoder's part of the file, which is long.
        decoder = {} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    except Exception as error:  # noqa: BLE001
        raise TokenizationError(f"the model's tokenizer.json cannot be read: {error}") from None
    backend.no_truncation()
    backend.no_padding()
    return _kind(decoder)(
        backend,
        bos_token_id=bos_token_id,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        add_bos_token=add_bos_token,
    )


def _kind(decoder: Any) -> type[HuggingFaceTokenizer]:  # noqa: ANN401 - parsed JSON
    """Return the class for a decoder."""
    if not isinstance(decoder, dict):
        return HuggingFaceTokenizer
    if decoder.get("type") == "ByteLevel":
        return HuggingFaceByteTokenizer
    steps = decoder.get("decoders")
    if steps == _PIECES:
        return SentencePieceTokenizer
    if steps == [*_PIECES, _ONE_SPACE]:
        return SpacedSentencePieceTokenizer
    return HuggingFaceTokenizer


_SPACE: Final = "\N{LOWER ONE EIGHTH BLOCK}"
_PIECES: Final = [
    {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_ONE_SPACE: Final = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


class HuggingFaceTokenizer:
    """A tokenizer of the `tokenizers` library, with the model's special ids."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        add_bos_token: bool = False,
    ) -> None:
        if add_bos_token and bos_token_id is None:
            raise TokenizationError("the model asks for a BOS token but names none")
        self._backend = backend
        self._vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self._bos_token_id = bos_token_id
        self._eos_token_id = eos_token_id
        self._pad_token_id = pad_token_id
        self._prefix = [bos_token_id] if add_bos_token and bos_token_id is not None else []

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt. Others run meanwhile, if it is long."""
        return [*self._prefix, *self.encode_plain(text)]

    def encode_plain(self, text: str) -> list[int]:
        """Return the token ids of a text without a BOS token in front."""
        try:
            if len(text) <= MAX_CHARACTERS_AT_ONCE:
                encoded = self._backend.encode(text, add_special_tokens=False)
            else:
                (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
            ids: list[int] = encoded.ids
        # The library raises bare `Exception`s (and TypeError for lone surrogates); none is ours.
        except Exception as error:  # noqa: BLE001
            if LONE_SURROGATE.search(text):
                raise TokenizationError(
                    "the prompt is not valid Unicode: surrogates not allowed"
                ) from None
            raise TokenizationError(f"the prompt cannot be tokenized: {error}") from None
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, special tokens left out."""
        return self._decode(tokens, skip_special_tokens=True)

    def decode_with_special(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, special tokens spelled as in the vocabulary."""
        return self._decode(tokens, skip_special_tokens=False)

    def _decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        ids = list(tokens)
        try:
            if len(ids) <= MAX_TOKENS_AT_ONCE:
                return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
            (text,) = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        # As in `encode`; also OverflowError for an id that is no u32.
        except Exception as error:  # noqa: BLE001
            raise TokenizationError(f"token ids cannot be decoded: {error}") from None
        return text

    def token_name(self, token_id: int) -> str | None:
        """Return how the vocabulary spells a token, special ones too; None: it has no such id."""
        return self._backend.id_to_token(token_id)

    @property
    def vocab_size(self) -> int:
        """One more than the highest id of the vocabulary."""
        return self._vocab_size

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text."""
        return self._bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text."""
        return self._eos_token_id

    @property
    def pad_token_id(self) -> int | None:
        """The token that fills up."""
        return self._pad_token_id


class _BytesTokenizer(HuggingFaceTokenizer, ABC):
    """A vocabulary in which every token is a string of bytes."""

    @functools.cached_property
    def _special(self) -> dict[int, bytes]:
        """Names of the special tokens."""
        added = self._backend.get_added_tokens_decoder()
        return {
            token_id: token.content.encode() for token_id, token in added.items() if token.special
        }

    @functools.cached_property
    def _bytes(self) -> dict[int, bytes]:
        """Those of the tokens that were asked for, and of the special ones."""
        return dict.fromkeys(self._special, b"")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token stands for; none for special tokens and unused ids."""
        known = self._bytes.get(token_id)
        if known is None:
            if token_id < 0:
                raise TokenizationError(f"token id must not be negative, got {token_id}")
            known = self._bytes[token_id] = self._look_up(token_id)
        return known

    @abstractmethod
    def _look_up(self, token_id: int) -> bytes:
        """Return the bytes of a token that is not special."""


class HuggingFaceByteTokenizer(_BytesTokenizer):
    """A byte-level vocabulary.

    It spells each byte as one printable character (GPT-2's `bytes_to_unicode`). A token with any
    other character in it is an added one and stands for itself.
    """

    def _look_up(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes(_BYTE_OF_CHARACTER[character] for character in token)
        except KeyError:
            return token.encode()


class SentencePieceTokenizer(_BytesTokenizer):
    """SentencePiece's BPE with byte fallback.

    The vocabulary spells a space as U+2581, and `<0x0A>` is one byte. What is decoded is
    SentencePiece's: the library spoils the characters beside a byte that is no text (to it a run of
    such tokens is text or not as a whole), so that later tokens would change earlier text.

    `adds_space`: whether encoding puts a space in front of a text.
    """

    adds_space = False

    def _look_up(self, token_id: int) -> bytes:
        piece = self.token_name(token_id) if token_id < self.vocab_size else None
        if piece is None:
            return b""
        if _BYTE_PIECE.fullmatch(piece):
            return bytes.fromhex(piece[3:5])
        return piece.replace(_SPACE, " ").encode()

    def _decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        pieces = [self.token_bytes(token_id) for token_id in tokens]
        if not skip_special_tokens:
            pieces = [
                self._special.get(token_id, piece)
                for token_id, piece in zip(tokens, pieces, strict=True)
            ]
        data = b"".join(pieces)
        if self.adds_space:
            data = data.removeprefix(b" ")
        return data.decode(errors=EACH_BYTE)


class SpacedSentencePieceTokenizer(SentencePieceTokenizer):
    """The same where encoding puts a space in front of a text."""

    adds_space = True


_BYTE_PIECE: Final = re.compile("<0x[0-9A-Fa-f]{2}>")


def _byte_of_character() -> dict[str, int]:
    """Invert GPT-2's `bytes_to_unicode`.

    Printable Latin-1 bytes are spelled as themselves, the 68 others as U+0100 onwards in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()
