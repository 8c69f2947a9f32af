"""`hetero-infer health` against either plane: a word on stdout, a status for who probes."""

from __future__ import annotations

import pytest

from hetero_infer.cli import main


def test_health_says_that_a_control_plane_serves(run, server):
    done = run("health", "--target", server)
    assert (done.returncode, done.stdout, done.stderr) == (0, "SERVING\n", "")


def test_health_says_that_a_compute_plane_serves(run, server):
    compute = str(server).replace("control.sock", "compute.sock")
    done = run("health", "--target", compute, "--service", "hetero.compute.v1.ComputeService")
    assert (done.returncode, done.stdout, done.stderr) == (0, "SERVING\n", "")


def test_health_of_a_service_that_is_not_there_is_told_by_the_status(run, server):
    done = run("health", "--target", server, "--service", "no.such.Service")
    assert (done.returncode, done.stdout) == (1, f"{server} has no service no.such.Service\n")


def test_health_of_a_plane_that_is_not_there_is_told_by_the_status(run, tmp_path):
    done = run("health", "--target", f"unix:{tmp_path}/nobody.sock")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("hetero-infer: error: nothing answers at unix:")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["health", "--target", "nowhere"], "target: expected unix:PATH or HOST:PORT"),
        (["health", "--timeout", "0"], "timeout (from --timeout) must be at least 0.001, got 0"),
        (["--max-tokens", "3", "health"], "--max-tokens means nothing to `health`"),
        (["--json", "compute-plane"], "options must come after control-plane"),
    ],
)
def test_a_question_that_makes_no_sense_is_the_callers_error(capsys, arguments, words):
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
