"""Mamba-2, thread by thread: convolution and time steps, scan, norm; ragged rows, rows cut."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from bench.gpu.case import Case
from bench.gpu.cases import draw_cases
from bench.gpu.cases.mamba2 import inputs_case, of_width, row_norm_case, scan_case
from bench.gpu.cases.state_rows import Row
from bench.gpu.numerics import check_case
from kernels.cuda import (
    block_reductions,
    delta_rule_columns,
    delta_rule_stages,
    gated_row_norm,
    mamba2_inputs,
    selective_scan,
    state_convolution,
)
from kernels.cuda.errors import UnsupportedVariantError
from kernels.cuda.gated_row_norm import GatedRowNormVariant
from kernels.cuda.mamba2_inputs import Mamba2InputsVariant
from kernels.cuda.selective_scan import SelectiveScanVariant
from tests.kernels.cuda.compiled import run_compiled
from tests.kernels.cuda.simulation import Source, Sources, simulate
from tests.simt import Fault, Race, TooEarly
from tests.simt.memory import Spread

MODULES = (gated_row_norm, mamba2_inputs, selective_scan)
INPUTS = Mamba2InputsVariant("bfloat16", 3)
SCAN = SelectiveScanVariant(32, 32)
PARTS = SelectiveScanVariant(64, 32)
NORM = GatedRowNormVariant("bfloat16", 544)
PLAIN = GatedRowNormVariant("bfloat16", 544, is_normed=False)
ROUNDS = GatedRowNormVariant("float32", 2080)
FAR = 2**32 + 2**12
GROUP_ROWS = (Row(2, True, 1, 1), Row(0, False, 3, 0))


def small_inputs(variant: Mamba2InputsVariant = INPUTS) -> Case:
    """Fewer channels than a block of threads has room for."""
    return inputs_case(variant, of_width(variant.width), (8, 32, 32), 0)


def small_scan(variant: SelectiveScanVariant = SCAN, later: int = 1, num_heads: int = 2) -> Case:
    """One token, a new row, one of two stages and a bit; `later`: tokens of its second step."""
    rows = (
        Row(3, False, 1, 0),
        Row(1, True, 1, 1),
        Row(4, False, 0, 0),
        Row(0, False, variant.stage_tokens, later),
    )
    return scan_case(variant, rows, num_heads, 0)


def small_case(variant: Any) -> Case:
    if isinstance(variant, Mamba2InputsVariant):
        return small_inputs(variant)
    if isinstance(variant, SelectiveScanVariant):
        return small_scan(variant, num_heads=2 if variant == SCAN else 1)
    return draw_cases(variant)[0]


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "variant",
    [
        INPUTS,
        SCAN,
        NORM,
        PARTS,
        SelectiveScanVariant(32, 160),
        SelectiveScanVariant(80, 32),
        Mamba2InputsVariant("float32", 4),
        Mamba2InputsVariant("float16", 8),
        Mamba2InputsVariant("bfloat16", 2),
        ROUNDS,
        GatedRowNormVariant("float16", 32),
        PLAIN,
        GatedRowNormVariant("float32", 2080, is_normed=False),
    ],
    ids=lambda variant: variant.name,
)
def test_a_kernel_is_right_and_rows_may_be_cut(variant) -> None:
    assert check_case(small_case(variant), simulate).faults == ()


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "make",
    [
        lambda: inputs_case(INPUTS, of_width(INPUTS.width)[:3], (16, 32, 32), 0, num_groups=2),
        lambda: scan_case(SCAN, GROUP_ROWS, 6, 0, num_groups=3),
        lambda: scan_case(SelectiveScanVariant(48, 32), GROUP_ROWS, 4, 0, num_groups=2),
        lambda: row_norm_case(GatedRowNormVariant("bfloat16", 96), 3, 0),
        lambda: row_norm_case(GatedRowNormVariant("bfloat16", 96, is_normed=False), 3, 0),
    ],
)
def test_heads_of_a_group_share_what_is_read_and_are_normalised_together(make) -> None:
    assert check_case(make(), simulate).faults == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant",
    [variant for module in MODULES for variant in module.variants(every=True)],
    ids=lambda variant: variant.name,
)
def test_every_kernel_of_these_layers_is_right(variant) -> None:
    for case in draw_cases(variant, seed=1):
        assert check_case(case, simulate).faults == ()


def test_columns_of_a_head_have_the_bits_that_they_have_in_another_block() -> None:
    """Heads of 64 are two of 32 with the same step sizes."""
    rows = (Row(3, False, 2, 0),)
    wide, narrow = scan_case(PARTS, rows, 1, 0), scan_case(SCAN, rows, 2, 0)
    twice = {name: np.tile(wide.arrays[name], (1, 1)) for name in ("convolved", "out")}
    sizes = np.repeat(wide.arrays["step_sizes"], 2, axis=1)
    states = wide.arrays["states"].copy()
    own = states[3, -32 * 64 :].reshape(32, 2, 32)
    states[3, -32 * 64 :] = own.swapaxes(0, 1).reshape(-1)
    arrays = {
        **narrow.arrays, **twice, "step_sizes": sizes, "states": states,
        "skips": np.repeat(wide.arrays["skips"], 2),
    }  # fmt: skip
    found, expected = simulate(dataclasses.replace(narrow, arrays=arrays)), simulate(wide)
    np.testing.assert_array_equal(found["out"], expected["out"])


@pytest.mark.parametrize(
    ("case", "names"),
    [
        pytest.param(small_inputs, ("states", "projections"), marks=pytest.mark.wide),
        (small_scan, ("states",)),
    ],
)
@pytest.mark.parametrize(
    "run", [simulate, pytest.param(run_compiled, marks=pytest.mark.wide)], ids=["source", "ptx"]
)
def test_states_and_tokens_lie_far_apart(case, names, run) -> None:
    """Behind the first 2^32 elements."""
    case = case()
    far = {
        name: Spread(case.arrays[name], tuple(FAR * i for i in range(len(case.arrays[name]))))
        for name in names
    }
    near = {case.arrays[name].shape[1] for name in names}
    (launch,) = case.launches
    arguments = tuple(FAR if one in near else one for one in launch.arguments)
    assert arguments.count(FAR) == len(names)
    moved = dataclasses.replace(launch, arguments=arguments)
    arrays = {**case.arrays, **far}
    outputs = run(dataclasses.replace(case, arrays=arrays, launches=(moved,), part=None))
    assert case.faults({**outputs, "states": outputs["states"].values}) == []


# --- broken on purpose ----------------------------------------------------------------------------

INPUTS_SOURCE = Sources(
    *(
        Source(mamba2_inputs, "make_mamba2_inputs", INPUTS, library=library)
        for library in (mamba2_inputs, state_convolution)
    )
)
SCAN_SOURCE = Source(selective_scan, "make_selective_scan", SCAN)
PARTS_SOURCE = Source(selective_scan, "make_selective_scan", PARTS)
COLUMNS = Source(selective_scan, "make_selective_scan", SCAN, library=delta_rule_columns)
STAGES = Source(selective_scan, "make_selective_scan", SCAN, library=delta_rule_stages)
NORM_SOURCE = Source(gated_row_norm, "make_gated_row_norm", NORM)
PLAIN_SOURCE = Source(gated_row_norm, "make_gated_row_norm", PLAIN)
ROUNDS_SOURCE = Source(gated_row_norm, "make_gated_row_norm", ROUNDS)
SUMS = Source(gated_row_norm, "make_gated_row_norm", NORM, library=block_reductions)


@pytest.mark.wide
def test_no_barrier_commit_or_wait_of_the_scan_can_be_left_out() -> None:
    case = small_scan(later=SCAN.stage_tokens + 1, num_heads=1)
    assert case.faults(simulate(case, kernels=SCAN_SOURCE.unbroken())) == []
    broken = [
        (source, line) for source in (SCAN_SOURCE, STAGES) for line in source.synchronisations()
    ]
    assert len(broken) == 4  # wait for the launch ahead, for copies; the barrier; the commit
    for source, line in broken:
        with pytest.raises((Race, TooEarly)):
            simulate(case, kernels=source.without(line))


def test_the_barrier_of_the_norm_can_not_be_left_out() -> None:
    case = draw_cases(NORM)[0]
    *_, barrier = SUMS.synchronisations()
    with pytest.raises(Race, match="shared memory"):
        simulate(case, kernels=SUMS.without(barrier))


def two_blocks() -> Case:
    """Channels and heads take one block of threads and a bit."""
    return inputs_case(INPUTS, (Row(6, False, 2, 0),), (8, 128, 32), 0)


def parts_case() -> Case:
    return scan_case(PARTS, (Row(3, False, 2, 0),), 1, 0)


def norm_case() -> Case:
    return draw_cases(NORM)[0]


def plain_case() -> Case:
    return draw_cases(PLAIN)[0]


def rounds_case() -> Case:
    return draw_cases(ROUNDS)[0]


def groups_case() -> Case:
    return scan_case(SCAN, GROUP_ROWS, 6, 0, num_groups=3)


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("make", "source", "old", "new"),
    [
        (small_inputs, INPUTS_SOURCE, "(begins or place >= before)", "True"),
        (small_scan, SCAN_SOURCE, "if left <= stage_tokens:", "if False:"),
        (norm_case, NORM_SOURCE, "multiply_add(total, inverse_size, eps)", "total"),
        (small_scan, COLUMNS, "= multiply_float32(beta, rest)", "= rest"),
        (small_inputs, INPUTS_SOURCE, "total = weights[num_pieces", "total = weights[0"),
        (small_inputs, INPUTS_SOURCE, "place >= 0 and place < count", "True"),
        (small_inputs, INPUTS_SOURCE, "and channel < channels", ""),
        (small_inputs, INPUTS_SOURCE, "head >= 0 and head < num_heads", "head >= 0"),
        (small_inputs, INPUTS_SOURCE, "channel >= inner_size + key_size", "False"),
        (small_inputs, INPUTS_SOURCE, "elif channel >= inner_size:", "elif False:"),
        (small_inputs, INPUTS_SOURCE, "channels + inner_size + head", "channels + head"),
        (small_inputs, INPUTS_SOURCE, "(2 * num_heads) + (head", "num_heads + (head"),
        (small_inputs, INPUTS_SOURCE, "load_floats(weights, pieces + i, time_bias",
         "load_floats(weights, pieces + i, rates"),
        (small_inputs, INPUTS_SOURCE, "multiply_float32(weights[i, part], time)", "weights[i, 0]"),
        (small_inputs, INPUTS_SOURCE, "store_floats(step_sizes, target + num_heads, found, pieces",
         "store_floats(step_sizes, target + num_heads, found, 0 "),
        (small_inputs, INPUTS_SOURCE, "= silu(sums[0, n])", "= sums[0, n]"),
        (small_inputs, INPUTS_SOURCE, "store_floats(out, target + VECTOR * i, values, i)",
         "store_floats(out, target + VECTOR * i, values, 0)"),
        (small_inputs, INPUTS_SOURCE, "if count > before:", "if False:"),
        (small_inputs, INPUTS_SOURCE, "elif is_new:", "elif False:"),
        (two_blocks, INPUTS_SOURCE, "cuda.blockIdx.y * threads * length", "0"),
        (two_blocks, INPUTS_SOURCE, "wait_for_previous()\n\n", "\n"),
        (two_blocks, INPUTS_SOURCE, "min(int32(span), int32(channels - channel))", "int32(span)"),
        (small_scan, SCAN_SOURCE, "if count <= 0:\n            return", "pass"),
        (small_scan, SCAN_SOURCE, "if is_new:\n            clear(memory)",
         "if False:\n            clear(memory)"),
        (small_scan, SCAN_SOURCE, "int32(stage_floats - stage), convolved", "int32(0), convolved"),
        (small_scan, SCAN_SOURCE, "multiply_add(skip, staged[values_at + column], found)", "found"),
        (small_scan, SCAN_SOURCE, "skip = skips[head]", "skip = skips[0]"),
        (small_scan, SCAN_SOURCE, "int64(head) * memory_floats", "0"),
        (small_scan, SCAN_SOURCE, "count, num_groups, num_heads, group,\n            head, part",
         "count, num_groups, num_heads, group,\n            int32(0), part"),
        (groups_case, SCAN_SOURCE, "count, num_groups, num_heads, group,\n            head, part",
         "count, num_groups, num_heads, int32(0),\n            head, part"),
        (groups_case, SCAN_SOURCE, "head += int32(group * (cuda.gridDim.x // parts))", "pass"),
        (small_scan, SCAN_SOURCE, "multiply_add_wide(int32(token + which), row_size, place)",
         "place"),
        (parts_case, PARTS_SOURCE, "of_head + int32(part * columns + own_columns * warp)",
         "of_head + int32(own_columns * warp)"),
        (parts_case, PARTS_SOURCE, "int32(part * columns + column)", "column"),
        (parts_case, PARTS_SOURCE, "of_head + share", "of_head + 999 * share"),
        (norm_case, NORM_SOURCE, "place < 0 or place >= count", "False"),
        (norm_case, NORM_SOURCE, "token * stride + (own + vector", "token * size + (own + vector"),
        (norm_case, NORM_SOURCE, "gate = silu(values[r, n])", "gate = values[r, n]"),
        (plain_case, PLAIN_SOURCE, "gate = silu(values[r, n])", "gate = values[r, n]"),
        (plain_case, PLAIN_SOURCE, "if not is_normed:\n            return", "pass"),
        (norm_case, SUMS, "total += of_warps[warp]", "total = of_warps[warp]"),
        (norm_case, SUMS, "value = warp_sum(value)", "value += float32(0)"),
        (norm_case, NORM_SOURCE, "load_floats(heads_here, i, heads, row + vector",
         "load_floats(heads_here, i, heads, vector"),
        (rounds_case, ROUNDS_SOURCE, "r * pieces + n // VECTOR", "n // VECTOR"),
    ],
    ids=lambda value: value[:28] if isinstance(value, str) else "",
)  # fmt: skip
def test_a_broken_kernel_of_mamba2_is_noticed(make, source, old, new) -> None:
    case = make()
    try:
        outputs = simulate(case, kernels=source.with_replaced(old, new))
    except Fault:
        return
    assert case.faults(outputs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mamba2InputsVariant("int8", 4), "dtype must be one of float32"),
        (lambda: Mamba2InputsVariant("float32", 9), "width must be between 2 and 8"),
        (lambda: INPUTS.grid(1, 4, 32, 32), "num_heads must be a multiple of 8, got 4"),
        (lambda: INPUTS.grid(1, 8, 2, 32), "inner_size must be a multiple of 32, got 16"),
        (lambda: INPUTS.grid(1, 8, 32, 16), "key_size must be a multiple of 32, got 16"),
        (lambda: SelectiveScanVariant(24, 32), "head_dim must be a multiple of 16 up to 256"),
        (lambda: SelectiveScanVariant(32, 288), "state_size must be a multiple of 32 up to 256"),
        (lambda: GatedRowNormVariant("float64", 32), "dtype must be one of float32"),
        (lambda: GatedRowNormVariant("float32", 16416), "size must be a multiple of 32 up to"),
    ],
)  # fmt: skip
def test_a_layer_no_kernel_is_written_for_is_refused_by_name(make, message) -> None:
    with pytest.raises(UnsupportedVariantError, match=message):
        make()
