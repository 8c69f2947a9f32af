"""The kernels of decode attention, made again from a source that is broken in one place."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest

from kernels.cuda import (
    attention_chunks,
    attention_decode,
    attention_decode_float32,
    attention_decode_masks,
    attention_decode_pool,
    attention_decode_room,
    attention_decode_tensor,
    attention_merge,
    attention_partials,
)
from kernels.cuda.attention_decode import DecodeVariant
from kernels.cuda.instructions import vectors

TENSOR = DecodeVariant("bfloat16", 64, 3, 16)
FLOAT32 = DecodeVariant("float32", 64, 5, 16)  # two parts, of three heads and of two
FLOAT32_HALF = DecodeVariant("float32", 64, 2, 16)
INT8 = DecodeVariant("bfloat16", 64, 3, 16, "int8")
WIDE = DecodeVariant("bfloat16", 256, 3, 16)
WINDOW = DecodeVariant("bfloat16", 64, 3, 16, None, True)

# A factory → the module it is in, and those that call it.
FACTORIES: dict[str, tuple[ModuleType, ...]] = {
    "make_cut_row": (attention_chunks, attention_decode_tensor, attention_decode_float32),
    "make_tensor_decode": (attention_decode_tensor, attention_decode),
    "make_float32_decode": (attention_decode_float32, attention_decode),
    "make_decode_masks": (attention_decode_masks, attention_decode_tensor),
    "_make_load_values": (attention_decode_pool, attention_decode_pool),
    "_make_16_bits": (attention_decode_pool, attention_decode_pool),
    "_make_8_bits": (attention_decode_pool, attention_decode_pool),
    "_make_ample": (attention_decode_room, attention_decode_room),
    "_make_scarce": (attention_decode_room, attention_decode_room),
    "make_decode_room": (attention_decode_room, attention_decode_tensor),
    "make_merge_chunks": (attention_merge, attention_decode_tensor, attention_decode_float32),
    "make_partial_functions": (
        attention_partials, attention_decode_tensor, attention_decode_float32,
    ),
}  # fmt: skip


@pytest.fixture
def break_source(monkeypatch):
    """Replace a piece of a factory's source, which must be there once."""

    def replace(factory: str, old: str, new: str) -> None:
        module, *users = FACTORIES[factory]
        text = inspect.getsource(getattr(module, factory))
        assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in the source"
        names = dict(vars(module)) | {"STALE_WORDS": vectors.LOAD_WORDS}
        exec(compile(text.replace(old, new), inspect.getfile(module), "exec"), names)
        for user in users:
            monkeypatch.setattr(user, factory, names[factory])

    return replace
