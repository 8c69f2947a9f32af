"""The twins of our instructions: what a kernel's names mean while the simulator runs it.

Each twin has the signature of its instruction. Those that need the thread or its warp get the
`Device` first; `twins_of` binds them. Special functions are exact where the machine approximates.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numba
import numpy as np

from kernels.cuda.instructions import (
    across_blocks,
    addresses,
    async_copies,
    atomics,
    conversions,
    early_launch,
    elements,
    exact_float32,
    exact_float64,
    tiles,
    vectors,
    whole_scales,
)
from tests.simt import tensor
from tests.simt.device import Device
from tests.simt.eight_bits import EIGHT_BIT_TWINS
from tests.simt.memory import CheckedArray, SharedArray
from tests.simt.small_floats import SMALL_FLOAT_TWINS
from tests.simt.small_integers import SMALL_INTEGER_TWINS
from tests.simt.threads import WarpFunction

Words = CheckedArray  # a local array [n, 4] of uint32


def _narrow_bfloat16(x: np.float32) -> np.uint16:
    """Round to nearest, ties to even; NaN stays NaN."""
    if np.isnan(x):
        return np.uint16(0x7FFF)
    bits = int(np.float32(x).view(np.uint32))
    return np.uint16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


def _narrow_float16(x: np.float32) -> np.uint16:
    """Round to nearest, ties to even; what is too large becomes infinity."""
    return np.float32(x).astype(np.float16).view(np.uint16)


def _widen_bfloat16(bits: Any) -> np.float32:
    return np.uint32(int(bits) << 16).view(np.float32)


def _widen_float16(bits: Any) -> np.float32:
    return np.float32(np.uint16(bits).view(np.float16))


def _pack(narrow: Callable[[np.float32], np.uint16], low: Any, high: Any) -> np.uint32:
    return np.uint32(int(narrow(low)) | int(narrow(high)) << 16)


def _half(widen: Callable[[Any], np.float32], shift: int, word: Any) -> np.float32:
    return widen(int(word) >> shift & 0xFFFF)


def _multiply_add(a: Any, b: Any, c: Any) -> np.float32:
    # The product is exact in float64; the sum is rounded twice only where it makes no difference
    # but in one of 2^29 cases.
    return np.float32(np.float64(a) * np.float64(b) + np.float64(c))


def _maximum(a: Any, b: Any) -> np.float32:
    a, b = np.float32(a), np.float32(b)
    return a if a >= b or np.isnan(b) else b  # fmax gives NaN beside a signalling one


def _load_words(num_words: int, words: Words, i: Any, source: CheckedArray, element: Any) -> None:
    words.write_row(i, source.read_words(element, num_words))


def _store_words(num_words: int, target: CheckedArray, element: Any, words: Words, i: Any) -> None:
    target.write_words(element, words.read_row(i, num_words))


def _load_fresh_words(
    num_words: int, words: Words, i: Any, source: CheckedArray, element: Any
) -> None:
    words.write_row(i, source.read_words(element, num_words, is_fresh=True))


def _fence(device: Device) -> None:
    device.thread().fence()


def _wait_for_previous(device: Device) -> None:
    device.thread().has_waited = True


def _load_word(source: CheckedArray, element: Any) -> np.uint32:
    return source.read_words(element, 1)[0]


def _store_word(target: CheckedArray, element: Any, word: Any) -> None:
    target.write_words(element, np.array([word], np.uint32))


def _load_floats(
    widen: Callable[[Any], Any], values: CheckedArray, i: Any, source: CheckedArray, element: Any
) -> None:
    values.write_row(i, widen(source.read_words(element, 4)))


def _store_floats(
    narrow: Callable[[Any], Any], target: CheckedArray, element: Any, values: CheckedArray, i: Any
) -> None:
    length = 16 // np.dtype(narrow(np.zeros(1, np.float32)).dtype).itemsize
    target.write_words(element, narrow(values.read_row(i, length)).view(np.uint32))


def _choose_bytes(a: Any, b: Any, selector: Any) -> np.uint32:
    source = int(a).to_bytes(4, "little") + int(b).to_bytes(4, "little")
    chosen = bytes(source[(int(selector) >> 4 * i) & 7] for i in range(4))
    return np.uint32(int.from_bytes(chosen, "little"))


def _multiply_tiles(
    device: Device, function: WarpFunction, sums: CheckedArray, i: Any, a: Any, b: Any
) -> None:
    operand = (sums.read_row(i, 4), a, b)
    sums.write_row(i, device.warp("multiply_tiles", sys._getframe(1), operand, function))


def _load_tiles(
    device: Device, function: WarpFunction, words: Words, i: Any, shared: SharedArray, element: Any
) -> None:
    row = shared.read_words(element, 4)
    words.write_row(i, device.warp("load_tiles", sys._getframe(1), row, function))


def _transpose_tile(device: Device, word: Any) -> np.uint32:
    return device.warp("transpose_tile", sys._getframe(1), word, tensor.transpose_tile)


def _copy_async(
    device: Device,
    num_words: int,
    shared: SharedArray,
    element: Any,
    source: CheckedArray,
    source_element: Any,
    is_wanted: Any,
) -> None:
    words = np.zeros(num_words, np.uint32)
    if is_wanted:
        words = source.read_words(source_element, num_words)
    device.thread().copies.append(shared.start_copy(element, words))


def _commit_copies(device: Device) -> None:
    thread = device.thread()
    thread.copy_groups.append(thread.copies)
    thread.copies = []


def _wait_for_copies(device: Device, under_way: int) -> None:
    groups = device.thread().copy_groups
    while len(groups) > under_way:
        for land in groups.pop(0):
            land()


def _narrow_all(narrow: Callable[[Any], np.uint16], row: np.ndarray) -> np.ndarray:
    return np.array([narrow(x) for x in row], np.uint16)


# dtype → a vector's words to float32, and float32 to the vector's elements.
_WIDEN: dict[str, Callable[[Any], Any]] = {
    "float32": lambda words: words.view(np.float32),
    "float16": lambda words: tensor.widen_float16(words.view(np.uint16)),
    "bfloat16": lambda words: tensor.widen_bfloat16(words.view(np.uint16)),
}
_NARROW: dict[str, Callable[[Any], Any]] = {
    "float32": lambda row: row,
    "float16": partial(_narrow_all, _narrow_float16),
    "bfloat16": partial(_narrow_all, _narrow_bfloat16),
}


def _pair_twins() -> dict[Any, Any]:
    """Return the twins of `PAIR_CONVERSIONS`."""
    twins = {}
    for dtype, widen, narrow in (
        ("bfloat16", _widen_bfloat16, _narrow_bfloat16),
        ("float16", _widen_float16, _narrow_float16),
    ):
        pair = conversions.PAIR_CONVERSIONS[dtype]
        twins[pair.pack] = partial(_pack, narrow)
        twins[pair.low] = partial(_half, widen, 0)
        twins[pair.high] = partial(_half, widen, 16)
    return twins


# Twins that need nothing but their arguments.
PLAIN: dict[Any, Any] = {
    addresses.kept: np.int64,
    addresses.anew: lambda number: np.int32(int(number)),
    addresses.multiply_add_int32: lambda a, b, c: np.int32(int(a) * int(b) + int(c)),
    addresses.multiply_add_wide: lambda a, b, c: np.int64(int(a) * int(b) + int(c)),
    conversions.exp2: lambda x: np.exp2(np.float32(x)),
    conversions.reciprocal: lambda x: np.float32(1) / np.float32(x),
    conversions.reciprocal_root: lambda x: np.float32(1) / np.sqrt(np.float32(x)),
    conversions.maximum: _maximum,
    conversions.bfloat16_to_float32: _widen_bfloat16,
    conversions.float32_to_bfloat16: _narrow_bfloat16,
    conversions.float16_to_float32: _widen_float16,
    conversions.float32_to_float16: _narrow_float16,
    **_pair_twins(),
    conversions.word_to_float32: lambda word: np.uint32(word).view(np.float32),
    conversions.float32_to_word: lambda x: np.float32(x).view(np.uint32),
    exact_float32.add_float32: lambda a, b: np.float32(a) + np.float32(b),
    exact_float32.multiply_float32: lambda a, b: np.float32(a) * np.float32(b),
    exact_float32.divide_float32: lambda a, b: np.float32(a) / np.float32(b),
    exact_float32.multiply_add: _multiply_add,
    exact_float64.add_float64: lambda a, b: np.float64(a) + np.float64(b),
    exact_float64.multiply_float64: lambda a, b: np.float64(a) * np.float64(b),
    exact_float64.divide_float64: lambda a, b: np.float64(a) / np.float64(b),
    exact_float64.bits_to_float64: lambda bits: np.int64(bits).view(np.float64),
    exact_float64.float64_to_bits: lambda x: np.float64(x).view(np.int64),
    across_blocks.take_ticket: SharedArray.take_ticket,
    early_launch.let_next_begin: lambda: None,  # what the next launch does is another's matter
    early_launch.fetch_ahead: lambda source, element, size: source.fetch(element, size),
    **{words: partial(_load_fresh_words, n) for n, words in across_blocks.LOAD_FRESH_WORDS.items()},
    atomics.add_int32: SharedArray.add_atomically,
    atomics.add_int64: SharedArray.add_atomically,
    atomics.add_shared_int64: SharedArray.add_atomically,
    atomics.fetch_add_int64: SharedArray.add_atomically,
    atomics.exchange_int64: SharedArray.exchange_atomically,
    **{vectors.LOAD_WORDS[n]: partial(_load_words, n) for n in vectors.LOAD_WORDS},
    **{vectors.STORE_WORDS[n]: partial(_store_words, n) for n in vectors.STORE_WORDS},
    vectors.load_constant_vector: partial(_load_words, 4),
    vectors.load_streamed_vector: partial(_load_words, 4),
    vectors.load_constant_pair: partial(_load_words, 2),
    vectors.load_constant_word: partial(_load_words, 1),
    vectors.load_word: _load_word,
    vectors.store_word: _store_word,
    tiles.choose_bytes: _choose_bytes,
    **SMALL_INTEGER_TWINS,
    whole_scales.raised_byte: lambda word, i: np.float32(
        whole_scales.RAISED_BY + (int(word) >> 8 * int(i) & 255)
    ),
    **SMALL_FLOAT_TWINS,
    **EIGHT_BIT_TWINS,
    **{elements.LOAD_FLOATS[name]: partial(_load_floats, f) for name, f in _WIDEN.items()},
    **{elements.LOAD_CONSTANT_FLOATS[name]: partial(_load_floats, f) for name, f in _WIDEN.items()},
    **{elements.STORE_FLOATS[name]: partial(_store_floats, f) for name, f in _NARROW.items()},
    numba.float32: np.float32,
    numba.float64: np.float64,
    numba.int32: np.int32,
    numba.int64: np.int64,
    numba.uint16: np.uint16,
    numba.uint32: np.uint32,
    numba.uint64: np.uint64,
}

# Twins that are given the device, and what a whole warp computes where it is one instruction.
BOUND: dict[Any, tuple[Any, ...]] = {
    tiles.multiply_bfloat16_tiles: (_multiply_tiles, tensor.product(tensor.widen_bfloat16)),
    tiles.multiply_float16_tiles: (_multiply_tiles, tensor.product(tensor.widen_float16)),
    tiles.load_tiles: (_load_tiles, tensor.load_tiles),
    tiles.load_transposed_tiles: (_load_tiles, tensor.load_transposed_tiles),
    tiles.transpose_tile: (_transpose_tile,),
    across_blocks.fence: (_fence,),
    early_launch.wait_for_previous: (_wait_for_previous,),
    async_copies.copy_async: (_copy_async, 4),
    async_copies.copy_word_async: (_copy_async, 1),
    async_copies.commit_copies: (_commit_copies,),
    async_copies.wait_for_copies: (_wait_for_copies, 0),
    async_copies.wait_for_copies_but_one: (_wait_for_copies, 1),
}


def twins_of(device: Device) -> dict[Any, Any]:
    """Return instruction or Numba type → what stands for it during one launch."""
    bound = {name: partial(twin, device, *first) for name, (twin, *first) in BOUND.items()}
    return {**PLAIN, **bound, numba.cuda: device}
