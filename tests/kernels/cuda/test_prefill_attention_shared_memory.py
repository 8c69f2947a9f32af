"""No two lanes that are served together meet in a bank of prefill attention's shared memory."""

from __future__ import annotations

from collections import defaultdict

import pytest

from bench.gpu.cases.attention_prefill import draw_case
from kernels.cuda import attention_prefill_pool
from kernels.cuda.attention_prefill import PrefillVariant
from kernels.cuda.attention_variant import HEAD_SIZES
from tests.kernels.cuda.simulation import simulate
from tests.simt.memory import SharedArray


@pytest.fixture
def accesses(monkeypatch):
    """Elements of 16-byte accesses to shared memory: by kind and warp, a list for each lane."""
    recorded: dict = defaultdict(lambda: [[] for _ in range(32)])

    def record(name):
        original = getattr(SharedArray, name)

        def recording(self, element, other):
            thread = self._current()
            num_words = other if isinstance(other, int) else len(other)
            if thread.block.index.y == 0 and num_words == 4:
                byte = int(element) * self._flat.itemsize
                recorded[name, thread.warp][thread.lane].append((id(self), byte))
            return original(self, element, other)

        monkeypatch.setattr(SharedArray, name, recording)

    record("read_words")
    record("start_copy")
    return recorded


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("dtype", "head_size", "kv_dtype"),
    [
        ("bfloat16", 64, None),
        ("bfloat16", 96, None),
        ("bfloat16", 128, None),
        ("bfloat16", 256, None),
        ("float32", 96, None),
        ("float32", 256, None),
        ("bfloat16", 64, "int8"),
        ("bfloat16", 96, "int8"),
        pytest.param("bfloat16", 128, "int8", marks=pytest.mark.slow),
        ("bfloat16", 256, "int8"),
    ],
)
def test_no_two_lanes_of_a_wide_access_meet_in_a_bank(dtype, head_size, kv_dtype, accesses):
    variant = PrefillVariant(dtype, head_size, 4, 16, kv_dtype)
    case = draw_case(variant, ((1, 20),), num_kv_heads=1)

    simulate(case)

    assert {name for name, _ in accesses} == {"read_words", "start_copy"}
    assert count_conflicts(accesses) == 0


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize(
    ("table", "kv_dtype"),
    [("SWIZZLES", None), pytest.param("SWIZZLES_8_BITS", "int8", marks=pytest.mark.slow)],
)
def test_without_the_swizzle_lanes_meet_in_banks(head_size, table, kv_dtype, accesses, monkeypatch):
    monkeypatch.setitem(getattr(attention_prefill_pool, table), head_size, (0, 0))
    variant = PrefillVariant("bfloat16", head_size, 4, 16, kv_dtype)
    case = draw_case(variant, ((1, 20),), num_kv_heads=1)

    outputs = simulate(case)

    assert case.faults(outputs) == []
    assert count_conflicts(accesses) > 0


def count_conflicts(accesses) -> int:
    """Return how many lanes have to wait because another of their eight takes the same banks."""
    conflicts = 0
    for lanes in accesses.values():
        lists = [places for places in lanes if places]  # some lanes may have nothing to copy
        for together in zip(*lists, strict=True):
            for first in range(0, len(together), 8):  # the lanes that are served at a time
                places = set(together[first : first + 8])  # the same place is read once for all
                conflicts += len(places) - len({byte // 16 % 8 for _, byte in places})
    return conflicts
