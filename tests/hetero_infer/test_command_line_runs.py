"""The command as users run it: real processes, with the simulated executor in the compute plane."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.hetero_infer.command_processes import (
    PATIENCE_S,
    SIMULATED,
    environment,
    private_directories,
    run,
    started,
)


def processes_of(group: str) -> list[str]:
    """Command lines that mention a directory: the planes of one run."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            line = (entry / "cmdline").read_bytes().decode(errors="replace")
            if entry.name.isdigit() and group in line:
                found.append(line)
    return found


def test_one_text_has_the_header_the_text_the_count_and_the_speed(environ):
    result = run(environ, "--input", "你好,世界!", "--max-tokens", "12", "--seed", "3", *SIMULATED)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert re.fullmatch(
        r"""Heterogeneous Inference System
==============================
Configuration:
  Block size: 16
  Max blocks: 1024
  Max batch size: 32
  Max sequences: 256
  Model: simulated .*
  Executor: simulated on .*

Input: 你好,世界!
Generating up to 12 tokens\.\.\.

Output: [\w .]{12}
Tokens generated: 12
Speed: \d+\.\d tokens/s \(first token after \d\.\d\d s, \d+ prompt tokens\)
""",
        result.stdout,
    )


SEEDED = ["--max-tokens", "9", "--seed", "5", "--ignore-eos", *SIMULATED]


@pytest.fixture(scope="module")
def in_json(tmp_path_factory) -> subprocess.CompletedProcess[str]:
    """A prompt of two lines, answered in JSON, with the log of the planes in JSON too."""
    environ = environment(tmp_path_factory.mktemp("run"))
    logged = ["--log-level", "info", "--log-format", "json"]
    return run(environ, "--input", "Hello,\nworld", *SEEDED, "--json", *logged)


def test_json_is_one_object(in_json):
    assert in_json.returncode == 0, in_json.stderr
    (line,) = in_json.stdout.splitlines()
    answer = json.loads(line)
    assert bytes(answer["token_ids"]).decode() == answer["text"]
    assert answer["finish_reason"] == "length"
    assert answer["usage"] == {
        "prompt_tokens": 12,
        "completion_tokens": 9,
        "total_tokens": 21,
        "cached_tokens": 0,
    }
    assert set(answer["timings"]) == {
        "startup_s",
        "queue_s",
        "time_to_first_token_s",
        "total_s",
        "tokens_per_second",
    }
    assert answer["seed"] == 5


@pytest.fixture(scope="module")
def piped(tmp_path_factory) -> subprocess.CompletedProcess[str]:
    """The same prompt from standard input, the text alone, with the log of the planes."""
    environ = environment(tmp_path_factory.mktemp("run"))
    return run(environ, *SEEDED, "--quiet", "--log-level", "info", stdin="Hello,\nworld\n")


@pytest.mark.wide
def test_a_prompt_may_be_piped_in_and_the_same_seed_gives_the_text_that_json_has(piped, in_json):
    """The last line end of what is piped in is not part of the prompt."""
    assert piped.returncode == 0, piped.stderr
    assert piped.stdout == json.loads(in_json.stdout)["text"] + "\n"


def test_the_log_of_the_planes_is_shown_as_people_read_it_unless_a_format_is_asked_for(
    piped, in_json
):
    lines = piped.stderr.splitlines()
    assert any(line.startswith("hetero-infer: compute plane: loaded (model: sim") for line in lines)
    assert any(line.startswith("hetero-infer: control plane: listening (add") for line in lines)
    assert not any("{" in line for line in lines)
    lines = in_json.stderr.splitlines()
    assert {json.loads(line)["plane"] for line in lines} == {"compute", "control"}


@pytest.mark.wide
def test_a_part_of_ones_own_that_cannot_be_made_is_one_line_and_status_2(environ, tmp_path):
    (tmp_path / "broken_part.py").write_text("def make(config, kv_cache): raise LookupError(7)")
    environ["PYTHONPATH"] += f":{tmp_path}"
    result = run(environ, "--input", "x", "--scheduler", "broken_part:make", "--json", *SIMULATED)
    assert result.returncode == 2
    assert result.stderr == (
        "hetero-infer: error: the control plane ended with status 2: control_plane: "
        "scheduler: making it failed: LookupError: 7\n"
    )


@pytest.mark.wide
def test_several_samples_are_told_one_after_the_other_and_all_in_json(environ):
    arguments = ["--input", "x", "--max-tokens", "7", "--seed", "5", "--ignore-eos", *SIMULATED]
    result = run(environ, *arguments, "--n", "3", "--json")
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    texts = [sample["text"] for sample in answer["samples"]]
    assert len(texts) == len(set(texts)) == 3
    assert answer["text"] == texts[0]
    assert answer["usage"]["completion_tokens"] == 21
    assert [sample["finish_reason"] for sample in answer["samples"]] == ["length"] * 3
    plain = run(environ, *arguments, "--n", "3").stdout
    assert [f"Output {i}: {text}" for i, text in enumerate(texts, 1)] == [
        line for line in plain.splitlines() if line.startswith("Output ")
    ]
    assert plain.endswith(" s, 1 prompt token)\n")  # in the singular
    quiet = run(environ, *arguments, "--n", "3", "--quiet").stdout
    assert quiet == "\n\n".join(texts) + "\n"


@pytest.mark.slow
def test_a_beam_search_gives_the_best_answers_first(environ):
    arguments = ["--input", "Hello", "--max-tokens", "5", "--ignore-eos", *SIMULATED]
    result = run(environ, *arguments, "--beam-width", "3", "--n", "2", "--json", "--priority=-1")
    assert result.returncode == 0, result.stderr
    samples = json.loads(result.stdout)["samples"]
    assert [len(sample["token_ids"]) for sample in samples] == [5, 5]
    assert samples[0] != samples[1]
    refused = run(environ, *arguments, "--beam-width", "2", "--n", "3")
    assert refused.returncode == 2
    assert "n must be at most beam_width (2), got 3" in refused.stderr


@pytest.mark.wide
def test_what_the_server_refuses_is_one_line_with_both_numbers_and_status_2(environ):
    result = run(
        environ, "--input", "Hello", "--max-model-len", "10", "--max-tokens", "6", *SIMULATED
    )
    assert result.returncode == 2
    assert result.stderr == (
        "hetero-infer: error: max_tokens must be at most 5 after a prompt of 5 tokens "
        "(max_model_len is 10), got 6\n"
    )
    assert "Output:" not in result.stdout


@pytest.mark.slow
def test_a_length_that_nobody_gave_is_what_the_context_has_left(environ):
    result = run(environ, "--input", "Hello", "--max-model-len", "10", "--json", *SIMULATED)
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert (answer["usage"]["completion_tokens"], answer["finish_reason"]) == (5, "length")


@pytest.mark.wide
def test_a_request_that_never_fits_into_the_pool_is_status_2(environ):
    arguments = ["--max-num-blocks", "2", "--max-tokens", "100", "--json", *SIMULATED]
    result = run(environ, "--input", "Hello", *arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert re.fullmatch("hetero-infer: error: .*the pool has 2\n", result.stderr)


@pytest.mark.wide
def test_a_compute_plane_that_cannot_start_says_why_in_one_line(environ):
    result = run(environ, "--input", "x", "--quiet", "--model", "/no/such/model.gguf")
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("hetero-infer: error: the compute plane ended with status 2: ")
    assert "/no/such/model.gguf" in line


@pytest.mark.wide
def test_a_configuration_file_and_variables_reach_the_planes(environ, tmp_path):
    path = tmp_path / "c.json"
    path.write_text('{"executor": "simulated", "max_tokens": 3, "block_size": 8, "zebra": 1}')
    environ["HETERO_MAX_NUM_BLOCKS"] = "77"
    result = run(environ, "--config", str(path), "--input", "Hello")
    assert result.returncode == 0, result.stderr
    assert result.stderr == f"hetero-infer: warning: {path}: unknown key 'zebra' is ignored\n"
    assert "Block size: 8\n  Max blocks: 77\n" in result.stdout
    assert "Generating up to 3 tokens" in result.stdout


def wait_for_text(process: subprocess.Popen[str]) -> None:
    """Return when text is about to be generated."""
    while not (line := process.stdout.readline()).startswith("Generating"):
        assert line, process.stderr.read()


def ctrl_c(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to everything in the group


@pytest.mark.parametrize(
    ("interrupt", "status"),
    [(ctrl_c, 130), pytest.param(subprocess.Popen.terminate, 143, marks=pytest.mark.slow)],
)
def test_a_signal_while_text_is_generated_ends_the_planes(environ, interrupt, status):
    endless = ["--max-tokens", "30000", "--max-model-len", "40000", "--max-num-blocks", "4000"]
    with started(environ, "--input", "x", "--ignore-eos", *endless, *SIMULATED) as process:
        wait_for_text(process)
        (directory,) = private_directories(environ)
        assert len(processes_of(directory.name)) == 2
        interrupt(process)
        _, log = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, log) == (status, "")
        assert processes_of(directory.name) == []
        assert private_directories(environ) == []


@pytest.mark.wide
def test_output_that_nobody_reads_ends_the_planes(environ):
    endless = ["--max-tokens", "30000", "--max-model-len", "40000", "--max-num-blocks", "4000"]
    with started(environ, "--input", "x", "--ignore-eos", *endless, *SIMULATED) as process:
        wait_for_text(process)
        process.stdout.close()
        assert process.wait(PATIENCE_S) == 128 + signal.SIGPIPE
        assert process.stderr.read() == ""
        assert private_directories(environ) == []
