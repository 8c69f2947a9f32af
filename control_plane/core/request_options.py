"""What a request is asked with besides its prompt and its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from planes.errors import ValidationError

MAX_PRIORITY: Final = 2**31 - 1
MAX_SALT_BYTES: Final = 256


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a caller says of a request besides its prompt and its parameters.

    Nothing of it but `adapter` changes a token.

    `priority`: lower ones are served first, −2^31 to 2^31 − 1. `cache_salt`: only requests of the
    same salt share cached tokens, at most 256 bytes. `name`: what it is called where requests are
    listed. `adapter`: of those of the compute plane, counted from 1; 0: the model as it is.
    """

    priority: int = 0
    cache_salt: str = ""
    name: str = ""
    adapter: int = 0

    def validate(self) -> None:
        """Raise ValidationError naming the first field out of range, its limit and its value."""
        priority, salt = self.priority, self.cache_salt
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ValidationError(
                f"priority must be an integer, got {priority!r}", field="priority"
            )
        if not -MAX_PRIORITY - 1 <= priority <= MAX_PRIORITY:
            raise ValidationError(
                f"priority must be in {-MAX_PRIORITY - 1} to {MAX_PRIORITY}, got {priority}",
                field="priority",
            )
        if not isinstance(salt, str):
            raise ValidationError(f"cache_salt must be text, got {salt!r}", field="cache_salt")
        try:
            size = len(salt.encode()) if len(salt) <= MAX_SALT_BYTES else len(salt)
        except UnicodeEncodeError as error:
            raise ValidationError(
                f"cache_salt is not valid Unicode (at character {error.start})", field="cache_salt"
            ) from None
        if size > MAX_SALT_BYTES:
            raise ValidationError(
                f"cache_salt must have at most {MAX_SALT_BYTES} bytes, got {size}",
                field="cache_salt",
            )


PLAIN: Final = RequestOptions()
