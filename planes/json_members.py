"""JSON objects each member of which is said once: of two, `json` takes the later without a word."""

from __future__ import annotations


class RepeatedKeyError(ValueError):
    """An object has a key twice; `key` says which."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key!r} is there twice")
        self.key = key


def members_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Make an object, as `object_pairs_hook` of `json`. Raises RepeatedKeyError."""
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise RepeatedKeyError(key)
            seen.add(key)
    return members
