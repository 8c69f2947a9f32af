"""The words that a team of threads meets by (`kernels.cpu.step`); without the compiler."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

LINE_WORDS: Final = 8
LINE_BYTES: Final = 64
ENTRY_WORDS: Final = 2
COUNT_BITS: Final = 12
COUNT_MASK: Final = (1 << COUNT_BITS) - 1
MAX_CHUNKS: Final = COUNT_MASK
"""Chunks of one operation at most."""


class BoardWord(IntEnum):
    """The int64 words of a team's board: a line that is only read while a step runs, then sleep."""

    GENERATION = 0
    """Odd: the step under way. Even: none, the words below may change. LEAVE ends the workers."""
    ENTRIES = 1
    NUM_ENTRIES = 2
    PROGRESS = 3
    NUM_WORKERS = 4
    SPINS = 5
    """Looks at GENERATION before an idle worker goes to sleep."""
    SLEEP = 8
    """Line w from here: worker w's words, ASLEEP, READ_END and WRITE_END of its pipe."""


ASLEEP: Final = 0
READ_END: Final = 1
WRITE_END: Final = 2
WAKE_BYTE: Final = 3
"""Where the byte that travels through the pipe lies."""
LEAVE: Final = -1
