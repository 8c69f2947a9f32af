"""The garbage collector stays away from compilations, and comes back."""

from __future__ import annotations

import gc

import pytest

from kernels.cpu import compiled
from kernels.cuda import build
from kernels.cuda.rms_norm import RmsNormVariant
from kernels.uncollected import uncollected


@pytest.fixture(autouse=True)
def collector_as_before():
    was_enabled = gc.isenabled()
    yield
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_afterwards_what_it_was_also_after_an_error(enabled):
    (gc.enable if enabled else gc.disable)()

    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled() is enabled
    with pytest.raises(ValueError, match="refused"), uncollected():
        raise ValueError("refused")
    assert gc.isenabled() is enabled


class Seen(Exception):
    """Whether the collector was enabled when the compiler was called."""


def compiler(*_, **__):
    raise Seen(gc.isenabled())


def test_it_is_away_while_a_cuda_kernel_is_compiled(monkeypatch):
    monkeypatch.setattr("numba.cuda.compile", compiler)
    gc.enable()
    with pytest.raises(Seen, match="False"):
        build.compile_ptx(RmsNormVariant("float16", 64))
    assert gc.isenabled()


def test_it_is_away_while_a_cpu_kernel_is_compiled(monkeypatch):
    monkeypatch.setattr(compiled.KernelFunction, "object_file", compiler)
    gc.enable()
    with pytest.raises(Seen, match="False"):
        compiled.object_code("row_inputs.normed_rows")
    assert gc.isenabled()
