"""Names of tool calls."""

from __future__ import annotations

import array
import hashlib
import string
from collections.abc import Sequence
from typing import Final

_LETTERS: Final = string.digits + string.ascii_uppercase + string.ascii_lowercase

_LENGTH: Final = 9
"""Templates of Mistral's models refuse ids of any other length, and all but letters and digits."""


class CallIds:
    """Names the calls of one request: the same ones again for the same prompt and seed.

    So a stream that is resumed goes on with the call that it had begun. Calls of other turns of a
    conversation have other names, because their prompts are others.
    """

    def __init__(self, prompt_token_ids: Sequence[int], seed: int | None) -> None:
        self._key = (prompt_token_ids, seed)
        self._digest: bytes | None = None  # few requests have calls

    def name(self, sample: int, call: int) -> str:
        """Return the id of a call of a sample."""
        if self._digest is None:
            prompt, seed = self._key
            numbers = array.array("Q", prompt).tobytes()
            self._digest = hashlib.sha256(numbers + str(seed).encode()).digest()
        digest = hashlib.sha256(self._digest + f"{sample}/{call}".encode()).digest()
        number, letters = int.from_bytes(digest, "big"), []
        for _ in range(_LENGTH):
            number, index = divmod(number, len(_LETTERS))
            letters.append(_LETTERS[index])
        return "".join(letters)
