"""Kernels are built on all cores, and another machine's code is taken over for the same sources."""

from __future__ import annotations

import pytest

from kernels.cuda import build, build_ahead
from kernels.cuda.errors import CacheDirectoryError, MissingToolchainError
from kernels.cuda.gate_mul import GateMulVariant
from kernels.cuda.rms_norm import RmsNormVariant

HOPPER = (9, 0)
SILU, NORM = GateMulVariant("float32"), RmsNormVariant("float32", 256, adds_residual=False)


@pytest.fixture
def cache_dir(tmp_path):
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o700)
    return directory


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(build_ahead.os, "sched_getaffinity", lambda _: {0, 1})


@pytest.mark.wide
@pytest.mark.usefixtures("two_cores")
def test_what_the_cache_lacks_is_built_by_processes_and_needs_no_compiler_then(
    cache_dir, monkeypatch
):
    said = []
    variants = [SILU, NORM, SILU]
    assert build_ahead.build_ahead(variants, HOPPER, cache_dir, progress=said.append) == []
    assert said == ["compiling 2 kernels for sm_90 with 2 processes"]
    monkeypatch.setattr(build, "compile_ptx", None)  # it would be called in vain
    for variant in variants:
        assert build.build(variant, HOPPER, cache_dir).startswith(b"\x7fELF")
    assert build_ahead.build_ahead(variants, HOPPER, cache_dir, progress=said.append) == []
    assert len(said) == 1


def test_a_kernel_that_does_not_compile_is_a_line(cache_dir):
    line = build_ahead._build_one((SILU, (1, 0), cache_dir))
    assert line.startswith(f"{SILU.name}: {SILU.name} for sm_10: ERROR_UNSUPPORTED_ARCH")


def test_without_a_compiler_nothing_is_done(cache_dir, monkeypatch):
    def refuse():
        raise MissingToolchainError("the library nvvm")

    monkeypatch.setattr(build, "require_toolchain", refuse)
    assert build_ahead.build_ahead([SILU, NORM], HOPPER, cache_dir) == []
    assert list(cache_dir.iterdir()) == []


def test_what_another_compiler_made_of_the_same_source_counts_as_this_ones(
    cache_dir, tmp_path, monkeypatch
):
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(build, "toolchain_hash", lambda: "another")
        there = tmp_path / "carried"
        build.store(SILU, HOPPER, there, b"made there")
    assert not build.is_built(SILU, HOPPER, cache_dir)
    assert build_ahead.take_over(there, cache_dir) == 1
    assert build.is_built(SILU, HOPPER, cache_dir)
    assert build.build(SILU, HOPPER, cache_dir) == b"made there"
    assert not build.is_built(SILU, (8, 0), cache_dir)


def test_a_cache_that_others_can_write_to_takes_nothing_over(cache_dir, tmp_path):
    cache_dir.chmod(0o777)
    with pytest.raises(CacheDirectoryError, match="must be private"):
        build_ahead.take_over(tmp_path, cache_dir)
