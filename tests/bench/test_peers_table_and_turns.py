from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from bench.peers import environments
from bench.peers.__main__ import chosen_lines, parse
from bench.peers.cases import CASES, Case, Line
from bench.peers.contention import QuietRule, is_below, parse_stat, repeat_until_quiet
from bench.peers.models import DEFAULT_MODEL
from bench.peers.own_server import counted
from bench.peers.processes import PeerError, RunnerProcess
from bench.peers.results import LineResult, Sample, best_of, median_rate, to_markdown, to_object
from bench.peers.turns import RunOptions, take_turns
from hetero_infer.bench.load import StreamRecord
from hetero_infer.bench.report import finite
from planes.errors import ConfigError

BY_NAME = {case.name: case for case in CASES}
ALWAYS_QUIET = QuietRule(limit=1e9)


def result(case: Case, line: Line, peer: list[float], ours: list[float]) -> LineResult:
    return LineResult(
        case,
        line,
        peer=[Sample(100, 100 / rate) for rate in peer],
        ours=[Sample(100, 100 / rate) for rate in ours],
    )


class Scripted:
    """Takes seconds from a list and writes down what it was asked."""

    def __init__(self, name: str, seconds: list[float], asked: list[tuple[str, object]]) -> None:
        self.name, self.seconds, self.asked = name, seconds, asked
        self.pids: list[int] = []
        self.versions = {name: "1"}

    def measure(self, prompts: list[list[int]], output_tokens: int) -> tuple[int, float]:
        self.asked.append((self.name, prompts))
        return output_tokens, self.seconds.pop(0)

    def close(self) -> None:
        pass


def test_the_median_is_of_the_quiet_samples_or_of_all_if_none_was_quiet() -> None:
    quiet, loud = Sample(10, 1.0), Sample(10, 10.0, others=1.0, is_quiet=False)
    assert median_rate([quiet, loud, loud]) == 10.0
    assert median_rate([loud, loud]) == 1.0


def test_the_best_peer_is_compared_with_ours_on_the_default_model_only() -> None:
    case = BY_NAME["engine"]
    q4_1, q4_0, *_ = case.lines
    assert q4_1.own_model == DEFAULT_MODEL != q4_0.own_model
    results = [
        result(case, q4_1, [100, 120, 110], [300, 330, 320]),
        result(case, q4_0, [150, 170, 160], [400, 400, 400]),
    ]
    best = best_of(results)
    assert best is not None
    assert best.line is q4_0
    assert best.ratio == pytest.approx(320 / 160)
    assert [r.ratio for r in results] == pytest.approx([320 / 110, 400 / 160])


def test_the_table_has_a_line_for_each_peer_for_the_best_and_for_a_failure() -> None:
    case = BY_NAME["batch"]
    good, bad = case.lines[:2]
    failed = LineResult(case, bad, fault="ended\n| badly")
    table = to_markdown([result(case, good, [50.0], [100.0]), failed])
    lines = table.splitlines()
    assert len(lines) == 5
    assert len({line.count("|") for line in lines}) == 1
    assert "| 50.0 | q4_1 | 100.0 | 2.00 | 2/2 |" in lines[2]
    assert "failed" in lines[3]
    assert "ended / badly" in lines[3]
    assert "best: OpenVINO" in lines[4]


def test_results_are_json_even_where_nothing_was_measured() -> None:
    case = BY_NAME["prefill"]
    whole = to_object([LineResult(case, case.lines[0], fault="no")])
    back = json.loads(json.dumps(finite(whole), allow_nan=False))
    assert back["lines"][0]["ratio"] is None
    assert back["lines"][0]["fault"] == "no"
    assert back["best_peers"] == []


def test_peer_and_ours_take_turns_on_the_same_prompts_and_the_first_round_is_not_counted() -> None:
    asked: list[tuple[str, object]] = []
    peer = Scripted("peer", [9.0, 2.0, 4.0], asked)
    ours = Scripted("ours", [9.0, 1.0, 2.0], asked)
    case = BY_NAME["stream"]
    options = RunOptions(Path(), 1, 2, 0, ALWAYS_QUIET, io.StringIO())
    done = take_turns(case, case.lines[0], peer, ours, options)
    assert [name for name, _ in asked] == ["peer", "ours"] * 3
    prompts = [prompt for _, prompt in asked]
    assert prompts[0::2] == prompts[1::2]
    assert prompts[2] != prompts[4]
    assert [sample.seconds for sample in done.peer] == [2.0, 4.0]
    assert [sample.seconds for sample in done.ours] == [1.0, 2.0]
    assert done.ratio == pytest.approx(2.0)


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="only Linux says who was at work")
def test_a_disturbed_repetition_is_taken_again_and_the_last_one_is_marked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bench.peers.contention.PAUSE_S", 0.0)
    values = iter("abc")
    nothing_allowed = QuietRule(limit=-1e9, tries=3)
    attempts = repeat_until_quiet(lambda: next(values), [os.getpid()], nothing_allowed)
    assert [(a.value, a.is_quiet) for a in attempts] == [(v, False) for v in "abc"]
    [only] = repeat_until_quiet(lambda: "d", [os.getpid()], ALWAYS_QUIET)
    assert (only.value, only.is_quiet) == ("d", True)


def test_processor_time_is_of_the_roots_and_everything_below_them() -> None:
    parents = {7: 1, 8: 7, 9: 8, 10: 1}
    assert [pid for pid in parents if is_below(pid, {7}, parents)] == [7, 8, 9]
    stat = "8 (a) b) c) S 7 " + " ".join(str(n) for n in range(5, 53))
    assert parse_stat(stat) == (7, sum(range(14, 18)))


def test_streams_are_counted_as_the_runners_count() -> None:
    records = [
        StreamRecord(1024, 10.0, (10.5, 11.0, 12.5), (2, 1, 3), 12.75),
        StreamRecord(1024, 10.0, (11.5, 14.0), (1, 1), 14.0),
    ]
    assert counted("decode", records) == (4, 2.0)
    assert counted("prefill", records) == (1024, 0.5)
    assert counted("batch", records) == (8, 4.0)


ENGINE = """
class Engine:
    versions = {"toy": "1"}
    def __init__(self, job):
        self.job = job
    def measure(self, prompts, output_tokens):
        print("engines print what they like")
        if output_tokens > 9:
            raise RuntimeError("too many")
        return self.job.threads * output_tokens, float(len(prompts[0]))
    def close(self):
        pass

load = Engine
"""


def test_a_job_and_its_repetitions_cross_the_pipe_and_a_dead_engine_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Path(__file__).parents[2] / "bench/peers/runners/runner.py"
    (tmp_path / "runner.py").write_text(runner.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "run_toy.py").write_text(ENGINE, encoding="utf-8")
    monkeypatch.setattr("bench.peers.processes.RUNNERS", tmp_path)
    job = {"kind": "decode", "model": "m", "threads": 3, "settings": {}}
    with (tmp_path / "log").open("w", encoding="utf-8") as log:
        process = RunnerProcess(Path(sys.executable), "toy", job, environ={}, log=log)
        try:
            assert process.versions == {"toy": "1"}
            assert process.measure([[1, 2]], 4) == (12, 2.0)
            assert process.measure([[1]], 5) == (15, 1.0)
            with pytest.raises(PeerError, match="toy ended"):
                process.measure([[1]], 10)
        finally:
            process.close()
    assert "engines print what they like" in (tmp_path / "log").read_text(encoding="utf-8")


def test_what_is_not_installed_is_refused_by_name(tmp_path: Path) -> None:
    options = parse(["run", "--directory", str(tmp_path), "--cases", "prefill"])
    with pytest.raises(ConfigError, match="environment openvino, model ov_f32"):
        chosen_lines(options)
    options = parse(["run", "--cases", "prefill", "--peers", "vllm"])
    with pytest.raises(ConfigError, match="no line is left"):
        chosen_lines(options)


def test_what_is_built_in_a_relative_directory_is_named_absolutely(tmp_path, monkeypatch):
    """CMake looks for its generator from where it builds."""
    monkeypatch.chdir(tmp_path)
    commands = []

    def play(command, **_):
        commands.append(command)
        if "download" in command:
            with tarfile.open(Path(command[command.index("--dest") + 1], "x.tar.gz"), "w:gz") as it:
                (tmp_path / "llama.cpp").mkdir()
                it.add(tmp_path / "llama.cpp", "x/vendor/llama.cpp")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(environments.subprocess, "run", play)
    Path(".peers/llamacpp/source").mkdir(parents=True)
    environments.install(Path(".peers"), ["llamacpp"], [], 1)
    [ninja] = [word for command in commands for word in command if "MAKE_PROGRAM" in word]
    assert Path(ninja.partition("=")[2]).is_absolute()
