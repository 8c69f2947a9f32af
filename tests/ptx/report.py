"""Counts of what the compiled kernels do, without a GPU: `python -m tests.ptx.report [PART …]`.

A line of a Markdown table for each kernel on a shape without ragged ends; PART, if given, is what
a kernel's name must begin with. The columns are explained in docs/cuda-kernel-counts.md, where the
output stands. These are counts, not times.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import numpy as np

from bench.gpu.case import Array, Case, to_stored
from bench.gpu.cases import attention_decode, attention_prefill, draw_cases
from bench.gpu.cases.block_pool import BlockPool, draw_pool
from kernels.cuda.attention_decode import DecodeVariant
from kernels.cuda.attention_prefill import PrefillVariant
from kernels.cuda.attention_variant import AttentionVariant
from kernels.cuda.build import link
from kernels.cuda.operations import all_variants
from kernels.cuda.variant import Variant
from tests.kernels.cuda.compiled import run_compiled, text_of
from tests.ptx.launcher import read_program
from tests.ptx.loops import instructions_for_a_product, loop_of, machine_loop, traffic_of
from tests.ptx.meter import Meter, Traffic

CAPABILITY, ARCHITECTURE = (9, 0), "sm_90"

_ATTENTION = tuple(
    (dtype, head_size, group, 16, kv_dtype)
    for dtype, kv_dtype in (("bfloat16", None), ("bfloat16", "int8"), ("bfloat16", "float8"))
    for head_size, group in ((64, 3), (128, 4), (128, 16), (256, 4))
)

_HEAD = (
    "| kernel | PTX for a product | machine code for a product | PTX for a sector | "
    "sectors (least) | of the loop (least) | wavefronts (least) | of the loop (least) |\n"
    "|---|---|---|---|---|---|---|---|\n"
)


def cases() -> Iterator[tuple[Variant, Case]]:
    """Return kernels, each with what it is run on."""
    rng = np.random.default_rng(0)
    for shape in _ATTENTION:
        decode = DecodeVariant(*shape)
        yield decode, attention_decode.make_case(decode, *_problem(rng, decode, 2, [1024, 1024]))
    for shape in _ATTENTION:
        prefill = PrefillVariant(*shape)
        query, pool = _problem(rng, prefill, 64, [1024])
        yield prefill, attention_prefill.make_case(prefill, query, np.array([64], np.int32), pool)
    for variant in all_variants(every=False):
        if type(variant) not in (DecodeVariant, PrefillVariant):
            yield variant, draw_cases(variant)[0]


def _problem(
    rng: np.random.Generator, variant: AttentionVariant, num_tokens: int, seq_lens: Sequence[int]
) -> tuple[Array, BlockPool]:
    """Return queries and a pool of two kv heads, all normally distributed: peaks seldom rise."""
    pool = draw_pool(
        rng, variant.dtype, seq_lens,
        num_kv_heads=2, block_size=variant.block_size, head_size=variant.head_size,
        kv_dtype=variant.kv_dtype,
    )  # fmt: skip
    query = rng.standard_normal((num_tokens, 2 * variant.group + 1, variant.head_size))
    return to_stored(variant.dtype, query), pool


def line(variant: Variant, case: Case) -> str:
    """Run a case; return its line of the table. Raises AssertionError if its result is wrong."""
    meter = Meter()
    faults = case.faults(run_compiled(case, meters={variant.name: meter}))
    assert not faults, f"{variant.name}: {faults}"
    program = read_program(text_of(variant))
    loop = set(loop_of(program))
    sectors = traffic_of(program, meter, "global", None)
    cells = [variant.name]
    if loop:
        cubin, _ = link(variant.name, text_of(variant), CAPABILITY)
        machine = machine_loop(cubin, ARCHITECTURE)
        cells.append(f"{instructions_for_a_product(program, meter):.1f}")
        cells.append(f"{machine.total() / machine['HMMA']:.1f}" if machine else "?")
    else:
        cells += ["", ""]
    cells.append(f"{sum(meter.executed.values()) / max(sectors.units, 1):.1f}")
    for space, everything in (("global", sectors), ("shared", None)):
        cells.append(_shown(everything or traffic_of(program, meter, space, None)))
        cells.append(_shown(traffic_of(program, meter, space, loop)) if loop else "")
    return "| " + " | ".join(cells) + " |\n"


def _shown(traffic: Traffic) -> str:
    if not traffic.units:
        return "–"
    return str(traffic.units) + (f" ({traffic.least})" if traffic.least != traffic.units else "")


def main(arguments: Sequence[str]) -> None:
    """Print the table."""
    sys.stdout.write(_HEAD)
    for variant, case in cases():
        if not arguments or variant.name.startswith(tuple(arguments)):
            sys.stdout.write(line(variant, case))
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
