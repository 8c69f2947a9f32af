"""Operations: the kernels a step is made of, called through a table of numbers.

A step is a table of *operation records*, int64 words, that threads walk through together
(`kernels.cpu.step`). A record names a kernel by the address of its machine code, says into how many
*chunks* its work is cut, and holds its operands: addresses, sizes, strides. So one interpreter runs
every model, and a kernel knows nothing of the step around it.

    record   ┌ 0 KERNEL ┬ 1 CHUNKS ┬ 2 … operands, named beside each kernel ┐   RECORD_WORDS words

What differs from step to step stands in a *step header*, the words of `StepWord`; a record's CHUNKS
is a number of chunks, or, negative, −w: the number stands in word w of the header.

A kernel is a module-level function decorated with `@operation`, or what a factory returns, given to
`define` (`kernels.cpu.compiled`):

    void kernel(record, header, chunk, num_chunks, worker)

`record`, `header`: addresses. It does part `chunk` of `num_chunks` of its work, any thread any
chunk, in any order, each exactly once; the parts must not write the same bytes. `worker` is the
number of the calling thread, for scratch memory (`compiled.scratch`). What a part computes must not
depend on how the work is cut: that is what makes results equal to the bit on any number of threads.

Kernels check nothing: addresses and sizes were checked when the table and the header were made.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from enum import IntEnum
from typing import Final, cast

from kernels.cpu.machine_code import find_code, keep_code, load_code

RECORD_WORDS: Final = 24
"""int64 words of an operation record."""
KERNEL: Final = 0
CHUNKS: Final = 1
FIRST_OPERAND: Final = 2
FETCH: Final = 22
FETCH_BYTES: Final = 23
"""Memory that a later operation will read, weights mostly: threads that wait for this one to be
completed fetch it into their caches meanwhile. 0 bytes: nothing."""


class StepWord(IntEnum):
    """The int64 words of a step header; addresses are of C-contiguous arrays.

    T: tokens of this header's piece of the step, K: samples, O: rows of logits, I: attention items,
    R: rows whose states go on.
    """

    NUM_TOKENS = 0
    FIRST_TOKEN = 1
    """Index of the piece's first token in arrays that hold all tokens of the step."""
    TOKEN_IDS = 2
    """int32 [T]."""
    POSITIONS = 3
    """int32 [T]."""
    KV_PLACES = 4
    """int64 [T]: block · block_size + offset of each token's keys and values."""
    BLOCK_TABLES = 5
    """int32 [S, TABLE_WIDTH], all rows of the step."""
    TABLE_WIDTH = 6
    ATTENTION_ITEMS = 7
    """int32 [I, 4]: place of the first token in ATTENTION_TOKENS, number of tokens, row of
    BLOCK_TABLES, segment (`kernels.cpu.operands.Item`)."""
    NUM_ATTENTION_ITEMS = 8
    NUM_OUT_ROWS = 9
    OUT_TOKENS = 10
    """int64 [O]: the token of the step (not of the piece) whose logits row o holds."""
    NUM_SAMPLES = 11
    SAMPLES = 12
    """int64 [K, SAMPLE_WORDS] (`kernels.cpu.sampling`)."""
    SCRATCH = 13
    SCRATCH_BYTES = 14
    """Scratch memory of worker w: SCRATCH_BYTES bytes from SCRATCH + w · SCRATCH_BYTES, aligned to
    64 bytes, nobody else's, of unknown content."""
    TOKEN_CHUNKS = 16
    """Chunks of an operation that goes token by token: chunk c of n has tokens T·c/n to
    T·(c+1)/n − 1."""
    ATTENTION_CHUNKS = 17
    """Chunks of attention: NUM_ATTENTION_ITEMS · kv heads."""
    OUT_CHUNKS = 18
    """Like TOKEN_CHUNKS, over the rows of logits."""
    SAMPLE_CHUNKS = 19
    """One a sample."""
    ATTENTION_MERGES = 20
    """int32 [NUM_ATTENTION_MERGES, 2]: tokens whose context is cut into segments
    (`kernels.cpu.operands.Merge`)."""
    NUM_ATTENTION_MERGES = 21
    MERGE_CHUNKS = 22
    """Chunks of `merge_attention`: 0 where there is nothing to merge."""
    NUM_EXPERT_ROWS = 23
    """Of a mixture of experts: tokens times the experts of each."""
    EXPERT_ROW_CHUNKS = 24
    """Like TOKEN_CHUNKS, over these rows."""
    ZERO = 15
    """Always 0: the first row where an operand names a word for it and rows begin at 0."""
    STATE_ROWS = 25
    """int32 [R, 4]: first token in the piece, number of tokens (at least 1), state, whether it
    begins empty (`kernels.cpu.state_operands.StateRow`)."""
    NUM_STATE_ROWS = 26
    STATE_CHUNKS = 27
    """Chunks of what goes through states: NUM_STATE_ROWS · parts of a state."""
    TAKEN_TOKENS = 28
    """int64 [T]: of which token of the step each of these is a copy (`take_rows`)."""
    ADAPTER_RUNS = 29
    """int32 [NUM_ADAPTER_RUNS, 3]: runs of tokens with one adapter
    (`kernels.cpu.adapter_operands.AdapterRun`)."""
    NUM_ADAPTER_RUNS = 30
    ADAPTER_CHUNKS = 31
    """Chunks of what adapters add: 0 where no token has one."""
    ATTENTION_TOKENS = 32
    """int32: tokens of the piece, in an order in which those of each item follow each other."""
    PARTIAL_SLOTS = 33
    """int32 [T]: where the partials of each token begin whose context is cut into segments."""


HEADER_WORDS: Final = 34


class Operation:
    """A kernel that records can name; its machine code is loaded, or made, when first needed.

    `name`: MODULE.FUNCTION below `kernels.cpu`; elsewhere MODULE:FUNCTION. Those are compiled in
    every process, because machine code is kept under a hash of the sources of kernels. A process
    that finds all it needs never imports the compiler.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._address: int | None = None

    @property
    def address(self) -> int:
        """Address of the machine code, which stays there for good. Raises ConfigError."""
        if self._address is None and not self.load_kept():
            # Numba takes half a second to import.
            from kernels.cpu.compiled import object_code

            self.take(object_code(self.name))
        assert self._address is not None
        return self._address

    def to_function(self, num_arguments: int) -> Callable[..., None]:
        """Return what calls it with so many integers, without the interpreter lock."""
        kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * num_arguments)
        return cast("Callable[..., None]", kind(self.address))

    def load_kept(self) -> bool:
        """Load the machine code that is kept; return whether it is loaded. Raises ConfigError."""
        if self._address is None and self._is_kept:
            code = find_code(self.name)
            if code is not None:
                self._address = load_code(self.name, code)
        return self._address is not None

    def take(self, code: bytes) -> None:
        """Load an object file that was made of it elsewhere, and keep it. Raises ConfigError."""
        if self._is_kept:
            keep_code(self.name, code)
        self._address = load_code(self.name, code)

    @property
    def _is_kept(self) -> bool:
        return ":" not in self.name

    def __repr__(self) -> str:
        return f"<operation {self.name}>"


@functools.cache
def operation_named(name: str) -> Operation:
    """Return the process's one operation of a name, whether its module is imported or not."""
    return Operation(name)
