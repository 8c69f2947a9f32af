"""The frame around kernels: what roofs do is counted right, and shares are of the right roof."""

from __future__ import annotations

import ctypes
import json

import numpy as np
import pytest

from compute_plane.cpu.thread_team import ThreadTeam
from hetero_infer.bench import kernels, plots
from hetero_infer.bench.kernel_cases import KernelCase, all_cases
from hetero_infer.bench.kernel_workbench import Workbench, seconds_of
from hetero_infer.bench.product_cases import product_cases
from hetero_infer.bench.report import to_object, to_text
from hetero_infer.bench.roof_kernels import (
    ACCUMULATORS,
    DOT_STEPS,
    KEPT,
    OPERAND_BYTES,
    OUT_BYTES,
    READ_AT_ONCE,
    SET,
    WINDOW_BYTES,
    Roof,
    arithmetic_roofs,
    num_accumulators,
    roof_fma,
    roof_int8_dot,
    roof_nibble_dot,
    roof_read,
)
from hetero_infer.bench.roofs import Roofs, RoofSample
from hetero_infer.bench.row_cases import row_cases
from hetero_infer.bench.settings import KernelSettings
from kernels.cpu.instruction_set import INSTRUCTION_SETS
from kernels.cpu.operands import Product, RowInput
from kernels.cpu.operation import RECORD_WORDS
from planes.errors import ConfigError


@pytest.fixture
def bench():
    with ThreadTeam(2) as team:
        bench = Workbench(team)
        yield bench
    del bench  # it must outlive the team's threads


def run_roof(bench: Workbench, operation, chunks: int, count: int, operands: np.ndarray):
    """What a roof leaves behind: a part of OUT_BYTES for each chunk."""
    out = bench.memory(chunks * OUT_BYTES)
    words = {Roof.COUNT: count, Roof.OPERANDS: bench.place(operands), Roof.OUT: out.ctypes.data}
    bench.team.run([(bench.record(operation, chunks, words), bench.header({}))])
    return out.reshape(chunks, OUT_BYTES)


def test_the_reading_roof_reads_every_byte_once(bench):
    data = bench.random.integers(0, 256, 37 * READ_AT_ONCE, np.uint8)
    out = run_roof(bench, roof_read, 5, data.nbytes, data)[:, :READ_AT_ONCE]
    expected = np.bitwise_xor.reduce(data.reshape(-1, READ_AT_ONCE), axis=0)
    assert (np.bitwise_xor.reduce(out, axis=0) == expected).all()


def test_the_fma_roof_does_as_many_as_it_counts_and_stays_an_ordinary_number(bench):
    operands = np.full(OPERAND_BYTES // 4, 0.5, np.float32)
    (out,) = run_roof(bench, roof_fma, 1, 3, operands)
    values = out.view(np.float32)[: 16 * ACCUMULATORS]
    assert (values == 0.9375).all()  # 0.5, then three times x / 2 + 0.5


def test_a_roof_does_as_many_however_many_chunks_a_thread_takes_at_once():
    operands = np.full(OPERAND_BYTES // 4, 0.5, np.float32)
    with ThreadTeam(1) as team:  # chunks taken together leave one result for all of them
        bench = Workbench(team)
        out = run_roof(bench, roof_fma, 8, 16, operands).view(np.float32)
    del bench
    ends = out[:, 0][out[:, 0] > 0.0]
    # 0.5, then k times x / 2 + 0.5, is 1 - 2 ** -(k + 1).
    assert sum(-np.log2(1.0 - ends) - 1.0) == 16


@pytest.mark.parametrize("roof", [roof_int8_dot, roof_nibble_dot])
def test_an_integer_roof_does_as_many_as_it_counts(bench, roof):
    operands = bench.random.integers(0, 16, OPERAND_BYTES, np.uint8)
    (out,) = run_roof(bench, roof, 1, 5, operands)
    count = 5 * DOT_STEPS
    signed = operands.astype(np.int64)
    for number in range(ACCUMULATORS):
        kept = signed[64 * (number % KEPT) :][:64]
        expected = np.zeros(16, np.int64)
        for turn in range(count):
            at = turn * 64 % WINDOW_BYTES + 64 * (number // KEPT * KEPT)
            expected += (kept * signed[at : at + 64]).reshape(16, 4).sum(axis=1)
        # Weights are shifted to be unsigned where instructions want that; the shift is in the sum.
        shift = out.view(np.int32)[16 * number : 16 * (number + 1)] - expected
        turns = [t * 64 % WINDOW_BYTES + 64 * (number // KEPT * KEPT) for t in range(count)]
        sums = sum(signed[at : at + 64].reshape(16, 4).sum(axis=1) for at in turns)
        assert (shift == 0).all() or (shift == 128 * sums).all()


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_accumulators_leave_registers_for_operands(name):
    chosen = INSTRUCTION_SETS[name]
    registers = num_accumulators(chosen) * 512 // chosen.vector_bits
    assert 8 <= registers < chosen.vector_registers
    assert num_accumulators(chosen) * 64 + WINDOW_BYTES <= OPERAND_BYTES


def roofs_of(**peaks: float) -> Roofs:
    reads = [RoofSample("read", 2, 1 << 20, (90.0, 100.0)), RoofSample("read", 2, 1 << 24, (20.0,))]
    return Roofs([*reads, *(RoofSample(name, 2, 0, (rate,)) for name, rate in peaks.items())])


def test_bandwidth_is_that_of_the_size_and_between_sizes_in_between():
    roofs = roofs_of()
    assert roofs.bandwidth(1000, 2) == 100
    assert roofs.bandwidth(1 << 22, 2) == pytest.approx(60)
    assert roofs.bandwidth(1 << 30, 2) == 20


def test_a_roofline_is_the_longer_of_reading_and_computing():
    roofs = roofs_of(fma=50.0)
    assert roofs.seconds(1000, 100, "fma", 2) == 10
    assert roofs.seconds(1000, 1000, "fma", 2) == 20
    assert roofs.seconds(1000, 1000, None, 2) == 10


def test_every_case_has_a_name_of_its_own_and_a_roof_there_is():
    cases = all_cases()
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert case.num_bytes > 0
        assert case.peak is None or case.peak in arithmetic_roofs(SET), case.name
        assert (case.num_operations > 0) == (case.peak is not None), case.name


ROW_PLACES = [word for word in RowInput if word.name.startswith("OUT")]
PRODUCT_PLACES = [word for word in Product if word.name.startswith("INPUT")]


@pytest.mark.parametrize(
    ("cases", "pattern", "places"),
    [(row_cases, "* to int8 32 *", ROW_PLACES), (product_cases, "product Q* 8 *", PRODUCT_PLACES)],
)
def test_cases_of_int8_rows_have_a_place_for_all_that_stands_beside_them(
    bench, cases, pattern, places
):
    for case in kernels.matching(cases(), pattern):
        entries = case.prepare(bench)
        ((record, _),) = entries
        words = (ctypes.c_int64 * RECORD_WORDS).from_address(record)
        assert all(words[place] for place in places), case.name
        bench.team.run(entries)


def test_a_pattern_picks_cases_and_one_that_picks_none_is_refused():
    assert {c.name.split()[0] for c in kernels.matching(all_cases(), "product Q4*")} == {"product"}
    with pytest.raises(ConfigError, match="no case matches 'nothing'; they begin with attention"):
        kernels.matching(all_cases(), "nothing")


def test_samples_are_of_one_run_of_the_entries(bench):
    words = {Roof.COUNT: 1 << 16, Roof.OPERANDS: bench.zeros(1 << 16)}
    words[Roof.OUT] = bench.zeros(2 * OUT_BYTES)
    record = bench.record(roof_read, 2, words)
    samples = seconds_of(bench.team, [(record, bench.header({}))], seconds=1e-3, repeat=3)
    assert len(samples) == 3
    assert all(sample > 0 for sample in samples)


def test_results_of_kernels_are_tables_json_and_a_plot(tmp_path, monkeypatch):
    size = 1 << 16

    def prepare(bench):
        words = {Roof.COUNT: size, Roof.OPERANDS: bench.zeros(size)}
        words[Roof.OUT] = bench.zeros(bench.num_chunks * OUT_BYTES)
        return [(bench.record(roof_read, bench.num_chunks, words), bench.header({}))]

    def measured(bench, *_, **__):
        threads = bench.team.num_threads
        return [RoofSample(name, threads, at, (1e9,)) for name, at in (("read", size), ("fma", 0))]

    monkeypatch.setattr(kernels, "measure_roofs", measured)
    monkeypatch.setattr(
        kernels, "all_cases", lambda: [KernelCase("a case", size, 2 * size, "fma", prepare)]
    )
    result = kernels.run(KernelSettings(num_threads=2, seconds=1e-3, repeat=2))
    assert "of its roofline" in to_text(result)
    one, two = result.data["results"]
    assert (one["threads"], two["threads"]) == (1, 2)
    assert one["roofline_seconds"] == 2 * size / 1e9
    assert one["share"] == pytest.approx(one["roofline_seconds"] / one["seconds"])
    assert len(one["samples"]) == 2
    origin = {
        "machine": {"usable_cpus": 2, "cpu": "any"},
        "date": "2020-01-01",
        "commit": None,
        "tree_has_changes": None,
    }
    whole = to_object("kernels", result, origin=origin, settings={}, share_of_others=None)
    json.dumps(whole, allow_nan=False)
    plots.draw_kernels(whole, tmp_path / "kernels.png")
    assert (tmp_path / "kernels.png").stat().st_size > 1000
