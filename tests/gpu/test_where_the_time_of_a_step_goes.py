"""The profile of a decode step: kernels and pauses of what ran, or why it is not known."""

from __future__ import annotations

import pytest

from bench.gpu import engine_steps, step_answers
from bench.gpu.engine_steps import PlaneFlags, Workload
from bench.gpu.findings import Findings
from bench.gpu.random_model import TINY, write_model
from bench.gpu.step_profile import LONGEST_NAME, KernelRun, profiled_runs, where_time_goes

WORK = Workload(batches=(2,), context=20, steps=3, warm_up=2, repeats=1, profiled_batches=(2,))


def measured(model) -> tuple[Findings, dict]:
    found = Findings()
    flags = PlaneFlags("cpu", "float32")
    engine_steps.measure_steps(found, TINY, model, flags, gb_per_s=10.0, work=WORK)
    (figures,) = found.values["engine_steps"]["batches"]
    return found, figures["profile"]


@pytest.fixture(autouse=True)
def _few_answers(monkeypatch):
    monkeypatch.setattr(step_answers, "STEPS", 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(TINY, tmp_path_factory.mktemp("model") / "tiny")


def test_a_step_is_the_time_in_kernels_and_the_pauses_between_them():
    runs = [
        KernelRun("norm", 10.0, 12.0),
        KernelRun("product", 15.0, 25.0),
        KernelRun("copy", 16.0, 18.0),  # beside the product: no pause, and none behind it
        KernelRun("norm", 26.0, 30.0),
        KernelRun("product", 30.0, 50.0),
    ]
    profile = where_time_goes(runs, steps=2)
    assert profile["span_us"] == 20
    assert profile["pauses_us"] == (3 + 1) / 2
    assert profile["busy_us"] == 18
    assert profile["pauses_per_step"] == 1
    assert profile["median_pause_us"] == 2
    assert profile["kernels"] == [
        {"name": "product", "per_step": 1, "median_us": 15, "us_per_step": 15},
        {"name": "norm", "per_step": 1, "median_us": 3, "us_per_step": 3},
        {"name": "copy", "per_step": 0.5, "median_us": 2, "us_per_step": 1},
    ]


def test_kernels_of_long_names_are_told_apart_by_their_beginning():
    runs = [KernelRun("x" * 500, 0, 1), KernelRun("y", 1, 2)]
    names = {kernel["name"] for kernel in where_time_goes(runs, 1)["kernels"]}
    assert names == {"x" * LONGEST_NAME, "y"}


@pytest.mark.wide
def test_the_profiler_sees_what_runs_in_the_order_of_its_starts():
    torch = pytest.importorskip("torch")
    ones = torch.ones(64, 64)
    runs = profiled_runs(lambda: (ones @ ones).exp_(), "cpu")
    names = [run.name for run in runs]
    assert names.index("aten::mm") < names.index("aten::exp_")
    assert [run.start for run in runs] == sorted(run.start for run in runs)
    assert all(run.start <= run.end for run in runs)


@pytest.mark.wide
def test_the_report_has_the_profile_of_the_sizes_that_are_to_be_profiled(model, capsys):
    found, profile = measured(model)
    assert found.failures == []
    assert profile["steps"] == WORK.warm_up
    assert profile["span_us"] == pytest.approx(profile["busy_us"] + profile["pauses_us"])
    assert any("mm" in kernel["name"] for kernel in profile["kernels"])
    assert len(profile["kernels"]) > engine_steps.SHOWN_KERNELS
    assert f"{profile['span_us']:.0f} µs with a profiler" in capsys.readouterr().out


@pytest.mark.wide
def test_a_profiler_that_sees_nothing_is_a_line_and_no_fault(model, monkeypatch, capsys):
    def sees_nothing(queue_work, _device):
        queue_work()
        raise RuntimeError("torch's profiler saw nothing run on the device")

    monkeypatch.setattr(engine_steps, "profiled_runs", sees_nothing)
    found, profile = measured(model)
    assert found.failures == []
    why = "RuntimeError: torch's profiler saw nothing run on the device"
    assert profile == {"unavailable": why}
    assert why in capsys.readouterr().out
