"""How an engine's compute plane is replaced while it lives, and what is left when it ends."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import weakref

import pytest

from hetero_infer import (
    EngineConfig,
    EngineError,
    GenerationParams,
    InferenceEngine,
)
from hetero_infer.compute_beside import ComputeBeside
from hetero_infer.plane_process import PlaneStartError
from tests.hetero_infer.small_engine import SMALL, run_alone

PATIENCE_S = 120.0


@pytest.mark.wide
def test_a_compute_plane_that_dies_is_replaced_and_nothing_is_lost(capsys):
    params = GenerationParams(max_tokens=300, seed=9, ignore_eos=True)
    with InferenceEngine(EngineConfig(executor="simulated")) as engine:
        undisturbed = run_alone(engine, "Hello", params)
        engine.submit_request("Hello", params)
        for _ in range(40):
            engine.step()
        os.kill(engine._compute.pid, signal.SIGKILL)
        (result,) = engine.run()
        assert result.output_tokens == undisturbed.output_tokens
    told = capsys.readouterr().err
    assert "the compute plane was ended by SIGKILL; starting another one" in told
    assert '"level": "error"' not in told  # what is made good again is none
    assert "open refused" not in told


def test_closing_ends_the_compute_plane_and_may_be_repeated():
    engine = InferenceEngine(EngineConfig(executor="simulated"))
    pid = engine._compute.pid
    engine.submit_request("a", GenerationParams(max_tokens=500))
    engine.step()
    engine.close()
    engine.close()
    assert not os.path.exists(f"/proc/{pid}")
    assert not engine.has_pending_work()
    with pytest.raises(EngineError, match="closed"):
        engine.submit_request("a")


def test_an_engine_that_nobody_holds_ends_its_compute_plane():
    engine = InferenceEngine(EngineConfig(executor="simulated"))
    engine.submit_request("a", GenerationParams(max_tokens=5))
    engine.run()
    pid, alive = engine._compute.pid, weakref.ref(engine)
    del engine
    gc.collect()
    assert alive() is None
    assert not os.path.exists(f"/proc/{pid}")


@pytest.mark.wide
def test_a_program_that_closes_nothing_leaves_nothing_behind_and_is_not_warned():
    program = """
        from hetero_infer import EngineConfig, GenerationParams, InferenceEngine
        engine = InferenceEngine(EngineConfig(executor="simulated"))
        request_id = engine.submit_request(
            "Hello, world!", GenerationParams(max_tokens=50, temperature=0.8, ignore_eos=True)
        )
        for result in engine.run():
            assert result.request_id == request_id
            print(result.generated_tokens > 0, engine._compute.pid)
    """
    result = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    is_generated, pid = result.stdout.split()
    assert is_generated == "True"
    assert not os.path.exists(f"/proc/{pid}")


@pytest.mark.wide
def test_a_plane_that_dies_before_the_engine_knows_it_is_replaced(monkeypatch, capsys):
    kill_once = [lambda plane: plane._plane.kill()]
    started = ComputeBeside.__init__

    def start_and_die(self, config):
        started(self, config)
        kill_once.pop()(self)

    monkeypatch.setattr(ComputeBeside, "__init__", start_and_die)
    with InferenceEngine(SMALL) as engine:
        assert run_alone(engine, "a", GenerationParams(max_tokens=2)).success
    assert "starting another one" in capsys.readouterr().err


@pytest.mark.wide
def test_a_fork_cannot_use_the_engine_and_does_no_harm_to_it():
    program = """
        import os
        from hetero_infer import EngineConfig, EngineError, GenerationParams, InferenceEngine
        engine = InferenceEngine(EngineConfig(executor="simulated"))
        engine.submit_request("Hello", GenerationParams(max_tokens=5))
        child = os.fork()
        for use in (engine.step, engine.run, lambda: engine.submit_request("x")):
            try:
                use()
            except EngineError as error:
                assert not child and "belongs to the process that made it" in error.message
            else:
                assert child
        if child:
            assert os.waitpid(child, 0)[1] == 0
            assert [result.success for result in engine.run()] == [True]
            print("fine")
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (result.returncode, result.stdout) == (0, "fine\n"), result.stderr


@pytest.mark.wide
def test_a_compute_plane_that_cannot_start_says_why():
    with pytest.raises(PlaneStartError) as caught:
        InferenceEngine(SMALL, executor="no_such_module:Thing")
    assert "no_such_module:Thing cannot be imported" in caught.value.output[-1]
    assert str(caught.value) == f"{caught.value.message}: {caught.value.output[-1]}"
