"""Proof that the tests of caps notice: what is done for them is left out, or done elsewhere."""

from __future__ import annotations

import inspect

import pytest

from bench.gpu.cases import attention_decode as decode_cases
from bench.gpu.cases import attention_prefill as prefill_cases
from kernels.cuda import (
    attention_caps,
    attention_decode,
    attention_decode_float32,
    attention_decode_room,
    attention_decode_tensor,
    attention_prefill_float32,
    attention_prefill_tensor,
)
from kernels.cuda.attention_decode import DecodeVariant
from kernels.cuda.attention_prefill import PrefillVariant
from tests.kernels.cuda.simulation import simulate

DECODE = DecodeVariant("float16", 128, 2, 16, has_cap=True)
DECODE_WINDOW = DecodeVariant("bfloat16", 256, 2, 16, None, True, has_cap=True)
DECODE_INT8 = DecodeVariant("bfloat16", 128, 2, 16, "int8", has_cap=True)
DECODE_FLOAT32 = DecodeVariant("float32", 128, 2, 16, has_cap=True)
PREFILL = PrefillVariant("float16", 128, 2, 16, has_cap=True)
PREFILL_WINDOW = PrefillVariant("bfloat16", 256, 2, 16, None, True, has_cap=True)
PREFILL_INT8 = PrefillVariant("bfloat16", 128, 2, 16, "int8", has_cap=True)
PREFILL_FLOAT32 = PrefillVariant("float32", 128, 2, 16, has_cap=True)
VARIANTS = (
    DECODE, DECODE_WINDOW, DECODE_INT8, DECODE_FLOAT32,
    PREFILL, PREFILL_WINDOW, PREFILL_INT8, PREFILL_FLOAT32,
)  # fmt: skip

USERS = (
    attention_decode, attention_decode_float32, attention_decode_room, attention_decode_tensor,
    attention_prefill_float32, attention_prefill_tensor,
)  # fmt: skip
"""Modules that name what is in the others."""


def piece(module, first, behind):
    """Return a module's source from one piece of it up to another."""
    text = inspect.getsource(module)
    begin = text.index(first)
    return text[begin : text.index(behind, begin)]


def moved(module, first, behind, before):
    """Return the edits that move what `piece` returns."""
    found = piece(module, first, behind)
    return ((found, ""), (before, found + before))


IF = 16 * " " + "if has_cap:\n"
DECODE_HIDES_FIRST = moved(
    attention_decode_tensor, IF, "                # Online", "                rises = False\n"
)
PREFILL_HIDES_FIRST = moved(
    attention_prefill_tensor, IF, "                if is_cut(", "                # What stands in"
)
FORGOTTEN = (("score = exactly_capped(score, cap)", "pass"),)

# Variant, cap, module, edits. Of a small cap a hidden token would have a weight like any other; of
# larger ones the peak rises.
BREAKAGES = [
    (DECODE, 0.7, attention_decode_tensor, DECODE_HIDES_FIRST),
    (DECODE, 0.7, attention_decode_tensor, (("factors[half] = cap", "factors[half] *= cap"),)),
    (DECODE, 15.0, attention_decode_tensor, (("factors[half] = cap", "factors[half] = unit"),)),
    # The path on which the peak rises: weights beyond a float16.
    (DECODE, 50.0, attention_decode_tensor, (("[n, odd] * key_factors[0]", "[n, odd]"),)),
    (DECODE, 15.0, attention_decode_room, (("find_row, steeper,", "find_row, lambda x, _: x,"),)),
    (
        DECODE,
        15.0,
        attention_caps,
        (("multiply_add(product, steep, MINUS_ONE)", "product * steep"),),
    ),
    (
        DECODE_FLOAT32,
        0.7,
        attention_decode_float32,
        (
            *FORGOTTEN,
            (
                "score if is_valid else MINUS_INFINITY",
                "exactly_capped(score if is_valid else MINUS_INFINITY, cap)",
            ),
        ),
    ),
    (DECODE_FLOAT32, 15.0, attention_decode_float32, FORGOTTEN),
    (PREFILL, 0.7, attention_prefill_tensor, PREFILL_HIDES_FIRST),
    (PREFILL, 0.7, attention_prefill_tensor, (("cap if has_cap else scale_log2e", "scale_log2e"),)),
    (PREFILL, 15.0, attention_prefill_tensor, (("top *= factor", "pass"),)),
    (PREFILL, 15.0, attention_prefill_tensor, (("anew(scale_log2e, cap)", "anew(cap, cap)"),)),
    (PREFILL_FLOAT32, 15.0, attention_prefill_float32, FORGOTTEN),
]
MORE_BREAKAGES = [
    (DECODE_WINDOW, 0.7, attention_decode_tensor, DECODE_HIDES_FIRST),
    (
        DECODE_WINDOW,
        15.0,
        attention_decode_room,
        (("find_row, steeper_anew,", "find_row, lambda x, _: x,"),),
    ),
    (DECODE_INT8, 0.7, attention_decode_tensor, DECODE_HIDES_FIRST),
    (DECODE_INT8, 15.0, attention_decode_tensor, (("factor * key_scales[half] if", "factor if"),)),
    (DECODE_INT8, 0.7, attention_decode_tensor, (("factors[half] = cap", "factors[half] *= cap"),)),
    (PREFILL_WINDOW, 0.7, attention_prefill_tensor, PREFILL_HIDES_FIRST),
    (PREFILL_INT8, 0.7, attention_prefill_tensor, PREFILL_HIDES_FIRST),
    (
        PREFILL_INT8,
        15.0,
        attention_prefill_tensor,
        (("score * factor - peak", "score * scale_log2e - peak"),),
    ),
    (
        PREFILL_FLOAT32,
        0.7,
        attention_prefill_float32,
        (*FORGOTTEN, ("score = MINUS_INFINITY", "score = -cap")),
    ),
    (
        PREFILL_FLOAT32,
        15.0,
        attention_caps,
        (("capped(x, cap, reciprocal(cap))", "capped(x, cap, cap)"),),
    ),
    (DECODE_FLOAT32, 15.0, attention_caps, (("capped(x, cap, reciprocal(cap))", "cap * ONE"),)),
]


def edited(module, edits):
    text = inspect.getsource(module)
    for old, new in edits:
        assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {module.__name__}"
        text = text.replace(old, new)
    return text


@pytest.fixture
def remake(monkeypatch):
    """Make what is in a module again from a text, and see that others use it."""

    def from_text(module, text):
        made = {"__name__": module.__name__}
        exec(compile(text, inspect.getfile(module), "exec"), made)
        for name, value in list(vars(module).items()):
            for user in (module, *USERS):
                if callable(value) and vars(user).get(name) is value:
                    monkeypatch.setattr(user, name, made[name])

    return from_text


def draw(variant, cap):
    """A row that ends within a tile, and of large caps has scores that rise."""
    tokens = 19 if cap < 1 else 100
    window = tokens - 6 if variant.has_window else None
    if isinstance(variant, DecodeVariant):
        return decode_cases.draw_case(variant, (tokens,), num_kv_heads=1, window=window, cap=cap)
    return prefill_cases.draw_case(variant, ((5, tokens),), num_kv_heads=1, window=window, cap=cap)


def test_every_breakage_is_of_a_piece_of_the_source():
    for _, _, module, edits in [*BREAKAGES, *MORE_BREAKAGES]:
        assert edited(module, edits) != inspect.getsource(module)


@pytest.mark.wide
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_the_cases_of_these_pass_with_the_kernels_made_again(variant, remake):
    for module in (attention_caps, *USERS[1:]):
        remake(module, inspect.getsource(module))
    for cap in (0.7, 15.0):
        case = draw(variant, cap)
        assert case.faults(simulate(case)) == []


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("variant", "cap", "module", "edits"),
    [*BREAKAGES, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE_BREAKAGES)],
    ids=lambda value: getattr(value, "name", None),
)
def test_what_is_done_wrongly_for_a_cap_gives_a_wrong_answer(variant, cap, module, edits, remake):
    remake(module, edited(module, edits))
    case = draw(variant, cap)

    assert case.errors(simulate(case))["out"] > 2 * case.expected["out"].tolerance
