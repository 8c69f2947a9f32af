"""Incremental detokenization: tokens in, whole characters out.

Two promises, for every tokenizer whose text of more tokens begins with its text of fewer (but for
characters not yet whole): what was emitted is never taken back, and all that was emitted together
is `decode` of all tokens, without the characters at its end that are not whole. (A tokenizer that
puts a space in front of every text takes one away in `decode`. What a model generates is not such
a text but goes on with one: its first space is the model's own, and stays.) A character split
over tokens is held back until it is whole. So U+FFFD appears only where the model itself wrote
bytes that are no text and went on; never because a delta, or the last token allowed, cut a
character in two. (The token ids of a response always hold everything.)
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final, Protocol

from control_plane.text.tokenizer import (
    EACH_BYTE,
    REPLACEMENT_CHARACTER,
    ByteTokenizer,
    PieceTokenizer,
    Tokenizer,
)


class Detokenizer(Protocol):
    """The text side of one generation; used by one task at a time."""

    def push(self, tokens: Iterable[int]) -> str:
        """Take the next tokens and return the text that is certain now, maybe none."""
        ...

    def finish(self) -> str:
        """Return what is left of the text; an incomplete character at its end is dropped."""
        ...


NONE: Final[Mapping[int, str]] = MappingProxyType({})


def make_detokenizer(tokenizer: Tokenizer, spelled: Mapping[int, str] = NONE) -> Detokenizer:
    """Return the detokenizer that fits the tokenizer. `spelled`: as of `SpellingDetokenizer`."""

    def make() -> Detokenizer:
        if isinstance(tokenizer, ByteTokenizer):
            return ByteDetokenizer(tokenizer)
        return WindowDetokenizer(tokenizer)

    return SpellingDetokenizer(make, spelled) if spelled else make()


class ByteDetokenizer:
    """For vocabularies of byte strings: an incremental UTF-8 decoder, at most 3 bytes behind."""

    def __init__(self, tokenizer: ByteTokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        errors = EACH_BYTE if isinstance(tokenizer, PieceTokenizer) else "replace"
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors=errors)

    def push(self, tokens: Iterable[int]) -> str:
        """Take the next tokens and return the text that is certain now."""
        return self._decoder.decode(b"".join(map(self._token_bytes, tokens)))

    def finish(self) -> str:
        """Return U+FFFD for held bytes that are no beginning of a character, else nothing.

        Python's decoder holds back the bytes of a surrogate (ED A0) as if a third could save them.
        """
        held, _ = self._decoder.getstate()
        try:
            held.decode()
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                return self._decoder.decode(b"", final=True)
        return ""


class WindowDetokenizer:
    """For any tokenizer: decodes a short window of the latest tokens again and again.

    The window starts at a token before which everything was emitted, and holds the tokens of the
    last emitted text as context (decoders strip the space of a *first* piece). Text that ends in
    U+FFFD is held back: it may be a character whose rest is still to come.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._tokens: list[int] = []
        self._window_start = 0
        self._context_end = 0
        self._context_text = ""
        self._num_tried = 0
        self._emitted: list[str] = []

    def push(self, tokens: Iterable[int]) -> str:
        """Take the next tokens and return the text that is certain now."""
        self._tokens.extend(tokens)
        # A long run of undecodable tokens is tried again only when it has grown by half, so that
        # the total work stays linear in the number of tokens.
        num_held_back = len(self._tokens) - self._context_end
        if num_held_back < self._num_tried + self._num_tried // 2 or not num_held_back:
            return ""
        text = self._decode(self._tokens[self._window_start :])
        if text.endswith(REPLACEMENT_CHARACTER) or not text.startswith(self._context_text):
            self._num_tried = num_held_back
            return ""
        delta = text[len(self._context_text) :]
        if not delta:
            self._num_tried = num_held_back
            return ""
        self._num_tried = 0
        self._window_start = self._context_end
        self._context_end = len(self._tokens)
        self._context_text = self._decode(self._tokens[self._window_start :])
        self._emitted.append(delta)
        return delta

    def finish(self) -> str:
        """Return what `decode` of all tokens has beyond the text already emitted."""
        emitted = "".join(self._emitted)
        text = self._decode(self._tokens).rstrip(REPLACEMENT_CHARACTER)
        return text[len(emitted) :] if text.startswith(emitted) else ""


class SpellingDetokenizer:
    """Spells some special tokens out, which have no text otherwise; the text around is as it was.

    `spelled`: their ids and names. A character does not go on behind such a token.
    """

    def __init__(self, make: Callable[[], Detokenizer], spelled: Mapping[int, str]) -> None:
        self._make = make
        self._spelled = spelled
        self._between = make()

    def push(self, tokens: Iterable[int]) -> str:
        """Take the next tokens and return the text that is certain now."""
        texts: list[str] = []
        others: list[int] = []
        for token_id in tokens:
            name = self._spelled.get(token_id)
            if name is None:
                others.append(token_id)
                continue
            texts += (self._between.push(others), self._between.finish(), name)
            others, self._between = [], self._make()
        texts.append(self._between.push(others))
        return "".join(texts)

    def finish(self) -> str:
        """Return what is left of the text."""
        return self._between.finish()
