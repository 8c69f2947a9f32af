from __future__ import annotations

import io
import json
import math
import subprocess
import sys

import pytest

from hetero_infer.cli import main
from hetero_infer.config import ALL_CONFIGS
from planes.settings import settings_of


@pytest.fixture(autouse=True)
def _no_own_environment(monkeypatch):
    for cls in ALL_CONFIGS:
        for item in settings_of(cls):
            monkeypatch.delenv(item.env, raising=False)
    monkeypatch.delenv("HETERO_CONFIG", raising=False)


def refused(capsys, *argv: str) -> str:
    """Run a command line that must fail before anything is started; its one line."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line.removeprefix("hetero-infer: error: ")


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--max-tokens", "0", "max_tokens (from --max-tokens) must be at least 1, got 0"),
        ("--max-tokens", "-5", "max_tokens (from --max-tokens) must be at least 1, got -5"),
        ("--temperature", "nan", "temperature (from --temperature) must be finite, got 'nan'"),
        ("--temperature", "2.1", "temperature (from --temperature) must be at most 2.0, got 2.1"),
        ("--temperature", "-0.1", "temperature (from --temperature) must be at least 0, got -0.1"),
        ("--top-p", "0", "top_p (from --top-p) must be greater than 0, got 0"),
        ("--top-p", "1.5", "top_p (from --top-p) must be at most 1, got 1.5"),
        ("--seed", "x", "seed (from --seed) must be an integer, got 'x'"),
        ("--block-size", "0", "block_size (from --block-size) must be at least 1, got 0"),
        ("--memory-threshold", "inf", "memory_threshold (from --memory-threshold) must be finite"),
        ("--dtype", "int1", "dtype (from --dtype) must be one of auto, float32, bfloat16"),
        ("--executor", "none", "executor must be auto, cpu, cuda, simulated or module:attribute"),
    ],
)
def test_a_bad_flag_is_one_line_with_key_and_value_and_status_2(capsys, flag, value, message):
    assert refused(capsys, "--input", "x", flag, value).startswith(message)


@pytest.mark.parametrize("command", [["serve"], ["--serve"]])
def test_serve_refuses_bad_values_too(capsys, command):
    line = refused(capsys, *command, "--grpc-port", "70000")
    assert line == "grpc_port (from --grpc-port) must be at most 65535, got 70000"
    assert "can be reached" in refused(capsys, *command, "--grpc-host", "0.0.0.0")


def test_a_bad_variable_and_a_bad_key_are_named_together(capsys, tmp_path, monkeypatch):
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"memory_threshold": math.nan}))
    monkeypatch.setenv("HETERO_BLOCK_SIZE", "sixteen")
    line = refused(capsys, "--config", str(path), "--input", "x")
    assert "block_size (from HETERO_BLOCK_SIZE) must be an integer, got 'sixteen'" in line
    assert f"memory_threshold (from {path}) must be finite, got nan" in line


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--input", ""], "input must not be empty, got ''"),
        (["--input", "\udcff"], "input is not valid UTF-8"),
        (["--max-tokenz", "3"], "No such option: --max-tokenz"),
        (
            ["--target", "unix:a", "--input", "x"],
            "No such option: --target: `chat`, `complete` and `embed` take it, behind the name",
        ),
        (["--concurrency", "9"], "No such option: --concurrency: `complete` takes it, behind"),
        (["serve", "--target", "a"], "No such option: --target"),
        (["--input"], "Option '--input' requires an argument"),
        (["surprise"], "No such command 'surprise'; a prompt is given by --input"),
        (["--config", "/does/not/exist.json"], "config file /does/not/exist.json: No such file"),
    ],
)
def test_a_command_line_that_asks_for_nothing_possible_is_one_line(capsys, argv, message):
    assert refused(capsys, *argv).startswith(message)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--length-penalty", "2"], "length_penalty means nothing without beam_width, got 2.0"),
        (["--early-stopping"], "early_stopping means nothing without beam_width, got True"),
        (["--cache-salt", "x" * 257], "cache_salt must have at most 256 bytes, got 257"),
        (
            ["--max-tokens", "5000", "--max-model-len", "4096"],
            "max_tokens must be below max_model_len (4096), which the prompt shares, got 5000",
        ),
    ],
)
def test_parameters_that_the_server_would_refuse_are_refused_before_a_plane_starts(
    capsys, monkeypatch, argv, message
):
    monkeypatch.setattr("hetero_infer.commands.server.private_directory", None)
    assert refused(capsys, "--input", "x", *argv) == message


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["sevre"], "No such command 'sevre'. Did you mean 'serve'?"),
        (["token", "Hello"], "No such command 'Hello'"),
    ],
)
def test_of_a_command_that_was_meant_no_prompt_is_spoken(capsys, argv, line):
    assert refused(capsys, *argv) == line


class Stdin(io.TextIOWrapper):
    def __init__(self, data: bytes, *, is_terminal: bool = False) -> None:
        super().__init__(io.BytesIO(data))
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.mark.parametrize(
    ("stdin", "message"),
    [
        (Stdin(b"", is_terminal=True), "nothing to do: give --input TEXT, or `serve`"),
        (None, "nothing to do: give --input TEXT, or `serve`"),
        (Stdin(b"\n"), "standard input is empty: give --input TEXT, or `serve`"),
        (Stdin(b"caf\xe9"), "standard input is not valid UTF-8 (at byte 3)"),
        (Stdin(b"x" * 641), "the prompt from standard input must have at most 640 bytes (64 for"),
    ],
)
def test_without_input_standard_input_must_have_a_prompt(capsys, monkeypatch, stdin, message):
    monkeypatch.setattr(sys, "stdin", stdin)
    assert refused(capsys, "--max-model-len", "10", "--max-tokens", "5").startswith(message)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--input", "x", "--grpc-port", "5"], "--grpc-port only means something to `serve`"),
        (["--input", "x", "--compute", "unix:a"], "--compute only means something to `serve`"),
        (["--serve", "--input", "x"], "--input means nothing to `serve`"),
        (["serve", "--compute", "unix:a", "--block-size", "8"], "--block-size means nothing with"),
        (["--top-p", "0.5", "serve"], "--top-p means nothing to `serve`"),
    ],
)
def test_a_flag_that_would_do_nothing_is_refused(capsys, argv, message):
    assert refused(capsys, *argv).startswith(message)


def test_an_unknown_key_of_the_file_is_a_warning_by_name(capsys, tmp_path):
    path = tmp_path / "c.json"
    path.write_text('{"block_sise": 3, "max_tokens": 0}')
    assert main(["--config", str(path), "--input", "x"]) == 2
    warning, error = capsys.readouterr().err.splitlines()
    assert warning == (
        f"hetero-infer: warning: {path}: unknown key 'block_sise' is ignored: did you mean "
        "'block_size'?"
    )
    assert error.endswith("must be at least 1, got 0")


def test_flags_before_the_command_serve_count_and_those_after_it_count_more(capsys):
    assert "got 70001" in refused(capsys, "--grpc-port", "70001", "serve")
    assert "got 70002" in refused(capsys, "--grpc-port", "70001", "serve", "--grpc-port", "70002")


def test_the_help_shows_every_flag_whole_with_its_default(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    shown = set(text.split())
    for cls in ALL_CONFIGS:
        for item in settings_of(cls):
            assert item.flag in shown or item.name in ("ready_fd", "lifeline_fd"), item.flag
    for flag in ("--config", "--json", "--serve", "--version"):
        assert flag in shown
    words = " ".join(text.replace("│", " ").split())
    for fact in (
        "beams of a beam search instead of sampling (1 to 10)",
        "samples of the prompt; of a beam search, its best answers (1 to 128; default 1)",
        "nucleus sampling threshold (greater than 0, at most 1; default 0.9)",
        "gRPC port; 0: any free one (0 to 65535; default 50051)",
        "default: drawn (0 to 2^64 - 1)",
    ):
        assert fact in words


def test_a_switch_may_be_turned_off_again_where_a_file_turns_it_on(capsys, tmp_path):
    path = tmp_path / "c.json"
    path.write_text('{"early_stopping": true}')
    argv = ["--config", str(path), "--input", "x", "--cache-salt", "x" * 257]
    assert refused(capsys, *argv).startswith("early_stopping means nothing without beam_width")
    assert refused(capsys, *argv, "--no-early-stopping").startswith("cache_salt must have at most")


@pytest.mark.spread(1)
@pytest.mark.parametrize("flag", ["--version", "--help"])
@pytest.mark.parametrize(
    ("redirection", "reason"),
    [("> /dev/full", "cannot write: No space left on device"), (">&-", "output is closed")],
)
def test_an_output_that_takes_nothing_is_one_line_and_status_1(flag, redirection, reason):
    command = f"{sys.executable} -m hetero_infer {flag} {redirection}"
    done = subprocess.run(["/bin/sh", "-c", command], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert reason in line


def test_the_version_is_that_of_the_distribution(capsys):
    assert main(["--version"]) == 0
    name, version = capsys.readouterr().out.split()
    assert name == "hetero-infer"
    assert version[0].isdigit()


@pytest.mark.parametrize("plane", ["control-plane", "compute-plane"])
def test_a_planes_arguments_are_its_own(capsys, plane):
    with pytest.raises(SystemExit) as caught:
        main([plane, "--help"])
    assert caught.value.code == 0
    assert "--lifeline-fd" in capsys.readouterr().out
