"""Sets of tokens as bits."""

from __future__ import annotations

import pytest

from control_plane.core.token_masks import all_but, of_both


@pytest.mark.parametrize("vocab_size", [1, 7, 8, 9, 259])
def test_all_but_some_are_all_others_and_no_bit_beyond(vocab_size: int) -> None:
    found = all_but([0, 0], vocab_size)
    assert len(found) == (0 if vocab_size == 1 else -(-vocab_size // 8))
    bits = [token for token in range(8 * len(found)) if found[token // 8] >> token % 8 & 1]
    assert bits == list(range(1, vocab_size))


def test_what_two_share_and_the_first_where_they_share_nothing() -> None:
    assert of_both(b"\x0f\x80", b"\x3c\x80") == b"\x0c\x80"
    assert of_both(b"\x01\x00", b"\xfe\xff") == b"\x01\x00"
