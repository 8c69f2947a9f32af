"""Every kernel on a GPU. `make gpu` checks every variant; this is the spread pytest runs."""

from __future__ import annotations

import pytest

from bench.gpu.cases import draw_cases
from bench.gpu.device import KernelLoader, why_no_device
from bench.gpu.numerics import check_case
from kernels.cuda.operations import all_variants

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def loader(tmp_path_factory):
    reason = why_no_device()
    if reason is not None:
        pytest.skip(f"no CUDA device: {reason}")
    cache_dir = tmp_path_factory.mktemp("cuda")
    cache_dir.chmod(0o700)
    return KernelLoader(cache_dir, print)


@pytest.mark.parametrize("variant", all_variants(every=False), ids=lambda v: v.name)
def test_a_kernel_is_right_steady_and_independent_of_the_batch(variant, loader):
    for case in draw_cases(variant):
        assert check_case(case, loader.run_case).faults == ()


def test_the_device_reports_no_local_memory(loader):
    for variant in all_variants(every=False):
        assert loader.load(variant).attributes()["local_bytes"] == 0
