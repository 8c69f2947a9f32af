"""`hetero-infer bench`: real planes without a model, tiny runs, and what is written of them."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hetero_infer.bench import plots, report
from hetero_infer.cli import main
from hetero_infer.commands.bench import BENCHMARKS
from planes.extras import the_extra

PNG = b"\x89PNG\r\n\x1a\n"
TINY = ["--executor", "simulated", "--prompt-tokens", "6", "--output-tokens", "5", "--repeat", "2"]


def run(capsys, directory, name: str, *flags: str) -> tuple[str, dict]:
    assert main(["bench", name, *flags, "--output", str(directory)]) == 0
    assert (directory / f"{name}.png").read_bytes().startswith(PNG)
    whole = json.loads((directory / f"{name}.json").read_text(encoding="utf-8"))
    assert whole["benchmark"] == name
    assert whole["schema"] == report.SCHEMA
    assert whole["command"].startswith(f"hetero-infer bench {name} ")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", whole["date"])
    assert whole["machine"]["cpus"] >= 1
    assert whole["software"]["hetero-paged-infer"]
    assert {"commit", "tree_has_changes", "settings", "cpu_share_of_others"} <= set(whole)
    return capsys.readouterr().out, whole


def refused(capsys, *argv: str) -> str:
    assert main(["bench", *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("hetero-infer: error: ")


@pytest.mark.wide
def test_throughput_has_every_run_of_every_level(capsys, tmp_path):
    text, whole = run(capsys, tmp_path, "throughput", *TINY, "--concurrency", "1,3")
    assert "output tok/s" in text
    assert "3 × (6 + 5)" in text
    assert [result["concurrency"] for result in whole["results"]] == [1, 3]
    for result in whole["results"]:
        assert len(result["samples"]) == 2
        for sample in result["samples"]:
            assert len(sample["streams"]) == result["concurrency"]
            assert all(sum(stream["counts"]) == 5 for stream in sample["streams"])
        assert result["median"]["total_tokens_per_second"] > 0
        assert result["processors"]["control_plane_share"] > 0
    assert whole["model"]["executor"] == "simulated"
    assert whole["settings"]["engine"]["executor"] == "simulated"


@pytest.mark.slow
def test_latency_has_both_waits_and_the_long_prompt(capsys, tmp_path):
    flags = ["--concurrency", "2", "--requests", "3", "--long-prompt", "40"]
    text, whole = run(capsys, tmp_path, "latency", *TINY, *flags)
    assert "longest gap of that stream" in text
    (result,) = whole["results"]
    assert [len(sample) for sample in result["samples"]] == [3, 3]
    assert set(result["inter_token_ms"]) == {"p50", "p90", "p99", "max"}
    assert len(whole["prefill"]["samples_ms"]) == 2
    assert len(whole["beside"]["samples"]) == 2
    assert whole["beside"]["longest_gap_ms"] > 0


@pytest.mark.slow
def test_a_neighbour_is_compared_with_being_alone_and_gone_afterwards(capsys, tmp_path):
    # A few tokens may all come at once on a busy machine, and have no rate.
    text, whole = run(capsys, tmp_path, "neighbour", *TINY, "--output-tokens", "200")
    assert "beside 1 busy neighbour" in text
    assert len(whole["samples"]) == 2
    for sample in whole["samples"]:
        rates = sample["alone_tokens_per_second"], sample["beside_tokens_per_second"]
        assert sample["slower_by"] == pytest.approx(rates[0] / rates[1])
        assert sample["neighbour_cores"] >= 0


@pytest.mark.slow
def test_starts_are_of_the_command_and_of_both_planes(capsys, tmp_path):
    text, whole = run(capsys, tmp_path, "start", "--executor", "simulated", "--repeat", "1")
    assert "to its first text" in text
    assert [len(result["samples_s"]) for result in whole["results"]] == [1] * 4
    medians = {result["what"]: result["median_s"] for result in whole["results"]}
    assert min(medians.values()) > 0
    assert medians["first_text"] < medians["command"]
    assert whole["cold"] is None


@pytest.mark.wide
def test_a_command_that_does_not_start_says_why(capsys):
    assert main(["bench", "start", "--model", "/nowhere.gguf"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "`hetero-infer --input` ended with status 2: " in line
    assert "model /nowhere.gguf: no such file" in line


@pytest.mark.slow
def test_the_link_is_measured_with_one_and_two_batches_under_way(capsys, tmp_path):
    flags = ["--streams", "2", "--many-streams", "5", "--contexts", "64,400"]
    text, whole = run(capsys, tmp_path, "link", *TINY, *flags)
    assert "400" in text
    assert [figures["depth"] for figures in whole["depths"]] == [1, 2]
    for figures in whole["depths"]:
        assert len(figures["samples_s"]) == 2
        assert figures["plane_step_s"] > 0
        assert 0 <= figures["plane_idle_share"] < 1
    assert whole["many"]["scheduling_delay_p99_s"] > 0
    assert "pipeline_depth" not in whole["settings"]["engine"]


@pytest.mark.slow
def test_memory_has_all_three_rules_and_both_planes(capsys, tmp_path):
    flags = ["--executor", "simulated", "--requests", "30", "--streams", "2"]
    sizes = ["--prompt-tokens", "20", "--output-tokens", "10", "--max-model-len", "256"]
    text, whole = run(capsys, tmp_path, "memory", *flags, *sizes, "--longest", "256")
    assert "both beyond the KV pool" in text
    assert [result["method"] for result in whole["results"]] == ["static", "dynamic", "paged"]
    assert whole["resident"]["control_plane"]["rss"] > 0
    assert whole["resident"]["compute_plane"]["pss"] > 0


@pytest.mark.slow
def test_kernels_are_measured_beside_roofs_that_are_measured_first(tmp_path):
    command = [sys.executable, "-m", "hetero_infer", "bench", "kernels", "--output", str(tmp_path)]
    quick = ["--seconds", "0.001", "--repeat", "1", "--sizes", "1,2"]
    subprocess.run([*command, *quick], check=True, capture_output=True, timeout=600)
    whole = json.loads((tmp_path / "kernels.json").read_text(encoding="utf-8"))
    assert {"read", "fma", "int8_dot"} <= {roof["name"] for roof in whole["roofs"]}
    assert all(result["share"] > 0 for result in whole["results"])
    assert (tmp_path / "kernels.png").read_bytes().startswith(PNG)


@pytest.mark.slow
@pytest.mark.model
def test_formats_of_the_embedded_model_lose_what_they_may(tmp_path):
    command = [sys.executable, "-m", "hetero_infer", "bench", "accuracy", "--output", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    whole = json.loads((tmp_path / "accuracy.json").read_text(encoding="utf-8"))
    ratios = {result["format"]: result["perplexity_ratio"] for result in whole["results"]}
    assert ratios == {
        "auto:bfloat16": pytest.approx(1, abs=0.01),
        "auto:int8": pytest.approx(1, abs=0.01),
        "bfloat16:bfloat16": pytest.approx(1, abs=0.002),
    }
    assert whole["text"]["positions"] > 1000
    assert (tmp_path / "accuracy.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["throughput", "--concurrency", "1,x"], "concurrency must be numbers from 1 to"),
        (["throughput", "--repeat", "0"], "repeat (from --repeat) must be at least 1, got 0"),
        (["latency", "--rate", "0"], "rate (from --rate) must be greater than 0"),
        (["throughput", "--target", "unix:a", "--dtype", "auto"], "--dtype means nothing with"),
        (["throughput", "--json", "/nowhere/x"], "json /nowhere/x: there is no such directory"),
        (["neighbour", "--output-tokens", "1"], "output_tokens must be at least 2 to have a rate"),
        (["neighbour", "--target", "unix:a"], "No such option: --target"),
        (["link", "--pipeline-depth", "1"], "No such option: --pipeline-depth"),
        (["link", "--contexts", "64,"], "contexts must be numbers from 1 to"),
        (["kernels", "--model", "x"], "No such option: --model"),
        (["accuracy", "--formats", "auto"], "formats must be WEIGHTS:KV with commas between them"),
        (["accuracy", "--formats", "auto:auto"], "formats must be WEIGHTS:KV with commas"),
        (["accuracy", "--piece-tokens", "1"], "piece_tokens (from --piece-tokens) must be at"),
        (["accuracy", "--target", "unix:a"], "No such option: --target"),
        (["memory", "--longest", "2049"], "shortest (64) must be at most longest (2049), and that"),
        ([], "`bench` wants a command behind it: throughput, "),
    ],
)
def test_what_cannot_be_measured_is_one_line(capsys, argv, message):
    assert refused(capsys, *argv).startswith(message)


def test_every_benchmark_has_its_module_its_plot_and_its_place_in_the_makefile():
    names = [benchmark.name for benchmark in BENCHMARKS]
    for name in names:
        assert callable(importlib.import_module(f"hetero_infer.bench.{name}").run)
        assert callable(getattr(plots, f"draw_{name}"))
    makefile = (Path(__file__).parents[3] / "Makefile").read_text(encoding="utf-8")
    assert f"BENCH ?= {' '.join(names)}\n" in makefile


def test_flags_before_bench_are_refused_because_they_would_do_nothing(capsys):
    assert main(["--dtype", "auto", "bench", "memory"]) == 2
    assert "--dtype belongs behind `bench memory`" in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused_before_anything_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    line = refused(capsys, "throughput", "--plot", str(tmp_path / "x.png"))
    assert line == f"a plot needs matplotlib, of {the_extra('bench')}"


def test_without_matplotlib_no_directory_is_made(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    directory = tmp_path / "results"
    assert "matplotlib" in refused(capsys, "throughput", "--output", str(directory))
    assert not directory.exists()


def test_the_command_line_knows_the_benchmarks_without_importing_what_they_need():
    code = (
        "import sys, hetero_infer.cli; "
        "print([m for m in ('numba', 'numpy', 'matplotlib', 'grpc') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
