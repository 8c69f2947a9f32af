"""Which kernels a bundle gets: those that are checked, and those that only whole models run on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from bench.gpu import expected_logits, needed_kernels
from bench.gpu.architecture_shapes import SHAPES
from kernels.cuda import build
from kernels.cuda.gate_mul import GateMulVariant
from kernels.cuda.variant import Variant
from tests.gpu import kernels_of_suites

ANSWER = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Variant]:
    """What is built from now on; none of it is."""
    found: list[Variant] = []

    def build_ahead(variants: Sequence[Variant], *_: object, **__: object) -> list[str]:
        found.extend(variants)
        return []

    monkeypatch.setattr(needed_kernels, "build_ahead", build_ahead)
    monkeypatch.setattr(needed_kernels.Runs, "expected", lambda *_: [ANSWER])
    monkeypatch.setattr(build, "build", lambda *_, **__: b"")
    monkeypatch.setattr(build, "require_toolchain", lambda: None)
    return found


@pytest.mark.wide
def test_kernels_of_the_suites_models_are_built_and_not_checked_one_by_one(
    built: list[Variant], tmp_path: Path
) -> None:
    assert needed_kernels.main([str(tmp_path)]) == 0
    for shape in SHAPES:
        (logits,) = expected_logits.read(tmp_path, shape) or []
        np.testing.assert_array_equal(logits, ANSWER)
    assert len(set(built)) == len(built)
    own = set(kernels_of_suites.variants())
    assert set(needed_kernels.built_variants()) | own == set(built)
    assert len(own - set(needed_kernels.needed_variants())) > 50


def test_without_the_tests_the_others_are_built(
    built: list[Variant],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    silu: Variant = GateMulVariant("float32")
    monkeypatch.setattr(needed_kernels, "SUITES", "no_such_tests.here")
    monkeypatch.setattr(needed_kernels, "built_variants", lambda: [silu])
    assert needed_kernels.main([str(tmp_path)]) == 0
    assert built == [silu]
    assert (
        "not built: ModuleNotFoundError: No module named 'no_such_tests'" in capsys.readouterr().out
    )


def test_every_kind_of_company_that_runs_on_a_device_is_among_them() -> None:
    names = [small.name for small in kernels_of_suites.small_models()]
    kinds = set(kernels_of_suites.companies.KINDS)
    assert {"faults", "crowds", "crowds, DeltaNet", "replays", "latents in Q4_0"} <= set(names)
    assert kinds <= set(names)
