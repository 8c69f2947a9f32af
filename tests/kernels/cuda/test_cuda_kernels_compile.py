"""Kernels become machine code on a machine without a GPU, and the check knows good from bad."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from numba import cuda, float32

from kernels.cuda import build, check
from kernels.cuda.disassembly import count_instructions, find_disassembler
from kernels.cuda.errors import CompileError
from kernels.cuda.operations import OPERATIONS
from kernels.cuda.rms_norm import RmsNormVariant
from kernels.cuda.variant import Expectation
from tests.kernels.cuda import compiled

HOPPER = (9, 0)
USUAL = Expectation(registers=128)
LARGE_FAMILIES = ("attention_decode", "attention_prefill", "quantized_matmul")
"""Of which there are hundreds; `make gpu` compiles what it runs of them."""


@dataclass(frozen=True)
class Scaler:
    """The smallest variant there can be; `in_float64` and `scratch` make it a bad one."""

    in_float64: bool = False
    scratch: int = 0
    name: str = "scaler"
    threads: int = 64
    arguments: tuple[str, ...] = ("float32*", "int32")
    expectation: Expectation = USUAL

    def kernel(self):
        factor = 0.1 if self.in_float64 else float32(0.1)
        scratch = self.scratch

        def scale(values, which):
            i = cuda.threadIdx.x
            values[i] *= factor
            if scratch > 0:
                kept = cuda.local.array(64, float32)
                for j in range(scratch):
                    kept[j % 64] = values[j]
                values[i] = kept[which]

        return scale


def faults_of(variant) -> list[str]:
    ptx = build.compile_ptx(variant, HOPPER)
    cubin, usage = build.link(variant.name, ptx, HOPPER)
    (counts,) = count_instructions([cubin], "sm_90")
    return check.faults(variant, usage, ptx, "sm_90", counts)


@pytest.mark.wide
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_check_passes_for_a_spread_of_variants(operation, monkeypatch, capsys):
    monkeypatch.setattr(build, "compile_ptx", compiled.text_of)  # other tests run some of them
    monkeypatch.setattr(build, "link", compiled.kept_link)

    assert check.main(["--jobs", "1", "--only", operation]) == 0

    *lines, summary = capsys.readouterr().out.splitlines()
    variants = OPERATIONS[operation].variants(every=False)
    assert summary == f"{2 * len(variants)} of {2 * len(variants)} good"
    for variant in variants:
        for arch in ("sm_80", "sm_90"):
            assert any(f"{variant.name} " in line and arch in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name not in LARGE_FAMILIES])
def test_the_check_passes_for_every_variant(operation, capsys):
    assert check.main(["--all", "--jobs", "1", "--only", operation]) == 0

    number = 2 * len(OPERATIONS[operation].variants(every=True))
    assert capsys.readouterr().out.endswith(f"\n{number} of {number} good\n")


@pytest.mark.wide
def test_ptx_is_kept_until_what_it_is_made_from_changes(tmp_path):
    kept = tmp_path / "ptx"
    entry = ".visible .entry scaler("
    text = compiled.kept_text(Scaler(), kept, "a state of the sources")
    assert entry in text
    (file,) = kept.iterdir()
    file.write_text(file.read_text().replace(text, "kept"))

    assert compiled.kept_text(Scaler(), kept, "a state of the sources") == "kept"
    assert entry in compiled.kept_text(Scaler(in_float64=True), kept, "a state of the sources")
    assert entry in compiled.kept_text(Scaler(in_float64=True), kept, "another")


def test_ptx_of_several_trees_is_kept_side_by_side_and_the_latest_of_them_only(
    tmp_path, monkeypatch
):
    made = []
    monkeypatch.setattr(compiled, "compile_ptx", lambda _: made.append(1) or f"text {len(made)}")
    for tree in "abab":
        compiled.kept_text(Scaler(), tmp_path, tree)
    assert len(made) == 2
    for tree in map(str, range(2 * compiled.KEPT)):
        compiled.kept_text(Scaler(), tmp_path, tree)
    assert len(list(tmp_path.iterdir())) == compiled.KEPT
    text = compiled.kept_text(Scaler(), tmp_path, str(2 * compiled.KEPT - 1))
    assert text == f"text {len(made)}"


@pytest.mark.wide
def test_machine_code_is_kept_until_its_ptx_changes(tmp_path, monkeypatch):
    kept, asked, ptx = tmp_path / "ptx", [], build.compile_ptx(Scaler())

    def link(*arguments):
        asked.append(arguments)
        return build.link(*arguments)

    monkeypatch.setattr(compiled, "link", link)
    cases = [(ptx, HOPPER), (ptx, HOPPER), (f"{ptx}\n", HOPPER), (ptx, (8, 0))]
    made = [compiled.kept_link("scaler", *case, kept) for case in cases]
    assert asked == [("scaler", *case) for case in cases[1:]]
    assert made == [build.link("scaler", *case) for case in cases]


@pytest.mark.wide
def test_machine_code_is_an_elf_file_whose_entry_point_bears_the_variants_name():
    variant = RmsNormVariant("float16", 4096)

    ptx = build.compile_ptx(variant, HOPPER)
    cubin, usage = build.link(variant.name, ptx, HOPPER)

    assert f".visible .entry {variant.name}(" in ptx
    assert cubin.startswith(b"\x7fELF")
    assert b".text." + variant.name.encode() in cubin
    assert 0 < usage.registers <= variant.expectation.registers
    assert usage.shared_bytes >= 4 * variant.threads // 32  # the sum of each warp


def test_a_good_kernel_has_no_faults():
    assert faults_of(Scaler()) == []


@pytest.mark.wide
def test_a_kernel_that_begins_early_and_never_waits_is_a_fault():
    if find_disassembler() is None:
        pytest.skip("no nvdisasm")
    variant = Scaler(expectation=Expectation(128, begins_early=True))

    assert faults_of(variant) == ["no PREEXIT", "no ACQBULK"]


@pytest.mark.wide
def test_float64_arithmetic_is_a_fault():
    assert faults_of(Scaler(in_float64=True)) == ["float64 arithmetic"]


@pytest.mark.wide
def test_an_array_that_is_not_in_registers_is_a_fault():
    (fault,) = faults_of(Scaler(scratch=500))

    assert "256 bytes of local memory" in fault


@pytest.mark.parametrize(
    ("usage", "fault"),
    [
        (build.ResourceUsage(200, 0, 0, 0), "200 registers, the ceiling is 128"),
        (build.ResourceUsage(100, 0, 0, 24), "24 bytes of spills"),
    ],
)
def test_registers_above_the_ceiling_and_spills_are_faults(usage, fault):
    assert check.faults(Scaler(), usage, "", "sm_90", Counter()) == [fault]


def test_more_shared_memory_than_can_be_launched_is_a_fault():
    usage = build.ResourceUsage(8, 1 << 20, 0, 0)
    arrays = ".shared .align 16 .b8 a[{}];\n\tld.shared.u32 %r1, [a+4];\n.shared .b8 b[1024];"
    assert check.faults(Scaler(), usage, arrays.format(47 << 10), "sm_90", Counter()) == []
    assert check.faults(Scaler(), usage, arrays.format(48 << 10), "sm_90", Counter()) == [
        "50176 bytes of shared memory, the ceiling is 49152"
    ]


def test_a_missing_instruction_is_a_fault():
    variant = Scaler(expectation=Expectation(128, ("FMUL", "HMMA")))

    assert faults_of(variant) == ["no HMMA"]


@pytest.mark.wide
def test_kernels_disassembled_together_have_the_counts_that_each_has_alone():
    cubins = [
        build.link(variant.name, build.compile_ptx(variant, HOPPER), HOPPER)[0]
        for variant in (Scaler(scratch=500), Scaler(), Scaler(in_float64=True))
    ]

    together = count_instructions(cubins, "sm_90")

    assert together == [count_instructions([cubin], "sm_90")[0] for cubin in cubins]
    scratch, plain, in_float64 = together
    assert scratch["STL"] > 0
    assert plain["FMUL"] == 1
    assert plain["STL"] == plain["DMUL"] == 0
    assert in_float64["DMUL"] == 1


@pytest.mark.wide
def test_the_check_fails_if_one_variant_is_bad(monkeypatch, capsys):
    bad = SimpleNamespace(variants=lambda **_: [Scaler(in_float64=True)])
    monkeypatch.setattr(check, "OPERATIONS", {"scaler": bad})

    assert check.main(["--jobs", "1"]) == 1

    out = capsys.readouterr().out
    assert "FAULT: float64 arithmetic" in out
    assert "0 of 2 good" in out


def test_a_capability_the_compiler_does_not_know_is_a_compile_error():
    with pytest.raises(CompileError, match=r"scaler for \(3, 0\): .*not supported"):
        build.compile_ptx(Scaler(), (3, 0))


def test_ptx_the_assembler_refuses_is_a_compile_error_in_one_line():
    newer = build.compile_ptx(Scaler(), HOPPER)

    with pytest.raises(CompileError, match=r"^scaler: .*ptxas fatal.*$"):
        build.link("scaler", newer, (8, 0))


def test_a_linker_log_without_the_report_is_a_compile_error():
    with pytest.raises(CompileError, match="no resource report"):
        build.parse_usage("scaler", "")
