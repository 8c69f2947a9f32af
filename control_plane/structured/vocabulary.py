"""The model's tokens as the grammar library wants them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from control_plane.core.structured_outputs import FIELD
from control_plane.text.tokenizer import ByteTokenizer, PlainTokenizer
from planes.errors import ValidationError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from control_plane.text.tokenizer import Tokenizer


class Vocabulary:
    """The bytes of each token; the attributes are those of llguidance's `TokenizerWrapper`.

    Special tokens and ids that the tokenizer does not have, up to the width of the logits, come in
    no text; the library wants each to have a name. `asked_by`: the parameter that wants all this.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        asked_by: str = FIELD,
    ) -> None:
        if not isinstance(tokenizer, ByteTokenizer) or not isinstance(tokenizer, PlainTokenizer):
            raise ValidationError(
                f"{asked_by} must be unset: what bytes the tokens of this tokenizer stand "
                "for is not known",
                field=asked_by,
            )
        if not eos_token_ids:
            raise ValidationError(
                f"{asked_by} must be unset: this model has no end token",
                field=asked_by,
            )
        self._tokenizer = tokenizer
        known = tokenizer.vocab_size
        self.tokens = [
            tokenizer.token_bytes(token_id) if token_id < known else b""
            for token_id in range(vocab_size)
        ]
        self.special_token_ids = [i for i, token in enumerate(self.tokens) if not token]
        for token_id in self.special_token_ids:  # without a name, all of them would be the same one
            self.tokens[token_id] = f"<[{token_id}]>".encode()
        self.eos_token_id = eos_token_ids[0]
        self._made: LLTokenizer | None = None

    def make(self, eos_token_ids: Sequence[int]) -> LLTokenizer:
        """Return the library's tokenizer: about a third of a second for 49 000 tokens."""
        from llguidance import LLTokenizer

        self._made = LLTokenizer(
            self,  # type: ignore[arg-type] # it has the attributes, and needs no more
            n_vocab=len(self.tokens),
            eos_token=list(eos_token_ids),
        )
        return self._made

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a piece of an answer that a grammar leaves no choice about.

        Where the model's tokenizer would spell it with other bytes (a space in front), the longest
        tokens first. Of a piece with a byte that no token has (SmolLM2's lack some), those before
        it: what would come behind it does not follow.
        """
        tokens: list[int] = self._tokenizer.encode_plain(text)
        if self._made is None or self._are_all(tokens, text):
            return tokens
        tokens = self._made.greedy_tokenize(text)
        if self._are_all(tokens, text):
            return tokens
        return self._beginning_of(tokens, text.encode())

    def _are_all(self, tokens: Sequence[int], text: str) -> bool:
        return b"".join(self.tokens[i] for i in tokens) == text.encode()

    def _beginning_of(self, tokens: Sequence[int], content: bytes) -> list[int]:
        """Return the first tokens, those that are what the content begins with."""
        place, beginning = 0, []
        for token in tokens:
            if not content.startswith(self.tokens[token], place):
                break
            place += len(self.tokens[token])
            beginning.append(token)
        return beginning
