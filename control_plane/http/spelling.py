"""Tokens as log-probabilities name them: text where they are text, bytes where they are not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from control_plane.text.detokenizer import Detokenizer, make_detokenizer
from control_plane.text.tokenizer import ByteTokenizer, PieceTokenizer, Tokenizer


@runtime_checkable
class NamesTokens(Protocol):
    """A tokenizer whose vocabulary spells every token, special ones too."""

    def token_name(self, token_id: int) -> str | None:
        """Return the spelling; None: there is no such token."""
        ...


class SpelledToken(NamedTuple):
    """A token's name, and its bytes (None for one that stands for no text)."""

    text: str
    utf8: list[int] | None


class Speller:
    r"""Names the tokens of one tokenizer.

    A token that is part of a character is `bytes:\xe2\x80`, as OpenAI writes it; a special one
    has the name its vocabulary gives it, or else `token_id:2`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, SpelledToken] = {}

    def spell(self, token_id: int) -> SpelledToken:
        """Return a token's name."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._look_up(token_id)
        return known

    def ruler(self, start: int = 0) -> TextRuler:
        """Return a new measure of text that grows token by token, and begins at `start`."""
        tokenizer = self._tokenizer
        adds_space = isinstance(tokenizer, PieceTokenizer) and tokenizer.adds_space
        return TextRuler(self, make_detokenizer(tokenizer), start, adds_space=adds_space)

    def _look_up(self, token_id: int) -> SpelledToken:
        tokenizer = self._tokenizer
        if isinstance(tokenizer, ByteTokenizer):
            data = tokenizer.token_bytes(token_id)
        else:
            data = tokenizer.decode([token_id]).encode()
        if not data:
            name = tokenizer.token_name(token_id) if isinstance(tokenizer, NamesTokens) else None
            return SpelledToken(name or f"token_id:{token_id}", None)
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        return SpelledToken(text, list(data))


class TextRuler:
    """Says where in a growing text each of its tokens begins, in characters.

    `adds_space`: encoding puts a space in front of a text, and maybe behind every special token.
    """

    def __init__(
        self, speller: Speller, detokenizer: Detokenizer, start: int, *, adds_space: bool = False
    ) -> None:
        self._speller = speller
        self._detokenizer = detokenizer
        self._length = start
        self._adds_space = adds_space

    def offsets(self, token_ids: Sequence[int], text: str = "") -> list[int]:
        """Take the next tokens; where each begins. Tokens of one character begin at it.

        `text`: what they were made from, where that is known: it may spell special tokens out,
        which otherwise have no length.
        """
        offsets = []
        for token_id in token_ids:
            offsets.append(self._length)
            added = self._detokenizer.push((token_id,))
            self._length += len(added)
            if text:
                spaces = added[: len(added) - len(added.lstrip(" "))]
                if self._adds_space and not text.startswith(spaces, offsets[-1]):
                    self._length -= 1
                name, utf8 = self._speller.spell(token_id)
                if utf8 is None and text.startswith(name, self._length):
                    self._length += len(name)
        return offsets
