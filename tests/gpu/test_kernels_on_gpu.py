"""Every kernel on a GPU. `make gpu` checks every variant; this is the spread pytest runs."""

from __future__ import annotations

import pytest

from bench.gpu.cases import draw_cases
from bench.gpu.device import KernelLoader, why_no_device
from bench.gpu.numerics import check_case
from compute_plane.config import ComputePlaneConfig
from kernels.cuda.operations import all_variants

pytestmark = pytest.mark.gpu


VARIANTS = all_variants(every=False)


@pytest.fixture(scope="module")
def loader():
    reason = why_no_device()
    if reason is not None:
        pytest.skip(f"no CUDA device: {reason}")
    cache_dir = ComputePlaneConfig().kernel_cache_root / "cuda"
    made = KernelLoader(cache_dir, print, begins_early=True)
    made.prepare(VARIANTS)
    return made


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_a_kernel_is_right_steady_and_independent_of_the_batch(variant, loader):
    for case in draw_cases(variant):
        assert check_case(case, loader.run_case).faults == ()


def test_the_device_reports_no_local_memory(loader):
    for variant in VARIANTS:
        assert loader.load(variant).attributes()["local_bytes"] == 0
