"""How the report loads kernels: as its device takes them, and begun early where that is checked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from bench.gpu import device, kernel_parts, needed_kernels, sanitizers
from bench.gpu.cases import draw_cases
from bench.gpu.device import KernelLoader
from bench.gpu.findings import Findings, PartOptions
from kernels.cuda import build, operations
from kernels.cuda.embedding import EmbeddingVariant
from kernels.cuda.errors import MissingToolchainError
from kernels.cuda.fitted_ptx import fitted
from kernels.cuda.gate_mul import GateMulVariant
from kernels.cuda.latent_attention import LatentDecodeVariant, LatentPrefillVariant
from kernels.cuda.rms_norm import RmsNormVariant

NORM, EMBEDDING = RmsNormVariant("float32", 256), EmbeddingVariant("float32")
WAITING_PTX = ".version 8.0\n.target sm_80\n\tgriddepcontrol.wait;\n\tret;\n"


class Loaded:
    """Stands for a LoadedKernel."""

    def __init__(self, variant, image, *, begins_early=False):
        self.variant, self.image, self.begins_early = variant, image, begins_early


@pytest.fixture
def loader(monkeypatch, tmp_path):
    """Make a loader of a device that is not there, of a capability."""

    def make(capability, **told):
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
        monkeypatch.setattr(device, "LoadedKernel", Loaded)
        return KernelLoader(tmp_path / "cache", print, **told)

    return make


@pytest.mark.parametrize(
    ("capability", "told", "expected"),
    [
        ((9, 0), {"begins_early": True}, [True, False]),
        ((10, 0), {"begins_early": True}, [True, False]),
        ((8, 0), {"begins_early": True}, [False, False]),  # the wait is taken out of kernels there
        ((9, 0), {}, [False, False]),
    ],
)
def test_kernels_that_wait_begin_early_where_the_device_lets_them_and_it_is_asked_for(
    loader, monkeypatch, capability, told, expected
):
    monkeypatch.setattr(build, "build", lambda *_, **__: b"code")
    made = loader(capability, **told)
    assert [made.load(one).begins_early for one in (NORM, EMBEDDING)] == expected


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_what_the_driver_compiles_is_fitted_to_the_device(loader, monkeypatch, capability):
    def build_nothing(*_, **__):
        raise MissingToolchainError("the library nvJitLink")

    monkeypatch.setattr(build, "build", build_nothing)
    monkeypatch.setattr(build, "compile_ptx", lambda _: WAITING_PTX)
    made = loader(capability)
    image = made.load(NORM).image.decode()
    assert image == fitted(WAITING_PTX, capability) != WAITING_PTX
    assert ("griddepcontrol" in image) == (".target sm_90" in image) == (capability >= (9, 0))
    assert made.made_by == {NORM.name: "the driver"}


class NotedLoader:
    """Stands for a KernelLoader that has nothing to load. `told`: of all that were made."""

    told: list[dict[str, object]]

    def __init__(self, *_, **told):
        self.told.append(told)

    def prepare(self, _):
        pass

    def run_case(self, _):
        raise AssertionError


@pytest.fixture
def told(monkeypatch):
    """What loaders are told from now on; there is nothing for them to load."""
    monkeypatch.setattr(NotedLoader, "told", [], raising=False)
    monkeypatch.setattr(kernel_parts, "KernelLoader", NotedLoader)
    monkeypatch.setattr(device, "KernelLoader", NotedLoader)
    monkeypatch.setattr(needed_kernels, "needed_variants", list)
    monkeypatch.setattr(operations, "all_variants", lambda **_: [])
    return NotedLoader.told


@pytest.mark.parametrize("part", [kernel_parts.numerics, kernel_parts.every_variant])
def test_numerics_are_of_launches_as_steps_have_them(told, part):
    part(Findings(), PartOptions(Path("not used"), 3600))
    assert told == [{"begins_early": True}]


class IdleLoader(NotedLoader):
    """Stands for a KernelLoader whose kernels do nothing."""

    told: ClassVar[list[dict[str, object]]] = []

    def run_case(self, case):
        return {name: case.arrays[name] for name in case.written}


def test_cases_are_counted_by_the_operation_that_they_are_of(monkeypatch, capsys):
    """Names of kernels are not those of operations."""
    variants = [
        LatentDecodeVariant("float32", 1, 256, 32, 16),
        LatentPrefillVariant("float32", 1, 256, 32, 16),
        GateMulVariant("float32"),
    ]
    monkeypatch.setattr(kernel_parts, "KernelLoader", IdleLoader)
    monkeypatch.setattr(needed_kernels, "needed_variants", lambda: variants)

    found = Findings()
    kernel_parts.numerics(found, PartOptions(Path("not used"), 3600))

    cases = [len(draw_cases(variant)) for variant in variants]
    counts = dict(re.findall(r"numerics (\w+): (\d+) cases", capsys.readouterr().out))
    assert set(counts) == set(operations.OPERATIONS)
    assert {name: int(count) for name, count in counts.items() if count != "0"} == {
        "latent_attention": cases[0] + cases[1], "gate_mul": cases[2],
    }  # fmt: skip
    assert len(found.values["numerics"]) == sum(cases)


def test_every_variant_is_of_the_operation_that_makes_it():
    for name, module in operations.OPERATIONS.items():
        assert {operations.operation_of(one) for one in module.variants(every=True)} == {name}


def test_sanitizers_watch_launches_in_turn(told, tmp_path):
    assert sanitizers.main([str(tmp_path), "60"]) == 0
    assert told == [{}]
