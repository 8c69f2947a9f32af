"""Operations: the kernels a step is made of, called through a table of numbers.

A step is a table of *operation records*, int64 words, that threads walk through together
(`kernels.cpu.step`). A record names a kernel by the address of its machine code, says into how many
*chunks* its work is cut, and holds its operands: addresses, sizes, strides. So one interpreter runs
every model, and a kernel knows nothing of the step around it.

    record   ┌ 0 KERNEL ┬ 1 CHUNKS ┬ 2 … operands, named beside each kernel ┐   RECORD_WORDS words

What differs from step to step stands in a *step header*, the words of `StepWord`; a record's CHUNKS
is a number of chunks, or, negative, −w: the number stands in word w of the header.

A kernel is a module-level function decorated with `@operation`:

    void kernel(record, header, chunk, num_chunks, worker)

`record`, `header`: addresses. It does part `chunk` of `num_chunks` of its work, any thread any
chunk, in any order, each exactly once; the parts must not write the same bytes. `worker` is the
number of the calling thread, for scratch memory (`scratch`). What a part computes must not depend
on how the work is cut: that is what makes results equal to the bit on any number of threads.

Kernels check nothing: addresses and sizes were checked when the table and the header were made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Final, TypeVar

import numba
from llvmlite import ir
from numba import types

from kernels.cpu import instruction_set
from kernels.cpu.emitted import emitted
from kernels.cpu.vector_ir import F32, I8, I16, I32, I64, Builder, Value, i64, load

Function = TypeVar("Function", bound=Callable[..., object])

RECORD_WORDS: Final = 24
"""int64 words of an operation record."""
KERNEL: Final = 0
CHUNKS: Final = 1
FIRST_OPERAND: Final = 2
FETCH: Final = 22
FETCH_BYTES: Final = 23
"""Memory that a later operation will read, weights mostly: threads that wait for this one to be
completed fetch it into their caches meanwhile. 0 bytes: nothing."""

SIGNATURE: Final = types.void(types.int64, types.int64, types.int64, types.int64, types.int64)
EXACT_ORDER: Final = {"contract"}
"""Fused multiply-add allowed; every sum runs in the order that is written."""
FREE_ORDER: Final = {"contract", "reassoc", "nsz"}
"""A sum may be split into vector lanes. Only for loops whose length the row alone decides."""


class StepWord(IntEnum):
    """The int64 words of a step header; addresses are of C-contiguous arrays.

    T: tokens of this header's piece of the step, K: samples, O: rows of logits, I: attention items.
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
    """int32 [I, 4]: first token in the piece, number of tokens, row of BLOCK_TABLES, segment
    (`kernels.cpu.attention_context.Item`)."""
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
    """int32 [NUM_ATTENTION_MERGES, 4]: tokens whose context is shared among items
    (`kernels.cpu.attention_context.Merge`)."""
    NUM_ATTENTION_MERGES = 21
    MERGE_CHUNKS = 22
    """Chunks of `merge_attention`: 0 where there is nothing to merge."""
    ZERO = 15
    """Always 0: the first row where an operand names a word for it and rows begin at 0."""


HEADER_WORDS: Final = 24


class Operation:
    """A kernel that records can name. Compiled, or loaded from Numba's cache, when first needed.

    The function must be a module-level one without closure variables: Numba's cache knows a
    function by its place and source. Everything it calls is compiled into it.
    """

    def __init__(self, function: Callable[..., None], fastmath: set[str]) -> None:
        self.function = function
        self.name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        self._fastmath = fastmath
        self._compiled: Any = None

    @property
    def is_compiled(self) -> bool:
        """Whether `address` is there without compiling."""
        return self._compiled is not None

    @property
    def address(self) -> int:
        """Address of the machine code, which lives as long as this object."""
        if self._compiled is None:
            instruction_set.selected_instruction_set()
            compiler = numba.cfunc(
                SIGNATURE, nopython=True, cache=True, error_model="numpy", fastmath=self._fastmath
            )
            self._compiled = compiler(self.function)
        return int(self._compiled.address)

    def __repr__(self) -> str:
        return f"<operation {self.name}>"


def operation(*, free_order: bool = False) -> Callable[[Callable[..., None]], Operation]:
    """Make a module-level function an `Operation`."""
    return lambda function: Operation(function, FREE_ORDER if free_order else EXACT_ORDER)


def inlined(*, free_order: bool = False) -> Callable[[Function], Function]:
    """Compile a function that operations call; it becomes part of their machine code.

    A function made by a factory may use numbers, flags, strings, emitted functions and other
    inlined functions of it; TypeError for anything else, because they become part of its name.
    """
    decorate: Callable[[Function], Function] = numba.njit(
        nogil=True, error_model="numpy", fastmath=FREE_ORDER if free_order else EXACT_ORDER
    )

    def named(function: Function) -> Function:
        _name_by_closure(function)
        return decorate(function)

    return named


def _name_by_closure(function: Callable[..., object]) -> None:
    """Give a function made by a factory a name that no other function of the factory has.

    Machine code that comes from Numba's cache is linked by name. What Numba adds to tell functions
    of one name apart counts the functions of the process that compiled them: two that were compiled
    by different processes would be taken for each other.
    """
    if function.__closure__:
        parts = [_described(cell.cell_contents) for cell in function.__closure__]
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        function.__qualname__ += f"_{digest[:16]}"


def _described(value: object) -> str:
    """Return a text that is the same in every process."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    function = getattr(value, "py_func", None) or getattr(value, "_defn", None)
    if function is None:
        raise TypeError(f"a compiled function's closure cannot hold a {type(value).__name__}")
    return f"{function.__module__}.{getattr(function, '__qualname__', '')}:{function.__name__}"


@emitted(types.int64, types.int64, types.int64)
def word(builder: Builder, address: Value, index: Value) -> Value:
    """Return int64 word `index` of the words at `address`."""
    return load(builder, builder.add(address, builder.shl(index, i64(3))), I64, align=8)


def _elements_at(element: types.Type, stored_as: ir.Type) -> Any:  # noqa: ANN401 - Numba's objects
    """Return what makes an address a pointer: `carray(float32_at(address), (rows, columns))`."""

    def pointer(builder: Builder, address: Value) -> Value:
        return builder.inttoptr(address, stored_as.as_pointer())

    return emitted(types.CPointer(element), types.int64)(pointer)


float32_at = _elements_at(types.float32, F32)
float64_at = _elements_at(types.float64, ir.DoubleType())
int64_at = _elements_at(types.int64, I64)
uint64_at = _elements_at(types.uint64, I64)
int32_at = _elements_at(types.int32, I32)
uint16_at = _elements_at(types.uint16, I16)
int8_at = _elements_at(types.int8, I8)
uint8_at = _elements_at(types.uint8, I8)


@inlined()
def scratch(header: int, worker: int) -> int:
    """Return the address of the calling worker's scratch memory."""
    first: int = word(header, StepWord.SCRATCH)
    size: int = word(header, StepWord.SCRATCH_BYTES)
    return first + worker * size
