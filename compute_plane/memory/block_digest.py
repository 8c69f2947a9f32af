"""What two planes compare instead of the contents of a KV block."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy.typing as npt


def block_digest(content: npt.NDArray[Any]) -> int:
    """Return 64 bits of BLAKE2b of an array's bytes, in C order."""
    digest = hashlib.blake2b(content.tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
