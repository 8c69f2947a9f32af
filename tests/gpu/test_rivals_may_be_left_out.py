"""With `--no-rivals` a report's minutes go to what is ours alone."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch

from bench.gpu import __main__ as report
from bench.gpu import (
    decode_bandwidth,
    dense_bandwidth,
    engine_serving,
    expert_speed,
    kernel_parts,
    matmul_bandwidth,
    prefill_speed,
)
from bench.gpu.findings import Findings, PartOptions
from bench.gpu.part_process import Part, PartResult
from compute_plane.cuda import launchers

FIGURES = {
    "gb_per_s": 1.0, "tflop_per_s": 1.0, "microseconds_per_product": 1.0,
    "microseconds_per_layer": 1.0, "split_rows": 0, "splits": 0, "faults": [],
}  # fmt: skip


class Asked:
    """Stands for a measurement, and notes whether it was to be of rivals, too."""

    def __init__(self) -> None:
        self.rivals: list[object] = []

    def own(self, *_, rivals=None, has_rivals=None, **__):
        self.rivals.append(rivals if has_rivals is None else has_rivals)
        return {**FIGURES, "rivals": {}}

    def others(self, *_, **__):
        self.rivals.append("others")
        return {}


@pytest.fixture
def asked(monkeypatch):
    """Measure nothing; what was to be measured of rivals."""
    made = Asked()
    for module, name in (
        (decode_bandwidth, "measure_decode"), (prefill_speed, "measure_prefill"),
        (matmul_bandwidth, "measure_matmul"), (dense_bandwidth, "measure_dense"),
        (expert_speed, "measure_experts"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, made.own)
        monkeypatch.setattr(module, "SHAPES", module.SHAPES[:1])
    for module in (decode_bandwidth, prefill_speed):
        monkeypatch.setattr(module, "measure_rivals", made.others)
        monkeypatch.setattr(module, "Problem", lambda *_: None)
    loader = types.SimpleNamespace(prepare=lambda _: None, load=lambda _: None)
    monkeypatch.setattr(kernel_parts, "KernelLoader", lambda *_, **__: loader)
    monkeypatch.setattr(kernel_parts, "_note_kernels", lambda *_: None)
    monkeypatch.setattr(launchers, "CudaLauncher", lambda *_: None)
    monkeypatch.setattr(decode_bandwidth, "measure_copy", lambda _: {"gb_per_s": 1.0})
    device = types.SimpleNamespace(multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return made.rivals


WITH_AND_WITHOUT = {
    "decode_attention": ([{}, "others"], [{}]),
    "prefill_attention": ([{}, "others"], [{}]),
    "quantized_matmul": ([matmul_bandwidth.RIVALS], [{}]),
    # What a layer of ours had in this one's place is no rival.
    "dense_matmul": ([dense_bandwidth.RIVALS], [dense_bandwidth.OWN_LAUNCHES]),
    "experts": ([True], [False]),
}


@pytest.mark.parametrize("part", WITH_AND_WITHOUT)
def test_a_part_measures_others_unless_it_is_told_not_to(asked, part):
    for told, expected in zip((True, False), WITH_AND_WITHOUT[part], strict=True):
        asked.clear()
        options = PartOptions(Path("not used"), 600, has_rivals=told)
        getattr(kernel_parts, part)(Findings(), options)
        assert asked == expected


@pytest.mark.parametrize("told", [True, False])
def test_transformers_is_given_the_same_prompts_unless_rivals_are_left_out(monkeypatch, told):
    asked = []
    monkeypatch.setattr(engine_serving, "write_model", lambda *_: Path("m"))
    monkeypatch.setattr(engine_serving, "measure_engine", lambda *_: asked.append("ours"))
    monkeypatch.setattr(
        engine_serving, "compare_with_transformers", lambda *_, **__: asked.append("others")
    )
    options = PartOptions(Path("not used"), 600, has_rivals=told)
    engine_serving.engine_serving(Findings(), options)
    assert asked == ["ours", "others"][: 1 + told]


def test_torchs_products_are_measured_where_steps_make_them_without_rivals_too(monkeypatch):
    """There they are ours."""
    for takes, told, expected in (
        (True, True, 2), (True, False, 1), (False, True, 1), (False, False, 1),
    ):  # fmt: skip
        timed = []
        kernels = types.SimpleNamespace(takes=lambda *_, takes=takes: takes)
        problem = types.SimpleNamespace(
            operations=types.SimpleNamespace(experts=kernels), layers=[None], bytes_moved=1,
            experts_with_rows=1, visit=lambda: None, faults=lambda *_: [],
            torch_waits_for_nothing=lambda: True, leave_it_to_torch=lambda: None,
        )  # fmt: skip
        monkeypatch.setattr(expert_speed, "Problem", lambda *_, problem=problem: problem)

        def timer(_, repeats, timed=timed):
            timed.append(repeats)
            return [1.0] * repeats

        shape = expert_speed.SHAPES[0]
        result = expert_speed.measure_experts(
            shape, None, timer, late=None, device="cpu", has_rivals=told
        )
        assert len(timed) == expected
        assert result["microseconds_per_layer"] > 0
        assert list(result["rivals"]) == ["torch"] * (expected - 1)


@pytest.mark.parametrize(("flags", "expected"), [((), True), (("--no-rivals",), False)])
def test_every_part_is_told_what_was_asked_for(monkeypatch, tmp_path, flags, expected):
    told = []

    def run_part(_, options, *__):
        told.append(PartOptions.from_json(options.to_json()))
        return PartResult("done", 0.0)

    monkeypatch.setattr(report, "run_part", run_part)
    monkeypatch.setattr(report, "what_hinders", list)
    described = {"device": {"name": "x", "capability": "9.0"}, "software": {"compiler": "works"}}
    monkeypatch.setattr(report, "_describe_run", lambda _: described)
    out = tmp_path / "report.json"
    assert report.main(["--out", str(out), *flags], [Part("a", "not:run", 60)]) == 0
    assert [options.has_rivals for options in told] == [expected]
